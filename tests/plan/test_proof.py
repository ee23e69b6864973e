from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.bench.cases import NO_ATTENTION
from ds_sparse.plan.limits import TOKENS_OF_A_RANK
from ds_sparse.plan.proof import compared, compared_modernbert, compared_on_several, compared_training
from ds_sparse.plan.rates import rates_of

WITHIN = 0.15
CORE = (8192, 16384, 32768)
ATTENTIONS = {"sdpa", "longformer-64", "bigbird-64", "bigbird-16"}


@pytest.fixture(scope="module")
def core(results):
    """The steps of BERT of three lengths; the longest layouts take seconds."""
    return replace(results, bert=[step for step in results.bert if step.case.seq_len in CORE])


def test_measured_steps_are_met_within_15_percent(core, rates):
    rows = list(compared(core, rates))
    of_all = [row for row in rows if row.what == "BERT-base, forward and backward"]
    assert {(row.seq_len, row.attention) for row in of_all} == {(n, name) for n in CORE for name in ATTENTIONS}
    assert len(rows) == 12 + 8 + 4 + 1
    assert {row.what: row.error for row in rows if abs(row.error) > WITHIN} == {}
    assert {row.what: row.memory_error for row in rows if abs(row.memory_error) > WITHIN} == {}


@pytest.fixture(scope="module")
def on_several(results, rates):
    return list(compared_on_several(results, rates))


def test_steps_of_ranks_with_many_tokens_are_met_within_15_percent(on_several):
    many = {row.what: row.error for row in on_several if row.tokens >= TOKENS_OF_A_RANK}
    assert any("one sequence" in what for what in many) and any("a sequence each" in what for what in many)
    assert {what: error for what, error in many.items() if abs(error) > WITHIN} == {}


def test_memory_of_ranks_is_met_within_15_percent(on_several):
    assert {row.what: row.memory_error for row in on_several if abs(row.memory_error) > WITHIN} == {}


def test_no_step_is_among_what_predicts_it(results):
    """Steps of BERT with attention and without dropout may be anything: the rates stay as they are."""
    used = replace(results, kernels=results.kernels[:8], training=[])
    spoiled = replace(
        used,
        bert=[
            step
            if step.attention == NO_ATTENTION or step.case.dropout
            else replace(step, milliseconds=3 * step.milliseconds)
            for step in used.bert
        ],
    )
    assert rates_of(spoiled) == rates_of(used)


def test_a_training_run_is_predicted_by_the_others(results, rates):
    run = results.training[0]
    spoiled = replace(run, milliseconds=3 * run.milliseconds)
    runs = [spoiled, *results.training[1:]]
    found = compared_training(replace(results, training=runs), rates, spoiled)
    assert found.predicted == compared_training(results, rates, run).predicted


def test_a_family_that_no_rate_comes_from_is_met(rates):
    assert abs(compared_modernbert(rates).error) < WITHIN


def test_spoiled_rates_would_be_seen(core, rates):
    for name in ("products", "moved"):
        wrong = replace(rates, **{name: 2 * getattr(rates, name)})
        assert max(abs(row.error) for row in compared(core, wrong)) > WITHIN
