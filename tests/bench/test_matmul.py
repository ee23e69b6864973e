import dataclasses
import json

import pytest
import torch

from ds_sparse.bench import matmul, operations
from ds_sparse.bench.floors import Ceilings
from ds_sparse.bench.machine import DIRECTIONS, FORWARD
from ds_sparse.bench.operations import Row
from ds_sparse.cli import main

CASE = matmul.Case("bslongformer", block=16, dtype="fp32", heads=2, seq_len=128, head_dim=16)
CPU = torch.device("cpu")


def test_rows_compare_with_their_dense_counterpart():
    result = matmul.run_case(CASE, list(matmul.DENSE), CPU, repeats=3, seconds=60)
    measured = [row for row in result.rows if not row.reason]
    times = {(row.name, row.direction): row.milliseconds for row in measured}
    assert {"sdd", "softmax", "dsd", "dds", "attention", "loop over block rows"} <= {row.name for row in measured}
    for row in measured:
        dense = times[row.dense, row.direction]
        assert row.rounds == 3
        assert row.to_dense == pytest.approx(row.milliseconds / dense)


def test_what_is_not_asked_for_is_not_measured():
    result = matmul.run_case(CASE, ["softmax"], CPU, repeats=2, seconds=60)
    assert {row.name for row in result.rows} == {"softmax", "dense softmax", "torch.sparse softmax"}
    assert [row.direction for row in result.rows if row.name == "softmax"] == list(DIRECTIONS)


def test_all_competitors_of_an_operation_agree():
    layout = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.4
    layout |= torch.eye(8, dtype=torch.bool)
    competitors, _ = matmul.make_competitors(CASE, layout, list(matmul.DENSE))
    outputs = {runner.name: runner.call(*runner.inputs) for runner in competitors}
    for name in ("SDPA bool mask", "loop over block rows"):
        torch.testing.assert_close(outputs["attention"], outputs[name])
    torch.testing.assert_close(outputs["SDPA dense"], outputs["dense attention in parts"])
    torch.testing.assert_close(outputs["dense p @ v"].mT, outputs["dense v^T @ p^T"])
    torch.testing.assert_close(outputs["SDPA dense"], outputs["dense p @ v"])
    torch.testing.assert_close(outputs["dsd"].mT, outputs["dds"])
    torch.testing.assert_close(outputs["attention"], outputs["dsd"])


def test_torch_sparse_is_named_with_the_reason(monkeypatch):
    result = matmul.run_case(CASE, ["sdd", "dsd"], CPU, repeats=2, seconds=60)
    assert list(matmul.table(result))[-1].startswith("torch.sparse sdd, torch.sparse dsd: no time: on a GPU only")

    def operations(layout, block, matrices, dtype):
        ours = matmul.our_operations(layout, block, CASE.head_dim)
        return ours | {"dsd": lambda probs, value: ours["dsd"](probs, value) * 1.001}

    monkeypatch.setattr(matmul, "bsr_operations", operations)
    result = matmul.run_case(CASE, ["sdd", "dsd"], CPU, repeats=2, seconds=60)
    lines = list(matmul.table(result))
    assert sum(line.startswith("torch.sparse sdd ") for line in lines) == 1
    assert any(line.startswith("torch.sparse dsd: no time: output of dsd, part ") for line in lines)
    assert any(line.startswith("torch.sparse sdd: no backward or forward+backward: ") for line in lines)


@pytest.mark.parametrize("wrong", [0, -1])
def test_of_torch_sparse_the_call_that_is_timed_is_verified(monkeypatch, wrong):
    """Wrong is one head of the first or the last of many sequences."""
    made = []

    def operations(layout, block, matrices, dtype):
        def spoiled(operation):
            def call(*inputs):
                output = operation(*inputs)
                output.view(matrices, -1)[wrong] *= 1.001
                calls.append((call, inputs))
                return output

            return call

        calls = []
        made.append(calls)
        return {name: spoiled(call) for name, call in matmul.our_operations(layout, block, CASE.head_dim).items()}

    monkeypatch.setattr(matmul, "bsr_operations", operations)
    case = dataclasses.replace(CASE, batch=5)
    competitors, absent = matmul.make_competitors(case, matmul.make_layout("fixed", 16, 128), list(matmul.DENSE))
    assert len(made) == 1
    timed = {runner.name: runner.inputs for runner in competitors if runner.name in matmul.DENSE}
    for name, (_, inputs) in zip(matmul.DENSE, made[0], strict=True):
        assert all(mine is theirs for mine, theirs in zip(timed[name], inputs, strict=True))
    part = {0: 1, -1: 2}[wrong]
    assert {row.name: row.reason.split(" has ")[0] for row in absent} == {
        f"torch.sparse {name}": f"output of {name}, part {part} of 2," for name in matmul.DENSE
    }


