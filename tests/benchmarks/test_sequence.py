"""Steps on several ranks, the search for the longest sequence, and where time and memory of a step go."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.commands.sequence import OPERATION
from benchmarks.models import results, search, sequence, sequence_rank, step_profile
from benchmarks.models.bert import batch
from benchmarks.models.results import ALONE, CHECKPOINTED, DATA, KEPT, OFFLOADED, SEQUENCE, Case, Row
from benchmarks.models.search import Bracket
from benchmarks.models.sequence_rank import MemoryMeter
from benchmarks.models.step_profile import ATTENTION, EXCHANGE, IDLE, OPTIMIZER, OTHER, REDUCTION
from benchmarks.program import main
from ds_sparse.bench.machine import GIB

CPU = torch.device("cpu")
CASE = Case(512, "fp32", "cpu", structure="bigbird-64", zero_stage=2)
SAVING = "--activations offloaded --tiles 2"
TIMED = Row(milliseconds=100.0, tokens_per_second=5120.0, loss=7.0, gradient_norm=2.0, rounds=3)


@pytest.mark.slow("trains on one rank, then on two")
def test_command_measures_one_rank_and_then_two(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = f"{SAVING} --seq-len 512 --tokens 1100 --repeats 1 --seconds 1 --json {path}"
    assert main(["sequence", *arguments.split()]) == 0
    written = json.loads(path.read_text())
    ((_, rows),) = OPERATION.restore(written["rows"])
    assert [(row.ranks, row.parallel) for row in rows] == [(1, ALONE), (2, DATA), (2, SEQUENCE)]
    alone, data, shared = rows
    assert data.loss == pytest.approx(alone.loss, rel=1e-5) and data.loss_alone == alone.loss
    assert shared.loss == pytest.approx(alone.loss, rel=1e-5) and shared.loss_alone == alone.loss
    assert shared.gradient_norm == pytest.approx(alone.gradient_norm, rel=1e-3)
    assert shared.tokens_per_second == pytest.approx(2 * 512e3 / shared.milliseconds)
    assert data.tokens_per_second == pytest.approx(2 * 2 * 512e3 / data.milliseconds)
    assert shared.efficiency == pytest.approx(alone.milliseconds / (2 * shared.milliseconds))
    assert shared.profile["attention"] > 0 and shared.profile["all-to-all"] > 0
    assert alone.profile["all-to-all"] == 0 and alone.profile["optimizer"] > 0
    printed = printed_again(path)
    assert "2 sequences of 512 tokens, bigbird-64, fp32, ZeRO 2, activations offloaded, 2 tiles, up to 1,100" in printed
    assert "2 ranks, 2 sequences that they share, time: attention" in " ".join(printed.split())
    assert written["deepspeed"] and written["transformers"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--seq-len 128", "bigbird-64 has no layout of 128 tokens"),
        ("--dtype fp16", "DeepSpeed leaves steps out"),
        ("--ranks 3", "--ranks 3: the model has 2 heads, and each rank that shares a sequence wants one; give 2 ranks"),
        ("--longest 60 --tokens 1024", "--longest looks for one sequence"),
        ("--longest 60", "a CPU's memory is not filled by trying"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(capsys, arguments, sentence):
    assert main(["sequence", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out and sentence in printed.err


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sequence.require_gpus(2, torch.device("cuda"))
    with pytest.raises(ValueError, match="--ranks 4: torch finds 2 GPUs"):
        sequence.require_gpus(4, torch.device("cuda"))


@pytest.mark.parametrize(("loss", "norm", "wrong"), [(7.01, 2.0, "the loss is 7.01"), (7.0, 1.0, "the norm")])
def test_a_shared_sequence_with_another_loss_or_gradient_is_not_timed(loss, norm, wrong):
    found = Row(ranks=2, parallel=SEQUENCE, loss=loss, gradient_norm=norm)
    with pytest.raises(ArithmeticError, match=wrong):
        sequence_rank.compared(found, TIMED, "fp32")
    right = sequence_rank.compared(replace(found, loss=7.0, gradient_norm=2.0), TIMED, "fp32")
    assert (right.loss_alone, right.gradient_norm_alone) == (7.0, 2.0)


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory."


@pytest.fixture
def compared(monkeypatch):
    """compared(row_of, lengths): what is measured where `row_of(ranks, parallel, length)` has the rows."""

    def compare(row_of, lengths, ranks=2, longest=0):
        def measured(task, device):
            row = row_of(task.ranks, task.parallel, task.case.seq_len)
            return replace(row, ranks=task.ranks, parallel=task.parallel)

        monkeypatch.setattr(sequence, "row_of", measured)
        cases = [replace(CASE, seq_len=length) for length in lengths]
        found = sequence.results(cases, [ranks], [DATA, SEQUENCE], 3, 1.0, longest, CPU)
        return [(case, row) for case, rows in found for row in rows]

    return compare


def test_the_longest_is_looked_for_from_what_was_measured_on(monkeypatch, compared):
    def row_of(ranks, parallel, length):
        peak = length / 100
        return Row(reason=OUT_OF_MEMORY) if peak > 100 else replace(TIMED, peak_gib=peak)

    properties = SimpleNamespace(total_memory=100 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = compared(row_of, [1024, 2048], ranks=1, longest=60)
    assert [(case.seq_len, case.is_try) for case, row in found[:2]] == [(1024, False), (2048, False)]
    assert found[2][0].seq_len == 8192 and all(case.is_try for case, _ in found[2:])
    ((case, _, failed),) = results.longest_of([(case, [row]) for case, row in found])
    assert case.seq_len <= 10_000 <= failed <= case.seq_len * 17 / 16 + 1024


def test_lengths_that_one_rank_does_not_hold_are_shared_after_shorter_ones_were_right(compared):
    def row_of(ranks, parallel, length):
        if ranks == 1:
            return TIMED if length == 512 else Row(reason=OUT_OF_MEMORY)
        return replace(TIMED, milliseconds=60.0, tokens_per_second=8533.0, loss_alone=7.0 if length == 512 else None)

    rows = {(row.ranks, row.parallel, case.seq_len): row for case, row in compared(row_of, [512, 1024, 2048])}
    assert rows[2, DATA, 1024].reason == sequence.NOT_HELD and not rows[2, SEQUENCE, 1024].reason
    assert rows[2, SEQUENCE, 512].efficiency == pytest.approx(100 / 120, 1e-3)
    assert rows[1, ALONE, 1024].reason == OUT_OF_MEMORY and rows[1, ALONE, 2048].reason == sequence.TOO_LONG
    rows = {(row.parallel, case.seq_len): row for case, row in compared(row_of, [1024])}
    assert rows[SEQUENCE, 1024].reason == sequence.UNVERIFIED


@pytest.mark.parametrize(("reason", "status"), [(OUT_OF_MEMORY, 0), ("ArithmeticError: the loss is nan", 1)])
def test_what_does_not_fit_is_a_row_like_others_and_what_fails_is_a_failure(monkeypatch, capsys, reason, status):
    monkeypatch.setattr(sequence, "row_of", lambda task, device: Row(ranks=task.ranks, reason=reason))
    assert main("sequence --seq-len 512".split()) == status
    assert f"1 rank: no time: {reason}" in capsys.readouterr().out


def test_a_pass_has_as_many_sequences_as_fit_and_one_at_least():
    assert [replace(CASE, tokens=tokens).batch for tokens in (0, 511, 1023, 1024, 5000)] == [1, 1, 1, 2, 9]


def gradients(case):
    model = sequence_rank.make_model(case, CPU)
    data = batch(1, case.seq_len, model.config.vocab_size, CPU)
    with sequence_rank.saved(case):
        loss = model(**data.inputs, labels=data.labels).loss
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "change", [{"tiles": 3}, {"activations": CHECKPOINTED}, {"activations": OFFLOADED, "tiles": 2}]
)
def test_what_saves_memory_changes_no_gradient(change):
    loss, expected = gradients(CASE)
    own, found = gradients(replace(CASE, **change))
    assert own == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_loss_is_that_of_transformers():
    model = sequence_rank.make_model(CASE, CPU)
    data = batch(1, CASE.seq_len, model.config.vocab_size, CPU)
    of_all = super(type(model), model).forward(**data.inputs, labels=data.labels).loss
    torch.testing.assert_close(model(**data.inputs, labels=data.labels).loss, of_all)
    assert CASE.activations == KEPT


LONG = Case(2**18, "bf16", "cuda", structure="bigbird-64", zero_stage=2)
ROOM = 139.0


def looked_for(peak_of, measured=(2**18, 2**19), seconds=60, first=None):
    """The lengths that were tried, those that did not fit negative."""
    bracket = Bracket(ROOM, {length: peak_of(length) for length in measured if peak_of(length) <= ROOM}, first=first)

    def attempt(seq_len, left):
        assert 0 < left <= seconds
        peak = peak_of(seq_len)
        row = Row(milliseconds=1.0, peak_gib=peak) if peak <= ROOM else Row(reason=OUT_OF_MEMORY)
        return replace(LONG, seq_len=seq_len, is_try=True), row

    tried = search.tries(bracket, attempt, seconds)
    return [case.seq_len if row.milliseconds else -case.seq_len for case, row in tried]


@pytest.mark.parametrize("most", [2**19 + 1024, 700_000, 3_000_000, 9_000_000])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_the_longest_is_found_to_about_a_sixteenth(most, constant):
    tried = looked_for(lambda length: constant + (ROOM - constant) * length / most)
    longest = max([2**19, *(length for length in tried if length > 0)])
    assert longest <= most <= min(-length for length in tried if length < 0)
    assert min(-length for length in tried if length < 0) <= longest * 1.07
    assert len(tried) <= 4 and len(set(tried)) == len(tried)


def test_memory_that_grows_in_another_way_takes_more_tries():
    tried = looked_for(lambda length: ROOM * (length / 2_000_000) ** 2)
    fitted, failed = [x for x in tried if x > 0], [-x for x in tried if x < 0]
    assert max(fitted) <= 2_000_000 <= min(failed) <= max(fitted) * 1.07 and len(tried) <= 10


def test_where_nothing_fits_or_time_is_over_nothing_is_tried():
    assert looked_for(lambda length: 1e3) == []
    assert looked_for(lambda length: length / 1e6, seconds=0) == []


def test_where_nothing_is_known_it_begins_with_a_length_and_halves_what_does_not_fit():
    tried = looked_for(lambda length: ROOM * length / 10_000, measured=(), first=2**15)
    assert tried[:3] == [-(2**15), -(2**14), 2**13] and max(tried) <= 10_000 <= min(-x for x in tried if x < 0)
    assert looked_for(lambda length: 1e3, measured=(), first=4096) == [-4096, -2048, -1024]


def test_what_takes_too_long_ends_the_search_and_is_not_too_long_a_sequence():
    slow = Row(reason=f"{results.NO_RESULT} 20 seconds")
    bracket = Bracket(ROOM, {2**18: 10.0})
    attempt = lambda seq_len, left: (replace(LONG, seq_len=seq_len, is_try=True), slow)  # noqa: E731
    ((case, row),) = search.tries(bracket, attempt, 60)
    fitted = Row(milliseconds=10.0, peak_gib=10.0)
    (longest,) = results.longest_of([(LONG, [fitted]), (case, [row])])
    assert case.seq_len == 2**19 and longest == (LONG, fitted, None)


def test_the_longest_is_said_with_the_shortest_that_did_not_fit():
    rows = [
        (LONG, Row(milliseconds=10.0, tokens_per_second=1.0, loss=1.0, peak_gib=9.0)),
        (replace(LONG, seq_len=2**20, is_try=True), Row(milliseconds=40.0)),
        (replace(LONG, seq_len=2**21, is_try=True), Row(reason="out of memory")),
        (LONG, Row(ranks=2, parallel=SEQUENCE, milliseconds=5.0)),
    ]
    (said,) = [list(lines) for lines in results.report((case, [row]) for case, row in rows)][-1]
    assert said == (
        "the longest that fits, 1 rank, bigbird-64, bf16, ZeRO 2, activations kept: at least 1,048,576 tokens, where "
        "the search's time was over; 2,097,152 do not fit"
    )


class Allocator:
    """Counts GiB as torch.cuda does."""

    def __init__(self):
        self.now = self.highest = 0.0

    def hold(self, gib):
        self.now += gib
        self.highest = max(self.highest, self.now)

    def touch(self, gib):
        self.hold(gib)
        self.now -= gib


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: int(made.now * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: int(made.highest * GIB))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(made, "highest", made.now))
    return made


def test_spans_inside_of_others_count_for_both(allocator):
    meter = MemoryMeter(CPU)
    allocator.hold(2)
    meter.open("outer")
    allocator.touch(1)
    meter.open("inner")
    allocator.touch(3)
    meter.close("inner")
    meter.open("inner")
    allocator.touch(2)
    meter.close("inner")
    meter.close("outer")
    assert meter.gib == {"inner": 3, "outer": 3}


def test_memory_of_a_step_is_named_by_what_takes_it(allocator):
    model = sequence_rank.make_model(CASE, CPU)
    allocator.hold(4)

    class Engine:
        module = model
        __call__ = model.__call__

        def backward(self, loss):
            allocator.touch(5)

        def step(self):
            allocator.touch(0.5)

    for layer in model.bert.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *_: allocator.touch(0.25))
        layer.register_forward_hook(lambda *_: allocator.hold(1))
    model.cls.register_forward_hook(lambda *_: allocator.touch(2))
    data = batch(1, 512, model.config.vocab_size, CPU)
    found = sequence_rank.memory_of(Engine(), data, CASE, CPU)
    assert found.pop("parameters") + found.pop("optimizer states and buffers") == pytest.approx(4)
    assert found == {"activations kept": 2, "attention": 0.25, "loss": 2, "backward": 5, "step": 0.5}
    model(**data.inputs, labels=data.labels)  # its hooks are gone


def event(name, start, duration, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


TRACE = [
    event("void ds_sparse::(anonymous namespace)::forward<64>", 0, 1000),
    event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1000, 500),
    event("ampere_bf16_gemm", 1400, 1000),
    event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 2000, 2000),
    event("ds_sparse bench: optimizer", 4000, 1000, "gpu_user_annotation"),
    event("multi_tensor_apply_kernel", 4000, 600),
    event("ncclDevKernel_AllGather_RING_LL", 4600, 400),
    event("aten::mm", 0, 9000, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def test_each_moment_of_a_gpu_counts_once_and_communication_where_it_is_alone():
    parts = step_profile.shares(step_profile.intervals(TRACE, "cuda"), step_profile.COUNTED_FIRST["cuda"])
    assert parts == pytest.approx({ATTENTION: 1.0, OPTIMIZER: 1.0, OTHER: 1.0, EXCHANGE: 0.4, REDUCTION: 1.6})


def test_what_a_profile_does_not_fill_of_a_step_is_idle():
    parameter = torch.nn.Parameter(torch.randn(300, 300))
    optimizer = torch.optim.AdamW([parameter])

    def step():
        (parameter @ parameter).sum().backward()
        with step_profile.optimizer_range():
            optimizer.step()

    step()
    parts = step_profile.profile_of(step, 1e4, torch.device("cpu"))
    assert parts[OPTIMIZER] > 0 and parts[OTHER] > 0 and parts[ATTENTION] == parts[EXCHANGE] == 0
    assert sum(parts.values()) == pytest.approx(1e4) and parts[IDLE] > 9e3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_on_gpus_time_and_memory_are_named(tmp_path):
    path = tmp_path / "rows.json"
    assert main(f"sequence --device cuda --seq-len 4096 --repeats 3 --seconds 1 --json {path}".split()) == 0
    for row in json.loads(path.read_text())["rows"]:
        assert row["profile"]["attention"] > 0 and row["profile"]["optimizer"] > 0
        assert (row["profile"]["all-to-all"] > 0) == (row["parallel"] == SEQUENCE)
        assert 0.2 < row["memory"]["parameters"] < 0.3 and row["memory"]["activations kept"] > 0.1
        assert row["peak_gib"] > sum(row["memory"][name] for name in ("parameters", "activations kept"))
