import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.models import rank_processes, sequence, sequence_model, sequence_rank, sequence_results
from benchmarks.models.bert import batch
from benchmarks.models.sequence_rank import Task
from benchmarks.models.sequence_results import ALONE, CHECKPOINTED, DATA, KEPT, OFFLOADED, SEQUENCE, Case, Row
from benchmarks.program import main

CPU = torch.device("cpu")
CASE = Case(512, "bigbird-64", "fp32", "cpu", 2)
SAVING = "--activations offloaded --tiles 2"
TIMED = Row(1, ALONE, 100.0, 5120.0, loss=7.0, gradient_norm=2.0, rounds=3)


def task(case=CASE, parallel=SEQUENCE, alone=None):
    return Task(case, 1 if parallel == ALONE else 2, parallel, 3, 1.0, 1, alone)


@pytest.mark.slow("trains on one rank, then on two")
def test_command_measures_one_rank_and_then_two(tmp_path, printed_again):
    path = tmp_path / "rows.json"
    arguments = f"{SAVING} --seq-len 512 --tokens 1100 --repeats 1 --seconds 1 --json {path}"
    assert main(["sequence", *arguments.split()]) == 0
    written = json.loads(path.read_text())
    rows = [sequence_results.restore([row])[0][1][0] for row in written["rows"]]
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
    assert "512 tokens, 2 ranks, 2 sequences that they share; bigbird-64, fp32, ZeRO 2" in printed
    assert "activations offloaded, 2 tiles, up to 1,100 tokens a pass or one sequence" in " ".join(printed.split())
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
    assert main(["sequence", *arguments.split()]) == 1
    printed = capsys.readouterr()
    assert not printed.out and sentence in printed.err


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sequence.require_gpus(2, 60, torch.device("cuda"))
    with pytest.raises(ValueError, match="--ranks 4: torch finds 2 GPUs"):
        sequence.require_gpus(4, 0, torch.device("cuda"))


@pytest.mark.parametrize(("loss", "norm", "wrong"), [(7.01, 2.0, "the loss is 7.01"), (7.0, 1.0, "the norm")])
def test_a_shared_sequence_with_another_loss_or_gradient_is_not_timed(loss, norm, wrong):
    found = Row(2, SEQUENCE, loss=loss, gradient_norm=norm)
    with pytest.raises(ArithmeticError, match=wrong):
        sequence_rank.compared(found, TIMED, "fp32")
    right = sequence_rank.compared(replace(found, loss=7.0, gradient_norm=2.0), TIMED, "fp32")
    assert (right.loss_alone, right.gradient_norm_alone) == (7.0, 2.0)


def rows_without_processes(monkeypatch, found):
    """Has `rows_of` find these rows, by number of ranks, parallel and length."""

    def measured(tasks, device):
        for one in tasks:
            row = found[one.ranks, one.parallel, one.case.seq_len]
            yield one, row
            if row.reason:
                return

    monkeypatch.setattr(rank_processes, "until_one_fails", measured)


def compared(lengths):
    cases = [replace(CASE, seq_len=length) for length in lengths]
    return list(sequence.Comparison(cases, [2], [DATA, SEQUENCE], 3, 1.0).results(CPU))


OUT_OF_MEMORY = "OutOfMemoryError: CUDA out of memory."


