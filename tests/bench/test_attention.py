import dataclasses
import json

import pytest
import torch

from ds_sparse.bench import attention, cases, peers
from ds_sparse.bench.attention import Result, Row
from ds_sparse.bench.cases import Case
from ds_sparse.bench.floors import Ceilings, Size
from ds_sparse.bench.machine import BACKWARD, FORWARD, TRAIN
from ds_sparse.cli import main

CPU = torch.device("cpu")
CASE = Case("toy", "random", block=16, batch=2, heads=2, seq_len=128, head_dim=16, options={"density": 0.4})


def measure(names, case=CASE, dtype="fp32"):
    return attention.run_case(case, names, CPU, dtype, repeats=3, seconds=60)


def measured(case, times, floor=1.0):
    """A result with these milliseconds forward of each peer, twice as many backward, and one floor for each way."""
    rows = [
        Row(peer, direction, ms * factor, 100 / factor, ms * factor / floor, ms / times["ds_sparse"], 3)
        for peer, ms in times.items()
        for direction, factor in ((FORWARD, 1), (BACKWARD, 2), (TRAIN, 3))
    ]
    return Result(case, "bf16", case.options["density"], dict.fromkeys(attention.DIRECTIONS, floor), {}, rows, {})


def test_rows_are_ratios_of_the_times():
    result = measure(["ds_sparse", "composition", "sdpa", "sdpa-mask"])
    assert result.density == pytest.approx(0.4, abs=0.1)
    assert len(result.rows) == 4 * 3
    scores = 2 * 2 * 128 * 128 * result.density
    for row in result.rows:
        ours, dense = result.row("ds_sparse", row.direction), result.row("sdpa", row.direction)
        flops = {FORWARD: 4, BACKWARD: 10, TRAIN: 14}[row.direction] * 16 * scores
        assert row.rounds == 3 and row.reason == ""
        assert row.tflops == pytest.approx(flops / row.milliseconds / 1e9)
        assert row.to_ours == pytest.approx(row.milliseconds / ours.milliseconds)
        assert row.to_floor == pytest.approx(row.milliseconds / (result.density * dense.milliseconds))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_is_held_to_what_plain_pytorch_reaches(dtype):
    result = measure(["ds_sparse", "composition", "sdpa", "sdpa-mask"], dtype=dtype)
    assert [row.reason for row in result.rows] == [""] * 12


def test_without_dense_attention_a_cpu_has_no_floor():
    result = measure(["ds_sparse"])
    assert result.floors == {}
    assert all(row.to_floor is None for row in result.rows)
    assert "floor " not in "\n".join(list(attention.table(result))[1:2])


def test_floors_of_a_gpu_come_from_its_ceilings(monkeypatch):
    """At 1 byte a millisecond: four operands forward, eight backward; L2 is as fast and brings keys and values."""
    layout, operand = torch.ones(1, 8, 8, dtype=torch.bool), 2 * 2 * 128 * 16 * 2
    size = Size.of(layout, 16, batch=2, heads=2, head_dim=16, itemsize=2)

    def floors(l2_rate):
        ceilings = Ceilings(bytes_per_ms=1, flops_per_ms=1e12, l2_bytes_per_ms=l2_rate)
        monkeypatch.setattr(Ceilings, "measure", lambda *_: ceilings)
        return attention.floors_of(size, torch.device("cuda"), torch.bfloat16, {})

    by_memory, by_l2 = floors(l2_rate=1)
    assert by_memory == {FORWARD: 4 * operand, BACKWARD: 8 * operand, TRAIN: 12 * operand}
    assert by_l2 == {FORWARD: 2 * operand, BACKWARD: 2 * operand}
    assert floors(l2_rate=None) == (by_memory, {})


