from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.text import as_json, printed

WINDOW = {"mode": "bslongformer", "block": 64}


def planned(rates, block=WINDOW, seq_len=8192, gpus=1, ranks=1, stage=1, **options):
    settings = Settings(4, gpus=gpus, ranks=ranks, zero_stage=stage)
    return make_plan(block, "ds.json", NAMED["bert-base"], settings, rates, seq_len, **options)


def test_what_is_printed_has_the_numbers_of_the_plan(rates):
    plan = planned(rates, memory_gib=80.0)
    text = printed(plan)
    assert f"{plan.step.total:10.1f} {plan.dense_step.total:10.1f}" in text
    assert f"gain: a dense step takes {plan.gain:.2f} times as long." in text
    assert f"the longest sequence that fits into 80 GiB, 4 at a time: {plan.longest:,} tokens" in text
    assert "a vocabulary of 30,522 is no multiple of 8" in text
    assert "shorter than 4,096: not measured" in text
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"- {remark}"[:60] in text for remark in plan.remarks)


def test_what_does_not_fit_is_said_first(rates):
    plan = planned(rates, memory_gib=8.0)
    start = f"does not fit: a step needs {plan.memory.total / 2**30:.1f} GiB, and the GPU has 8, 5% of which"
    assert printed(plan).startswith(start) and as_json(plan)["fits"] is False
    for fitting, fits in (({"memory_gib": 80.0}, True), ({}, None)):
        plan = planned(rates, **fitting)
        assert printed(plan).startswith("ds.json: bert-base") and as_json(plan)["fits"] is fits


def test_ranks_of_a_sequence_and_what_they_send_are_printed(rates):
    plan = planned(rates, gpus=8, ranks=2)
    text = printed(plan)
    assert "ZeRO 1, 8 GPUs, 2 to a sequence" in text
    assert f"{'heads between ranks':24} {plan.step.exchange:10.1f}" in text
    assert f"{'gradients and weights':24} {plan.step.reduction:10.1f}" in text


@pytest.mark.parametrize(
    "gpus, gib, advice",
    [
        (8, 80, "advice for 8 GPUs: data parallelism, 4 x 8,192 tokens a pass: "),
        (8, 4, "advice for 8 GPUs: data parallelism and activation checkpointing, 2 x 8,192 tokens a pass: "),
        (8, 0.9, 'advice for 8 GPUs: "sequence_parallel_size": 4, data parallelism and activation checkpointing, 1 x'),
        (8, 0.5, "advice: with activation checkpointing, too, nothing makes it fit 8 GPUs;"),
        (1, 5, "advice for 1 GPU: activation checkpointing, 2 x"),
    ],
)
def test_a_parallelism_is_advised(rates, gpus, gib, advice):
    assert advice in " ".join(printed(planned(rates, gpus=gpus, stage=2, memory_gib=gib)).split())


def test_advice_says_so_where_a_step_of_it_has_another_batch(rates):
    fewer = printed(planned(rates, gpus=8, stage=2, memory_gib=4))
    assert 'a step of it has 16 sequences ("train_batch_size"), and the JSON\'s has 32.' in fewer
    assert "a step of it" not in printed(planned(rates, gpus=8, stage=2, memory_gib=80))


def test_where_nothing_is_to_choose_nothing_is_advised(rates):
    assert "advice" not in printed(planned(rates, memory_gib=80))


def test_where_dense_is_faster_that_is_what_is_said(rates):
    quick = replace(rates, dense={way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()})
    text = printed(planned(quick, {"mode": "dense", "block": 16}))
    assert "dense is faster: its step takes 0." in text and "gain:" not in text
    assert 'layers 0-11: dense attention is faster; give them null in "layers".' in text


def test_a_gain_that_the_rates_cannot_tell_is_none(rates):
    assert "gain: none that the rates can tell: a dense" in printed(planned(rates, {"mode": "dense", "block": 16}))


def test_padding_is_said(rates):
    text = printed(planned(rates, seq_len=8200, document_tokens=4128))
    assert "padding: 8,200 tokens are 8,256 in whole blocks; 0.7% of the step is padding." in text
    assert "padding: documents of 4,128 tokens leave 50% of each step to padding" in text


def test_without_the_memory_it_is_asked_for(rates):
    assert "the GPU's memory is not known; give it with --memory GIB." in printed(planned(rates))
    assert "no sequence fits into 1 GiB" in printed(planned(rates, memory_gib=1.0))


def test_the_json_has_all_numbers_with_their_sums(rates):
    plan = planned(rates, memory_gib=80)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["step"]["total"] == plan.step.total == sum(v for k, v in found["step"].items() if k != "total")
    assert found["memory"]["total"] == plan.memory.total
    assert found["gain"] == plan.gain and found["tokens_per_second"] == plan.tokens / plan.step.total * 1e3
    assert found["layers"][0]["density"] == plan.layers[0].density
    assert found["advice"]["tokens_per_second"] == found["tokens_per_second"]
    assert found["advice"]["step"]["total"] == plan.step.total and found["advice"]["settings"]["ranks"] == 1
    assert len(found["lengths"]) == len(plan.lengths) and found["remarks"] == plan.remarks
