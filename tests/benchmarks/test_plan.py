"""Plans beside what was measured, and the rates that come of the committed results."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.models import bert
from benchmarks.models import results as models
from benchmarks.plan import committed
from benchmarks.plan.proof import compared, compared_modernbert, compared_on_several, compared_training
from ds_sparse import load_config
from ds_sparse.plan import fitting, limits
from ds_sparse.plan.rates import committed_rates
from ds_sparse.plan.settings import read_settings

WITHIN = 0.15
CORE = (8192, 16384, 32768)
ATTENTIONS = {"sdpa", "longformer-64", "bigbird-64", "bigbird-16"}


@pytest.fixture(scope="module")
def results():
    return committed.committed()


@pytest.fixture(scope="module")
def core(results):
    """The steps of BERT of three lengths; the longest layouts take seconds."""
    return replace(results, bert=[step for step in results.bert if step.seq_len in CORE])


@pytest.fixture(scope="module")
def steps():
    return committed.training_steps()


@pytest.fixture(scope="module")
def rates():
    return committed_rates()


def test_each_file_is_named_with_its_commit(results, rates):
    assert rates.sources == tuple(results.sources)
    named = {source.partition(": commit ")[0] for source in results.sources}
    assert named == {*committed.ATTENTION, *committed.BERT, *committed.SEQUENCE, committed.TRAINING}


def test_measured_steps_are_met_within_15_percent(core, steps, rates):
    rows = list(compared(core, steps, rates))
    of_all = [row for row in rows if row.what == "BERT-base, forward and backward"]
    assert {(row.seq_len, row.attention) for row in of_all} == {(n, name) for n in CORE for name in ATTENTIONS}
    assert len(rows) == 12 + 8 + 4 + 1
    assert {row.what: row.error for row in rows if abs(row.error) > WITHIN} == {}
    assert {row.what: row.memory_error for row in rows if abs(row.memory_error) > WITHIN} == {}


def test_spoiled_rates_would_be_seen(core, steps, rates):
    for name in ("products", "moved"):
        wrong = replace(rates, **{name: 2 * getattr(rates, name)})
        assert max(abs(row.error) for row in compared(core, steps, wrong)) > WITHIN


def test_steps_of_ranks_with_many_tokens_and_memory_of_all_are_met_within_15_percent(results, rates):
    rows = list(compared_on_several(results, rates))
    many = {row.what: row.error for row in rows if row.tokens >= limits.TOKENS_OF_A_RANK}
    assert any("one sequence" in what for what in many) and any("a sequence each" in what for what in many)
    assert {what: error for what, error in many.items() if abs(error) > WITHIN} == {}
    assert {row.what: row.memory_error for row in rows if abs(row.memory_error) > WITHIN} == {}


def test_a_training_run_is_predicted_by_the_others(steps, rates):
    spoiled = replace(steps[0], milliseconds=3 * steps[0].milliseconds)
    found = compared_training([spoiled, *steps[1:]], rates, spoiled)
    assert found.predicted == compared_training(steps, rates, steps[0]).predicted


def test_a_family_that_no_rate_comes_from_is_met(rates):
    assert abs(compared_modernbert(rates).error) < WITHIN


def test_the_layouts_of_training_runs_have_the_densities_that_they_were_trained_with(steps):
    runs = json.loads((committed.COMMITTED / "training-h200.json").read_text())["runs"]
    assert [run["name"] for run in runs] == [step.name for step in steps]
    for run, step in zip(runs, steps):
        walked = committed.walk_of(step.name, step.seq_len)
        assert (1.0 if walked is None else walked.density) == pytest.approx(run["density"])


def test_settings_of_training_runs_are_those_of_their_json(steps, request):
    path = str(request.config.rootpath / "configs" / "bert_base_8192.json")
    said = read_settings(load_config(path).deepspeed, path)
    assert {replace(said, bucket_bytes=step.settings().bucket_bytes) for step in steps} == {said}
    assert committed.MODEL.family == "bing_bert"


def test_the_rest_of_a_training_step_is_the_mean_of_what_is_left(steps, rates):
    found = committed.with_training(replace(rates, training=None), steps)
    assert found.training == pytest.approx(rates.training, rel=1e-3) and found.training > 0
    off = [step.predicted(found).total - step.milliseconds for step in steps]
    assert sum(off) == pytest.approx(0, abs=1e-6)
    median, most = found.errors["training steps"]
    assert most == pytest.approx(max(abs(ms / step.milliseconds) for ms, step in zip(off, steps))) and 0 < median < most


def test_the_model_of_bert_steps_is_that_of_the_bench():
    for device, sizes in bert.MODELS["base"].items():
        model = fitting.bert_model(device)
        own = {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads}
        own |= {"intermediate_size": model.intermediate, "vocab_size": model.vocabulary}
        assert sizes.items() <= own.items()
    assert models.LABELLED["bert"] == fitting.LABELLED
    assert {2: models.TOKENS["cuda"], 4: models.TOKENS["cpu"]} == limits.TOKENS_MEASURED