def test_failures_are_of_whom_they_are(monkeypatch):
    """What torch.sparse raises is a line of the table; what preparing and verifying it takes is not its failure."""

    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    def operations(layout, block, matrices, dtype):
        return matmul.our_operations(layout, block, CASE.head_dim) | {"dsd": fails}

    monkeypatch.setattr(matmul, "bsr_operations", operations)
    result = matmul.run_case(CASE, ["sdd", "dsd"], CPU, repeats=2, seconds=60)
    assert "torch.sparse dsd: no time: OutOfMemoryError: out of memory" in list(matmul.table(result))
    for ours in ("bsr_operations", "verify_ends"):
        with monkeypatch.context() as patch:
            patch.setattr(matmul, ours, fails)
            with pytest.raises(torch.OutOfMemoryError):
                matmul.run_case(CASE, ["sdd"], CPU, repeats=2, seconds=60)


def gpu_result(ms: float, to_floor: float, to_dense: float = 0.5) -> matmul.Result:
    rows = []
    for direction in DIRECTIONS:
        dense = ms / to_dense
        rows += [
            Row("sdd", direction, "dense q @ k^T", ms, to_dense, ms / to_floor, to_floor, "L2", 3),
            Row("dense q @ k^T", direction, "dense q @ k^T", dense, 1, ms / to_floor, dense / ms * to_floor, "L2", 3),
        ]
    rows.append(Row("torch.sparse sdd", FORWARD, "dense q @ k^T", 2 * ms, 2 * to_dense, ms / to_floor, 3, "L2", 3))
    return matmul.Result(CASE, 0.25, rows)


def without_floor(result: matmul.Result) -> matmul.Result:
    rows = [dataclasses.replace(row, floor_ms=None, to_floor=None, bound="") for row in result.rows]
    return dataclasses.replace(result, rows=rows)


def test_share_of_the_floor_and_what_binds_it_are_printed():
    result = gpu_result(0.1, to_floor=1.25)
    (line,) = (line for line in matmul.table(result) if line.startswith("sdd "))
    assert line.split()[1:5] == ["0.100", "0.500", "80%", "L2"]
    assert "break-even forward / backward / forward+backward: sdd 50.0% / 50.0% / 50.0%" in matmul.table(result)
    heading, *_, row = matmul.summary([result])
    assert heading.startswith("ms (of floor)") and "0.100 (80%)" in row


def test_without_a_floor_there_is_no_column_of_it():
    floorless = without_floor(gpu_result(0.1, to_floor=1.25))
    _, _, heading, *lines = matmul.table(floorless)
    assert heading.split() == ["ms", "x", "dense"] * 3
    (line,) = (line for line in lines if line.startswith("sdd "))
    assert line.split()[1:] == ["0.100", "0.500"] * 3
    assert line.index("0.500") + len("0.500") == heading.index("dense") + len("dense")
    heading, *_, row = matmul.summary([floorless])
    assert heading.startswith("ms (x dense)") and "0.100 (0.50)" in row


def test_it_is_said_how_often_we_are_faster():
    results = [gpu_result(0.1, 1.25), gpu_result(0.1, 1.26, to_dense=1.5), gpu_result(0.04, 3)]
    assert list(matmul.verdicts(results)) == [
        "sdd forward: faster than dense q @ k^T in 2 of 3, faster than torch.sparse sdd in 3 of 3",
        "sdd backward: faster than dense q @ k^T in 2 of 3",
    ]