def test_the_longest_is_looked_for_from_what_was_measured_on(monkeypatch):
    def measured(tasks, device):
        for one in tasks:
            peak = one.case.seq_len / 100
            reason = OUT_OF_MEMORY if peak > 100 else ""
            yield one, replace(TIMED, peak_gib=None if reason else peak, reason=reason, is_try=one.only_tries)

    monkeypatch.setattr(rank_processes, "until_one_fails", measured)
    properties = SimpleNamespace(total_memory=100 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cases = [replace(CASE, seq_len=length) for length in (1024, 2048)]
    found = list(sequence.Comparison(cases, [1], [DATA], 3, 1.0, longest=60).results(CPU))
    assert [(case.seq_len, row.is_try) for case, row in found[:2]] == [(1024, False), (2048, False)]
    assert found[2][0].seq_len == 8192 and all(row.is_try for _, row in found[2:])
    ((case, _, failed),) = sequence_results.longest_of(found)
    assert case.seq_len <= 10_000 <= failed <= case.seq_len * 17 / 16 + 1024


def test_lengths_that_one_rank_does_not_hold_are_shared_after_shorter_ones_were_right(monkeypatch):
    shared = Row(2, SEQUENCE, 60.0, 8533.0, loss=7.0, rounds=3)
    found = {
        (1, ALONE, 512): TIMED,
        (1, ALONE, 1024): Row(1, ALONE, reason=OUT_OF_MEMORY),
        (2, DATA, 512): replace(TIMED, ranks=2, parallel=DATA, loss_alone=7.0),
        (2, SEQUENCE, 512): replace(shared, loss_alone=7.0),
        (2, SEQUENCE, 1024): shared,
    }
    rows_without_processes(monkeypatch, found)
    rows = {(row.ranks, row.parallel, case.seq_len): row for case, row in compared([512, 1024])}
    assert rows[2, DATA, 1024].reason == sequence.NOT_HELD
    assert rows[2, SEQUENCE, 1024] == shared and rows[2, SEQUENCE, 512].efficiency == pytest.approx(100 / 120, 1e-3)
    rows = {(row.parallel, case.seq_len): row for case, row in compared([1024])}
    assert rows[SEQUENCE, 1024].reason == sequence.UNVERIFIED


@pytest.mark.parametrize(("reason", "status"), [(OUT_OF_MEMORY, 0), ("ArithmeticError: the loss is nan", 1)])
def test_what_does_not_fit_is_a_row_like_others_and_what_fails_is_a_failure(monkeypatch, capsys, reason, status):
    found = {
        (1, ALONE, 512): TIMED,
        (1, ALONE, 1024): Row(1, ALONE, reason=reason),
        (2, SEQUENCE, 512): replace(TIMED, ranks=2, parallel=SEQUENCE, loss_alone=7.0),
        (2, SEQUENCE, 1024): replace(TIMED, ranks=2, parallel=SEQUENCE),
        (2, DATA, 512): replace(TIMED, ranks=2, parallel=DATA, loss_alone=7.0),
    }
    rows_without_processes(monkeypatch, found)
    assert main("sequence --seq-len 512,1024".split()) == status
    assert f"no time: {reason}" in capsys.readouterr().out


def test_a_pass_has_as_many_sequences_as_fit_and_one_at_least():
    assert [replace(CASE, tokens=tokens).sequences for tokens in (0, 511, 1023, 1024, 5000)] == [1, 1, 1, 2, 9]


def test_after_one_that_does_not_fit_no_longer_one_is_tried(monkeypatch):
    failed = Row(2, SEQUENCE, reason=OUT_OF_MEMORY)
    rows_without_processes(monkeypatch, {(2, SEQUENCE, 512): failed, (2, DATA, 512): TIMED, (2, DATA, 1024): TIMED})
    tasks = [task(replace(CASE, seq_len=length), way) for length in (512, 1024) for way in (SEQUENCE, DATA)]
    found = list(rank_processes.rows_of(tasks, CPU))
    assert [row.reason for one, row in found if one.parallel == DATA] == ["", ""]
    assert [row.reason for one, row in found if one.parallel == SEQUENCE] == [OUT_OF_MEMORY, rank_processes.TOO_LONG]


def gradients(case):
    model = sequence_model.make_model(case, CPU)
    data = batch(1, case.seq_len, model.config.vocab_size, CPU)
    with sequence_model.saved(case):
        loss = model(input_ids=data.tokens, labels=data.labels).loss
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
    model = sequence_model.make_model(CASE, CPU)
    data = batch(1, CASE.seq_len, model.config.vocab_size, CPU)
    of_all = super(type(model), model).forward(input_ids=data.tokens, labels=data.labels).loss
    torch.testing.assert_close(model(input_ids=data.tokens, labels=data.labels).loss, of_all)
    assert CASE.activations == KEPT


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
