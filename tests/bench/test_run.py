"""The one loop: what every operation verifies, times, prints and writes."""

import dataclasses
import json

import pytest
import torch

from ds_sparse.bench import OPERATIONS, attention, index, matmul, packed, run, selected, tokens, window
from ds_sparse.bench.cases import Case
from ds_sparse.bench.floors import Ceilings
from ds_sparse.bench.machine import BACKWARD, FORWARD, TRAIN
from ds_sparse.bench.registry import Peer, operation, tokens_first
from ds_sparse.bench.runs import WIDTH
from ds_sparse.cli import main

CASE = Case("toy", "random", 16, 2, 2, 128, 16, {"density": 0.4}, "fp32")

SMALL = {
    "attention": (CASE, ["ds_sparse", "composition", "sdpa", "sdpa-mask"]),
    "matmul": (matmul.Case("bslongformer", 16, "fp32", 3, 2, 128, 16), [*matmul.JOBS, *matmul.JOBS.values()]),
    "window": (window.Case(100, 7, "fp32", 1, 2, 16), [*window.JOBS, *window.JOBS.values(), "sliding chunks"]),
    "packed": (
        packed.Case("short-last", 100, "bigbird", 8, True, 384, 2, 16, "fp32"),
        ["ds_sparse", "unpacked", "padded", "sdpa-padded", "sdpa-mask"],
    ),
    "selected": (
        selected.Case("toy", 4, 2, 160, 16, 16, 4, "shared", True, "fp32"),
        ["ds_sparse", "sdpa", "sdpa-mask"],
    ),
    "tokens": (
        tokens.Case(96, 32, 2, 0.9, batch=2),
        ["masked", "gather", "jagged", "torch.sparse", "sparse_attn", "sdpa", "sdpa+mask"],
    ),
    "index": (index.Case("blocks-1k", "blocks", 1024, "fp32"), index.KINDS["blocks"][:3]),
}
"""A small case of each operation, and peers that a CPU has."""

LINES = {
    "attention": "attention --cases random-64,fixed-16 --peers ds_sparse,sdpa --dtype fp32,bf16 --quick",
    "matmul": "matmul --layout fixed --block 16,32 --dtype fp32,bf16 --seq-len 128 --heads 2 --repeats 2",
    "window": "window --dtype fp32,bf16 --seq-len 64,100 --window 8 --heads 2 --repeats 2 --peers sdpa-mask",
    "packed": "packed --cases window-2048,window-corpus-causal --peers sdpa-padded --repeats 1",
    "selected": "selected --cases msa-32k,encoder-32k --peers sdpa-mask --repeats 1",
    "tokens": "tokens --seq-len 64 --heads 2,1 --head-dim 16 --sparsity 75,99 --peers masked,gather,sparse_attn "
    "--repeats 2 --batch 2 --profile 1",
    "index": "index --cases layout-8k,documents-32k --repeats 1",
}
"""Short runs."""


@pytest.fixture
def shorter(monkeypatch):
    """A CPU's cases are cut even shorter."""
    monkeypatch.setattr(Case, "small", lambda case, **_: cut(case, heads=1, seq_len=1024))
    monkeypatch.setattr(packed.Case, "small", lambda case: cut_documents(case, heads=1, tokens=512))
    monkeypatch.setattr(selected.Case, "small", lambda case: cut_choice(case, heads=2, seq_len=1024))
    monkeypatch.setattr(index, "ON_CPU", 1024)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


cut, cut_documents, cut_choice = Case.small, packed.Case.small, selected.Case.small


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_peer_is_right_and_compared_with_the_others(measure, name):
    case, names = SMALL[name]
    result = measure(operation(name), case, names)
    times = {(row.name, row.direction): row.milliseconds for row in result.rows if not row.reason}
    ways = operation(name).directions if name != "index" else (index.CLOCK,)
    assert times.keys() == {(x, way) for x in names for way in ways}
    for row in (row for row in result.rows if row.direction in ways):
        assert row.rounds == 3 and row.milliseconds > 0
        if row.dense:
            assert row.to_dense == pytest.approx(row.milliseconds / times[row.dense, row.direction])
        if name in ("attention", "selected", "tokens"):
            ours = times[operation(name).ours[0], row.direction]
            assert row.to_ours == pytest.approx(row.milliseconds / ours)


