from __future__ import annotations

import json
from dataclasses import replace

from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.text import as_json, printed

WINDOW = {"mode": "bslongformer", "block": 64}


def planned(rates, block=WINDOW, seq_len=8192, **options):
    return make_plan(block, "ds.json", NAMED["bert-base"], Settings(4, zero_stage=1), rates, seq_len, **options)


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
    plan = planned(rates)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["step"]["total"] == plan.step.total == sum(v for k, v in found["step"].items() if k != "total")
    assert found["memory"]["total"] == plan.memory.total
    assert found["gain"] == plan.gain and found["tokens_per_second"] == plan.tokens / plan.step.total * 1e3
    assert found["layers"][0]["density"] == plan.layers[0].density
    assert len(found["lengths"]) == len(plan.lengths) and found["remarks"] == plan.remarks
