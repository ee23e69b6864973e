"""Rates from files that `ds_sparse bench` wrote, old ones too: those that are committed. That all of them give the
committed rates is held by tests/benchmarks/pages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.plan.committed import COMMITTED
from ds_sparse.plan.communication import exchanged
from ds_sparse.plan.fitting import NO_ATTENTION, SequenceStep, fit, from_files, rates_of
from ds_sparse.plan.rates import times

ROWS = [[1.0, 10.0, 1.0], [2.0, 10.0, 1.0], [4.0, 30.0, 1.0], [8.0, 10.0, 1.0], [8.0, 50.0, 1.0]]
FILES = "attention-flex-h200", "bert-h200", "bert-dropout-h200"
STEP = SequenceStep(8192, "bigbird-64", "bf16", "cuda", 2, 2, "sequence", "checkpointed", micro_batches=3)


@pytest.fixture(scope="module")
def results():
    found = from_files(COMMITTED / f"{name}.json" for name in FILES)
    return replace(found, kernels=found.kernels[:8])


def test_the_fit_finds_what_made_the_measurements_and_nothing_below_zero():
    truth = [2.0, 0.5, 3.0]
    found, errors = fit(ROWS, [times(truth, row) for row in ROWS])
    assert found == pytest.approx(truth) and errors == pytest.approx([0.0] * 5, abs=1e-9)
    found, errors = fit(ROWS, [times([2.0, -0.01, 0.0], row) for row in ROWS])
    assert min(found) == 0 and found[0] == pytest.approx(2, rel=0.1) and max(map(abs, errors)) > 0.01
    # Errors are relative: 10 % of 1 ms weigh as much as 10 % of 1000 ms.
    small, large = (fit([[1.0], [1000.0]], measured)[0] for measured in ([1.1, 1000.0], [1.0, 1100.0]))
    assert small == pytest.approx(large)


def test_steps_of_other_models_and_attentions_and_whole_ones_are_left_out(tmp_path):
    path = COMMITTED / "bert-h200.json"
    data, known = json.loads(path.read_text()), [step.milliseconds for step in from_files([path]).bert]
    assert len(known) > 5
    others = [{"model": "large"}, {"whole_step": True}, {"checkpointed": True}, {"is_try": True}]
    others += [{"attention": "transformers-longformer"}, {"milliseconds": None}]
    data["rows"] += [data["rows"][0] | other for other in others]
    (tmp_path / "more.json").write_text(json.dumps(data))
    assert [step.milliseconds for step in from_files([tmp_path / "more.json"]).bert] == known


def test_what_gives_no_rates_is_a_sentence(tmp_path, results):
    data = json.loads((COMMITTED / "bert-h200.json").read_text())
    (tmp_path / "b200.json").write_text(json.dumps(data | {"machine": "NVIDIA B200"}))
    (tmp_path / "odd.json").write_text(json.dumps(data | {"rows": [data["rows"][0] | {"seq_len": "long"}]}))
    for files, sentence in (
        ([COMMITTED / "bert-h200.json", tmp_path / "b200.json"], "is of NVIDIA B200, and the files before it of"),
        ([COMMITTED / "window-h200.json"], "window-h200.json: is of the operation 'window'; rates come from"),
        ([tmp_path / "odd.json"], r"odd.json: seq_len of a bertstep: Input should be a valid integer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            from_files(files)
    for lacking in ({"kernels": []}, {"bert": []}):
        with pytest.raises(ValueError, match="one of them gave no times"):
            rates_of(replace(results, **lacking))


def test_only_steps_without_attention_and_with_dropout_say_rates(results):
    """What plans are compared with is not among what they come from."""
    kept = [step for step in results.bert if step.attention == NO_ATTENTION or step.dropout]
    others = [replace(step, milliseconds=3 * step.milliseconds) for step in results.bert if step not in kept]
    assert others and rates_of(replace(results, bert=[*kept, *others])) == rates_of(results)


def test_steps_of_a_cpu_are_those_of_its_small_model_in_32_bits(results):
    none = [step for step in results.bert if step.attention == NO_ATTENTION and not step.dropout]
    found = rates_of(replace(results, bert=[replace(step, device="cpu", dtype="fp32", seq_len=1024) for step in none]))
    assert (found.itemsize, found.measured.hidden, found.measured.layers) == (4, 128, 2)
    assert found.training is found.exchange is found.reduction is None and found.dropout == {"sparse": 0, "dense": 0}


def test_the_rate_of_what_ranks_send_is_that_of_the_step_in_which_a_byte_took_least(results):
    def rates(*steps):
        return rates_of(replace(results, sequence=list(steps)))

    step, longer = (replace(STEP, seq_len=n, profile={"all-to-all": ms}) for n, ms in ((8192, 30.0), (16384, 40.0)))
    found = rates(step, longer)
    assert found.exchange == pytest.approx(40.0 / exchanged(STEP.model(), STEP.settings(), 16384))
    assert found.reduction is None
    # Keys in the place of heads, and ranks with a sequence each.
    for changes in ({"structure": "longformer-64"}, {"structure": "bigbird-16"}, {"parallel": "data"}):
        assert rates(step, replace(step, profile={"all-to-all": 0.1}, **changes)).exchange == rates(step).exchange
    assert rates(replace(step, profile={"reduction of gradients": 30.0})).reduction > 0
