import json

import pytest
import torch

from ds_sparse.bench import matmul
from ds_sparse.cli import main

CASE = matmul.Case("bslongformer", block=16, dtype="fp32", heads=2, seq_len=128, head_dim=16)
CPU = torch.device("cpu")


def test_floor_is_density_times_the_dense_time():
    live, rows = matmul.run_case(CASE, CPU, repeats=3, seconds=60)
    times = {(row.name, row.direction): row.milliseconds for row in rows}
    assert {"sdd", "softmax", "dsd", "dds", "attention", "loop over block rows"} <= {row.name for row in rows}
    for row in rows:
        dense = times[row.dense, row.direction]
        assert row.rounds == 3
        assert row.to_dense == pytest.approx(row.milliseconds / dense)
        assert row.to_floor == pytest.approx(row.milliseconds / (live * dense))


def test_all_competitors_for_attention_agree():
    layout = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    layout |= torch.eye(8, dtype=torch.bool)
    outputs = {runner.name: runner.call(*runner.inputs) for runner in matmul.make_competitors(CASE, layout)}
    for name in ("SDPA bool mask", "loop over block rows"):
        torch.testing.assert_close(outputs["attention"], outputs[name])
    torch.testing.assert_close(outputs["SDPA dense"], outputs["dense attention in parts"])


@pytest.mark.parametrize("name", ["sdd", "softmax", "dsd", "dds", "attention"])
def test_a_wrong_result_is_not_timed(spoil, capsys, name):
    spoil(matmul, name)
    status = main("bench matmul --layout fixed --block 16 --dtype fp32 --seq-len 128 --heads 2".split())
    assert status == 1
    assert f"output of {name} has an RMS error" in capsys.readouterr().err


def test_command_prints_a_table_and_writes_the_rows(tmp_path, capsys):
    path = tmp_path / "rows.json"
    arguments = "bench matmul --layout fixed --block 16,32 --dtype fp32,bf16 --seq-len 128 --heads 2 --repeats 2"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {(row["block"], row["dtype"]) for row in written["rows"]} == {
        (b, d) for b in (16, 32) for d in ("fp32", "bf16")
    }
    assert written["torch"] == torch.__version__
    printed = capsys.readouterr().out
    assert "x floor" in printed
    assert "break-even" in printed
    assert "threads" in printed


def test_a_length_that_does_not_fit_ends_in_a_sentence(capsys):
    assert main("bench matmul --block 16 --seq-len 100".split()) == 1
    assert "100" in capsys.readouterr().err
