import json

import pytest
import torch

from ds_sparse import reference
from ds_sparse.bench import window
from ds_sparse.bench.machine import FORWARD, TRAIN
from ds_sparse.bench.operations import Row
from ds_sparse.cli import main

CASE = window.Case(seq_len=100, window=7, dtype="fp32", heads=2, head_dim=16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("reach", [0, 7, 99, 500])
def test_density_is_that_of_the_mask(reach):
    mask = reference.window_mask(100, (reach,))
    assert window.Case(100, reach, "fp32").density == pytest.approx(mask.double().mean().item())


@pytest.mark.parametrize("reach", [1, 7, 25, 64, 150])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_all_attention_is_the_same_function(monkeypatch, reach):
    # Compiled or not, FlexAttention is the same function.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = window.Case(100, reach, "fp32", heads=2, head_dim=16)
    competitors = window.make_competitors(case, list(window.PEERS), CPU)
    outputs = {x.name: x.call(*x.inputs) for x in competitors if x.dense == window.DENSE_ATTENTION}
    expected = outputs.pop("window_attention")
    dense = outputs.pop("SDPA dense")
    assert set(outputs) == {"attention in parts", "SDPA band mask", "sliding chunks", "FlexAttention"}
    for output in outputs.values():
        torch.testing.assert_close(output, expected)
    assert torch.allclose(dense, expected, atol=1e-5) == (reach >= 99)


def test_rows_compare_with_their_dense_counterpart():
    rows = window.run_case(CASE, ["sdpa-mask", "chunks"], CPU, repeats=3, seconds=60)
    times = {(row.name, row.direction): row.milliseconds for row in rows}
    assert {"window_matmul", "unwindow_matmul", "window_softmax", "window_attention"} <= {row.name for row in rows}
    for row in rows:
        assert row.to_dense == pytest.approx(row.milliseconds / times[row.dense, row.direction])
        assert row.to_floor is None


def test_what_has_no_backward_is_timed_forward(monkeypatch):
    monkeypatch.setitem(window.PEERS, "flex", ("FlexAttention", window.sliding_chunks))
    rows = window.run_case(CASE, ["flex"], CPU, repeats=3, seconds=60)
    assert [row.reason for row in rows if row.name == "FlexAttention"] == ["", "on a CPU it is forward only"]
    line, reason = (line for line in window.table(CASE, rows) if line.startswith("FlexAttention"))
    assert line.split()[-1] == "-"
    assert reason == "FlexAttention: no forward+backward: on a CPU it is forward only"


def test_floors_of_a_gpu_are_a_column():
    row = Row("window_matmul", FORWARD, "dense q @ k^T", 2.0, 0.5, 1.0, 2.0, "copy", 3)
    without = Row("window_matmul", TRAIN, "dense q @ k^T", reason="forward only")
    _, _, heading, line, _ = window.table(CASE, [row, without])
    assert heading.split() == ["ms", "x", "dense", "x", "floor"] * 2
    assert line.split() == ["window_matmul", "2.00", "0.500", "2.00", "-"]
    assert line.index("2.00", 30) + 4 == heading.index("x floor") + len("x floor")


@pytest.mark.parametrize(
    "name", ["window_matmul", "window_softmax", "unwindow_matmul", "window_attention", "attention in parts"]
)
def test_a_wrong_operation_is_not_timed(spoil, capsys, name):
    spoil(window, name)
    status = main("bench window --dtype fp32 --seq-len 128 --window 8 --heads 2 --peers chunks".split())
    assert status == 1
    assert f"output of {name} has an RMS error" in capsys.readouterr().err


def test_a_wrong_peer_is_not_timed(monkeypatch, capsys):
    one_more = window.Case(128, 9, "fp32", heads=2)
    monkeypatch.setitem(
        window.PEERS, "chunks", ("sliding chunks", lambda case, device: window.sliding_chunks(one_more, device))
    )
    assert main("bench window --dtype fp32 --seq-len 128 --window 8 --heads 2 --peers chunks".split()) == 1
    assert "output of sliding chunks, batch 0, head" in capsys.readouterr().err


def test_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = "bench window --dtype fp32,bf16 --seq-len 64,100 --window 8 --heads 2 --repeats 2 --peers sdpa-mask"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {(row["seq_len"], row["dtype"]) for row in written["rows"]} == {
        (n, dtype) for n in (64, 100) for dtype in ("fp32", "bf16")
    }
    assert written["torch"] == torch.__version__
    printed = printed_again(path)
    assert "floor" not in printed and "threads" in printed and "SDPA band mask" in printed