class Spoiled(torch.autograd.Function):
    """A value and a gradient, one of which is not its own."""

    @staticmethod
    def forward(ctx, x, backward):
        return x.clone() if backward else x * 1.001

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.001, None


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "index"])
def test_whoever_is_wrong_is_named_and_not_timed(measure, monkeypatch, name, backward):
    case, names = SMALL[name]
    entry = operation(name)
    spoiled = names if name in ("attention", "packed", "selected") else (*entry.ours, "sliding chunks")
    for wrong in (x for x in names if x in spoiled):
        right = entry.peers[wrong]

        def build(problem, right=right, wrong=wrong):
            call = right(problem).call
            return dataclasses.replace(right(problem), call=lambda *inputs: Spoiled.apply(call(*inputs), backward))

        with monkeypatch.context() as patch:
            patch.setitem(entry.peers, wrong, build)
            others = names[-1:] if names[-1] != wrong else names[:1]
            result = measure(entry, case, [wrong, *others])
        (reason,) = {row.reason for row in result.rows if row.name == wrong}
        assert ("gradient" if backward else "output") in reason and "has an RMS error of" in reason
        assert result.measured == others


def test_a_mistake_in_one_operand_or_in_the_last_rows_is_found(measure, monkeypatch):
    right = attention.OPERATION.peers["composition"]
    for spoil, reason in (
        (lambda call: lambda q, k, v: call(Spoiled.apply(q, True), k, v), "gradient of query"),
        (lambda call: lambda q, k, v: call(q, k, Spoiled.apply(v, True)), "gradient of value"),
        (lambda call: lambda q, k, v: call(q, k, v).index_fill(2, torch.tensor([127]), 0), "output, batch 0, head 0"),
    ):
        monkeypatch.setitem(
            attention.OPERATION.peers, "composition", lambda problem, spoil=spoil: Peer(spoil(right(problem).call))
        )
        result = measure(attention.OPERATION, CASE, ["ds_sparse", "composition"])
        assert result.measured == ["ds_sparse"]
        assert f"composition       no time: {reason}" in "\n".join(attention.lines([result]))


def test_a_peer_without_a_backward_is_timed_forward(measure, monkeypatch):
    def half(problem):
        peer = attention.composition(problem)
        return Peer(lambda *inputs: peer.call(*inputs).detach(), no_backward="forward only")

    monkeypatch.setitem(attention.OPERATION.peers, "composition", half)
    result = measure(attention.OPERATION, CASE, ["ds_sparse", "composition"])
    assert result.row("composition", FORWARD) is not None and result.row("composition", TRAIN) is None
    said = "\n".join(attention.lines([result]))
    assert "composition       no backward or forward+backward: forward only" in said


def test_a_peer_gets_the_memory_order_that_it_asks_for(measure, monkeypatch):
    seen = []

    def build(problem):
        def call(query, key, value):
            seen.extend(x.stride() for x in (query, key, value))
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

        return Peer(call, dense=True, arranged=tokens_first)

    monkeypatch.setitem(attention.OPERATION.peers, "cudnn", build)
    assert measure(attention.OPERATION, CASE, ["cudnn"]).measured == ["cudnn"]
    assert set(seen) == {(128 * 2 * 16, 16, 2 * 16, 1)}


def test_what_is_missing_fails_or_fails_later_is_a_reason(measure, monkeypatch):
    calls = []

    def missing(problem):
        import no_such_package  # noqa: F401

    def fails(problem):
        raise RuntimeError("no such kernel\nmuch more")

    def later(problem):
        def call(*inputs):
            calls.append(1)
            if len(calls) > 4:
                raise torch.OutOfMemoryError("out of memory")
            return torch.nn.functional.scaled_dot_product_attention(*inputs)

        return Peer(call, dense=True)

    for name, build in {"flash": missing, "flex": fails, "cudnn": later}.items():
        monkeypatch.setitem(attention.OPERATION.peers, name, build)
    result = measure(attention.OPERATION, CASE, ["flash", "flex", "cudnn", "ds_sparse"])
    assert {row.name: row.reason for row in result.rows} == {
        "flash": "No module named 'no_such_package'",
        "flex": "RuntimeError: no such kernel",
        "cudnn": "OutOfMemoryError: out of memory",
        "ds_sparse": "",
    }
    assert len(calls) == 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_run_is_written_and_printed_again(shorter, tmp_path, printed_again, name):
    path = tmp_path / "rows.json"
    assert main(["bench", *LINES[name].split(), "--json", str(path)]) == 0
    printed = printed_again(path)
    assert " ".join(printed.split()).startswith(f"ds_sparse bench {LINES[name]} machine ") and " thread" in printed
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    written = json.loads(path.read_text())
    assert written["torch"] == torch.__version__ and written["operation"] == name
    needed = {"direction", "milliseconds", "rounds", "reason", operation(name).key, *operation(name).fields}
    case = {field.name for kind in (operation(name).case, operation(name).about) for field in dataclasses.fields(kind)}
    for row in written["rows"]:
        assert row.keys() == needed | case
        assert row["milliseconds"] or row["reason"]
    named = ("attention", "packed", "selected", "index")
    names = {row["name"] for row in written["rows"]} if name in named else {"-2k"}
    assert all(x.endswith(("-1k", "-0k", "-2k")) for x in names)