class Spoiled(torch.autograd.Function):
    """The same value with a gradient that is not its own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda call: lambda q, k, v: call(q, k, v) * 1.001, "output"),
        (lambda call: lambda q, k, v: call(Spoiled.apply(q), k, v), "gradient of query"),
        (lambda call: lambda q, k, v: call(q, Spoiled.apply(k), v), "gradient of key"),
        (lambda call: lambda q, k, v: call(q, k, Spoiled.apply(v)), "gradient of value"),
        (lambda call: lambda q, k, v: call(q, k, v).index_fill(2, torch.tensor([127]), 0), "output, batch 0, head 0"),
    ],
)
def test_what_is_wrong_is_named_and_not_timed(monkeypatch, spoil, reason):
    right = peers.PEERS["composition"](peers.Problem(CASE, CASE.layout(), torch.float32))
    monkeypatch.setitem(peers.PEERS, "composition", lambda problem: peers.Peer(spoil(right.call)))
    result = measure(["ds_sparse", "composition"])
    assert result.row("ds_sparse", TRAIN) is not None
    for direction in attention.DIRECTIONS:
        assert result.row("composition", direction) is None
    reasons = {row.reason for row in result.rows if row.peer == "composition"}
    assert len(reasons) == 1
    assert reasons.pop().startswith(reason)
    assert f"composition       no time: {reason}" in "\n".join(attention.table(result))


def test_a_peer_without_a_backward_is_timed_forward(monkeypatch):
    whole = peers.PEERS["composition"]

    def half(problem):
        return peers.Peer(lambda *inputs: whole(problem).call(*inputs).detach(), no_backward="forward only")

    monkeypatch.setitem(peers.PEERS, "composition", half)
    result = measure(["ds_sparse", "composition"])
    assert result.row("composition", FORWARD) is not None
    assert result.row("composition", TRAIN) is None
    assert "composition       no backward or forward+backward: forward only" in "\n".join(attention.table(result))


@pytest.mark.slow("compiles FlexAttention for half a minute")
def test_flex_attention_is_timed_forward_on_a_cpu():
    case = Case("toy", "random", 16, 1, 2, 256, 16, {"density": 0.4})
    result = attention.run_case(case, ["ds_sparse", "flex"], torch.device("cpu"), "fp32", 2, 1.0)
    assert result.row("flex", "forward").milliseconds > 0
    assert [row.reason for row in result.rows if row.peer == "flex"][1:] == ["on a CPU it is forward only"] * 2


def test_a_peer_gets_the_memory_order_that_it_asks_for(monkeypatch):
    seen = []

    def tokens_first(problem):
        inner = peers.PEERS["sdpa"](problem).call

        def call(query, key, value):
            seen.extend(x.stride() for x in (query, key, value))
            return inner(query, key, value)

        return peers.Peer(call, dense=True, tokens_first=True)

    monkeypatch.setitem(peers.PEERS, "cudnn", tokens_first)
    assert measure(["cudnn"]).row("cudnn", TRAIN) is not None
    assert set(seen) == {(128 * 2 * 16, 16, 2 * 16, 1)}


def test_a_package_that_is_missing_and_a_failure_are_reasons(monkeypatch):
    def fails(problem):
        raise RuntimeError("no such kernel\nmuch more")

    def missing(problem):
        import no_such_package  # noqa: F401

    monkeypatch.setitem(peers.PEERS, "flex", fails)
    monkeypatch.setitem(peers.PEERS, "flash", missing)
    case = Case("toy", "random", 64, 1, 2, 128, 16, {"density": 1.0})
    result = measure(["flash", "flex"], case)
    assert {row.peer: row.reason for row in result.rows} == {
        "flash": "No module named 'no_such_package'",
        "flex": "RuntimeError: no such kernel",
    }


def test_the_summary_names_the_fastest_of_the_others():
    result = measured(CASE, {"ds_sparse": 1.0, "cudnn": 1.5, "flash": 1.25})
    heading, *lines = attention.summary([result])
    assert heading.split() == ["ds_sparse", "ms", "TFLOP/s", "x", "floor", "best", "peer"]
    assert [line.split() for line in lines] == [
        ["toy", "forward", "1.00", "100", "1.00", "flash", "1.25"],
        ["toy", "backward", "2.00", "50", "2.00", "flash", "1.25"],
    ]


def test_break_even_is_where_the_lines_cross():
    def result(block, density, dense):
        case = Case("", "random", block, 1, 1, 128, 16, {"density": density})
        return measured(case, {"ds_sparse": 1.0, "cudnn": dense})

    results = [
        *(result(16, tenths / 10, 2.0 ** (4 - tenths)) for tenths in (1, 3, 5, 7)),
        *(result(64, tenths / 10, 1.5) for tenths in (1, 9)),
        *(result(128, tenths / 10, 0.5) for tenths in (1, 9)),
    ]
    assert list(attention.break_even(results, "cudnn"))[1:] == [
        "block   16 0.40 / 0.40 / 0.40",
        "block   64 above 0.90 / above 0.90 / above 0.90",
        "block  128 below 0.10 / below 0.10 / below 0.10",
    ]


def test_growth_is_over_half_the_length_of_the_same_batch_and_heads():
    def result(heads, tokens, ms):
        return measured(Case("", "random", 64, 1, heads, tokens, 16, {"density": 0.5}), {"ds_sparse": ms})

    lines = list(attention.growth([result(2, 1024, 1.0), result(2, 2048, 2.1), result(1, 4096, 5.0)]))
    assert [line.split() for line in lines[1:]] == [
        ["1024", "1.00", "-", "2.00", "-", "3.00", "-"],
        ["2048", "2.10", "2.10", "4.20", "2.10", "6.30", "2.10"],
        ["4096", "5.00", "-", "10.00", "-", "15.00", "-"],
    ]


@pytest.mark.slow("verifies and times for two seconds")
def test_command_prints_tables_and_writes_the_rows(tmp_path, printed_again, monkeypatch):
    small = Case.small
    monkeypatch.setattr(Case, "small", lambda case: small(case, heads=2, seq_len=1024))
    path = tmp_path / "rows.json"
    arguments = "bench attention --cases longformer-64,random-64* --peers ds_sparse,sdpa,vsa --repeats 2 --json".split()
    assert main([*arguments, str(path)]) == 0
    written = json.loads(path.read_text())
    assert {row["name"] for row in written["rows"]} == {"longformer-64-1k", "random-64-1k"}
    assert written["torch"] == torch.__version__
    ours = [row for row in written["rows"] if (row["peer"], row["direction"]) == ("ds_sparse", BACKWARD)]
    assert all(row["to_floor"] == pytest.approx(row["milliseconds"] / row["floor_ms"]) for row in ours)
    assert {row["reason"] for row in written["rows"] if row["peer"] == "vsa"} == {"bf16 only"}
    printed = printed_again(path)
    assert "x floor" in printed and "threads" in printed and "longformer, block 64" in printed


def test_rates_of_a_gpu_are_printed_and_written(tmp_path, printed_again, monkeypatch):
    rates = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9, l2_bytes_per_ms=8.3e9)
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: rates)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(attention, "run_case", lambda case, *_: measured(case, {"ds_sparse": 1.0}))
    random = Case("random-64", "random", 64, 1, 1, 128, 16, {"density": 0.5})
    monkeypatch.setattr(cases, "TABLE", [random])
    path = tmp_path / "rows.json"
    assert main(["bench", "attention", "--device", "cuda", "--json", str(path)]) == 0
    said = "measured here in bf16: copy 4.30 TB/s, matrix product 790 TFLOP/s, L2 to SMs 8.30 TB/s"
    assert printed_again(path).splitlines().count(said) == 1
    assert json.loads(path.read_text())["ceilings"] == {"bf16": dataclasses.asdict(rates)}


def test_command_says_when_ours_is_wrong(capsys, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "ds_sparse", lambda problem: peers.Peer(lambda q, k, v: q + k + v))
    small = Case.small
    monkeypatch.setattr(Case, "small", lambda case: small(case, heads=1, seq_len=1024))
    assert main("bench attention --cases longformer-64 --peers ds_sparse,sdpa --quick".split()) == 1
    out, err = capsys.readouterr()
    assert "ds_sparse         no time: output, batch 0, head 0, part " in out
    assert "ds_sparse itself was wrong" in err


@pytest.mark.slow("verifies and times for two seconds")
def test_command_break_even_and_growth(tmp_path, printed_again, monkeypatch):
    small = Case.small
    monkeypatch.setattr(Case, "small", lambda case, **_: small(case, heads=1, seq_len=1024))
    to_json = ["--json", str(tmp_path / "rows.json")]
    assert main(["bench", "attention", *"--break-even --cases random-64-[19]0% --quick".split(), *to_json]) == 0
    assert "density at which sdpa is as fast" in printed_again(to_json[1])
    assert main(["bench", "attention", *"--growth --cases 8k,16k --quick".split(), *to_json]) == 0
    assert "x half" in printed_again(to_json[1])


def test_a_name_says_what_a_cpu_runs_and_what_is_cut_to_one_case_runs_once(capsys, monkeypatch):
    ran = []

    def run_case(case, *_):
        ran.append(case)
        return measured(dataclasses.replace(case, options={"density": 0.5}), {"ds_sparse": 1.0})

    monkeypatch.setattr(attention, "run_case", run_case)
    assert main("bench attention --cases fixed-16,fixed-16-16k,longformer-128-d128-2k".split()) == 0
    assert [(case.name, case.seq_len) for case in ran] == [("fixed-16-2k", 2048), ("longformer-128-d128-2k", 2048)]
    _, command, *printed = capsys.readouterr().out.splitlines()
    assert "16k" in command and "16k" not in "\n".join(printed)


def test_command_knows_its_cases_and_peers(capsys):
    assert main("bench attention --cases nothing-*".split()) == 1
    assert "--cases nothing-*: none of fixed-16" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main("bench attention --peers nobody".split())
    assert "'nobody' is not one of ds_sparse" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_peers_of_a_gpu_are_right():
    """Those that come with PyTorch, on a layout with partly live tiles of FlexAttention and a short list of heads."""
    case = Case("toy", "random", 64, 2, 2, 1024, 64, {"density": 0.3})
    names = ["ds_sparse", "composition", "cudnn", "flash", "flex"]
    result = attention.run_case(case, names, torch.device("cuda"), "bf16", repeats=3, seconds=20)
    assert {row.peer: row.reason for row in result.rows} == dict.fromkeys(names, "")
    assert set(result.floors) == set(attention.DIRECTIONS)