def test_on_a_gpu_as_many_sequences_as_there_is_room_for():
    cases = matmul.grid(["fixed"], [64], ["bf16"], [4096, 16384], [64, 128], heads=4, batch=None)
    assert [(case.seq_len, case.head_dim, case.batch) for case in cases] == [
        (4096, 64, 12), (4096, 128, 12), (16384, 64, 1), (16384, 128, 1),
    ]  # fmt: skip
    assert [case.batch for case in matmul.grid(["fixed"], [64], ["bf16"], [16384], [64], 4, batch=2)] == [2]


@pytest.mark.parametrize("name", ["sdd", "softmax", "dsd", "dds", "attention"])
def test_a_wrong_result_is_not_timed(spoil, capsys, name):
    spoil(matmul, name)
    status = main("bench matmul --layout fixed --block 16 --dtype fp32 --seq-len 128 --heads 2".split())
    assert status == 1
    assert f"output of {name} has an RMS error" in capsys.readouterr().err


def test_command_prints_a_table_and_writes_the_rows(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = "bench matmul --layout fixed --block 16,32 --dtype fp32,bf16 --seq-len 128,192 --heads 2 --repeats 2"
    assert main([*arguments.split(), "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert {(row["block"], row["dtype"], row["seq_len"]) for row in written["rows"]} == {
        (block, dtype, tokens) for block in (16, 32) for dtype in ("fp32", "bf16") for tokens in (128, 192)
    }
    assert written["torch"] == torch.__version__
    printed = printed_again(path)
    assert "floor" not in printed
    assert "sdd backward: faster than dense q @ k^T in " in printed
    assert "break-even" in printed
    assert "threads" in printed


@pytest.mark.parametrize("to_dense, said", [(0.5, "40.0%"), (0.1, "none")])
def test_break_even_is_where_dense_takes_as_long(to_dense: float, said: str):
    assert matmul.break_even(Row("sdd", FORWARD, "dense q @ k^T", to_dense=to_dense), live=0.2) == said
    assert matmul.break_even(None, live=0.2) == "-"


def test_a_length_that_does_not_fit_ends_in_a_sentence(capsys):
    assert main("bench matmul --block 16 --seq-len 100".split()) == 1
    assert "100" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["24", "4", "256", "0", "x"])
def test_a_block_that_no_layout_has_ends_in_a_sentence(capsys, text):
    with pytest.raises(SystemExit):
        main(["bench", "matmul", "--block", f"16,{text}"])
    printed = capsys.readouterr()
    assert not printed.out
    assert f"argument --block: {text!r} is not one of 8, 16, 32, 64, 128" in printed.err


@pytest.mark.parametrize(("l2_rate", "said"), [(8.3e9, "L2 to SMs 8.30 TB/s"), (None, "L2 to SMs not measured")])
def test_rates_of_a_gpu_are_printed_and_written(tmp_path, printed_again, monkeypatch, l2_rate, said):
    """On a GPU that is none: its rates are given, and what is timed takes half a millisecond."""
    ceilings = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9, l2_bytes_per_ms=l2_rate)
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: ceilings)
    monkeypatch.setattr(operations, "time_of", lambda call, inputs, grad, direction, device: 0.5)
    monkeypatch.setattr(matmul, "run_case", on_cpu(matmul.run_case))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    path = tmp_path / "rows.json"
    arguments = "bench matmul --device cuda --layout random-25 --block 16 --seq-len 256 --batch 1 --repeats 1 --json"
    assert main([*arguments.split(), str(path)]) == 0
    printed = printed_again(path)
    assert printed.count(f"measured here in bf16: copy 4.30 TB/s, matrix product 790 TFLOP/s, {said}") == 1
    written = json.loads(path.read_text())
    assert written["ceilings"]["bf16"]["l2_bytes_per_ms"] == l2_rate
    assert {row["heads"] for row in written["rows"]} == set(matmul.DEFAULTS["cuda"]["heads"])
    assert {row["name"] for row in written["rows"] if row["name"] in matmul.DENSE} == {"sdd", "softmax", "dsd", "dds"}


def on_cpu(run_case):
    return lambda case, names, device, repeats, seconds: run_case(case, names, CPU, repeats, seconds)