@pytest.mark.parametrize("name", OPERATIONS)
def test_where_ours_is_wrong_the_run_has_failed(shorter, monkeypatch, capsys, name):
    entry = operation(name)
    ours = entry.ours[0]

    def broken(problem):
        raise ArithmeticError("output has an RMS error")

    monkeypatch.setitem(entry.peers, ours, broken)
    assert main(["bench", *LINES[name].replace("--profile 1", "").split()]) == 1
    out, err = capsys.readouterr()
    assert "output has an RMS error" in out
    assert f"{ours} itself was wrong or failed in a case; its line says how." in err


@pytest.mark.parametrize("l2_rate, said", [(8.3e9, "L2 to SMs 8.30 TB/s"), (None, "L2 to SMs not measured")])
@pytest.mark.parametrize("name", ["attention", "matmul", "window"])
def test_rates_of_a_gpu_are_printed_and_written(tmp_path, printed_again, monkeypatch, name, l2_rate, said):
    """On a GPU that is none: its rates are given, and what is timed takes half a millisecond."""
    rates = Ceilings(bytes_per_ms=4.3e9, flops_per_ms=790e9, l2_bytes_per_ms=l2_rate)
    monkeypatch.setattr(Ceilings, "measure", lambda device, dtype: rates)
    monkeypatch.setattr(run, "time_of", lambda call, inputs, grad, direction, device: 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(attention, "TABLE", [dataclasses.replace(CASE, name="random-64")])
    monkeypatch.setattr(run, "run_case", on_cpu(run.run_case))
    line = {"attention": "--peers ds_sparse,sdpa", "matmul": "--layout random-25 --block 16 --seq-len 256 --batch 1",
            "window": "--seq-len 64 --window 8 --heads 1 --dtype bf16 --peers sdpa-mask"}[name]  # fmt: skip
    path = tmp_path / "rows.json"
    assert main(["bench", name, *line.split(), "--device", "cuda", "--repeats", "1", "--json", str(path)]) == 0
    printed = printed_again(path)
    assert printed.count(f"measured here in bf16: copy 4.30 TB/s, matrix product 790 TFLOP/s, {said}") == 1
    assert json.loads(path.read_text())["ceilings"] == {"bf16": dataclasses.asdict(rates)}


def on_cpu(run_case):
    return lambda entry, case, names, device, args: run_case(entry, case, names, torch.device("cpu"), args)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("line", [
    "attention --cases bigbird-64 --peers ds_sparse,composition,cudnn,flash,flex",
    "packed --cases bigbird-corpus,window-2048 --peers padded,varlen,flex",
    "selected --cases msa-8k,encoder-32k --peers cudnn,flash",
    "tokens --dtype bf16,fp32 --seq-len 512 --heads 2 --sparsity 90 --peers masked,sparse_attn,flex",
    "matmul --layout random-25 --block 32 --seq-len 512 --batch 2 --heads 2",
])  # fmt: skip
def test_peers_of_a_gpu_are_right_and_held_to_their_floor(tmp_path, line):
    path = tmp_path / "rows.json"
    assert (
        main(["bench", *line.split(), "--device", "cuda", "--repeats", "3", "--seconds", "5", "--json", str(path)]) == 0
    )
    rows = json.loads(path.read_text())["rows"]
    expected = "forward only", "need no padding", "part of the operator"
    assert not [row["reason"] for row in rows if row["reason"] and not any(x in row["reason"] for x in expected)]
    timed = [row for row in rows if row["milliseconds"] and row["direction"] != BACKWARD]
    assert all(row["to_floor"] > 0 for row in timed if "to_floor" in row)
