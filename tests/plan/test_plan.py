"""What a plan says that no transcript of tests/cli has: rates unlike the committed ones, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ds_sparse.plan.model import NAMED
from ds_sparse.plan.plan import make_plan
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.text import as_json, printed

MODEL, SETTINGS = NAMED["bert-base"], Settings(4, zero_stage=1)
WINDOW = {"mode": "bslongformer", "block": 64}


@pytest.fixture
def planned(rates):
    """The plan of a block, with changes of the settings."""

    def made(block=WINDOW, rates=rates, memory_gib=None, **changes):
        settings = replace(SETTINGS, **changes)
        return make_plan(block, "ds.json", MODEL, settings, rates, 8192, memory_gib=memory_gib)

    return made


def test_where_dense_attention_is_quick_dense_is_faster_and_that_is_what_is_said(planned, rates):
    quick = {way: [c / 4 for c in coefficients] for way, coefficients in rates.dense.items()}
    plan = planned({"mode": "dense", "block": 16}, replace(rates, dense=quick))
    assert plan.gain < 1 and plan.dense_is_faster_to == 8192
    (layers,) = plan.layers
    assert layers.milliseconds > layers.dense_milliseconds and layers.density == 1
    text = printed(plan)
    assert "dense is faster: its step takes 0." in text and "gain:" not in text
    assert 'layers 0-11: dense attention is faster; give them null in "layers".' in text


def test_what_was_not_measured_is_not_counted_and_that_is_said(planned, rates):
    bare = replace(rates, exchange=None, reduction=None, training=None)
    said = [remark for remark in planned(rates=bare, gpus=8, ranks=2).remarks if "measured here" in remark]
    assert [sentence[: sentence.index(" not counted")] for sentence in said] == [
        "time that GPUs take to send gradients and weights is",
        "time that GPUs take to send heads of a sequence is",
        "what DeepSpeed and the program's loop take besides is",
    ]


def test_the_json_has_all_numbers_with_their_sums(planned):
    plan = planned(memory_gib=80)
    found = json.loads(json.dumps(as_json(plan)))
    assert found["step"]["total"] == plan.step.total == sum(v for k, v in found["step"].items() if k != "total")
    assert found["memory"]["total"] == plan.memory.total
    assert found["gain"] == plan.gain and found["tokens_per_second"] == plan.tokens / plan.step.total * 1e3
    assert found["layers"][0]["density"] == plan.layers[0].density
    assert found["advice"]["tokens_per_second"] == found["tokens_per_second"]
    assert found["advice"]["step"]["total"] == plan.step.total and found["advice"]["settings"]["ranks"] == 1
    assert len(found["lengths"]) == len(plan.lengths) and found["remarks"] == plan.remarks


def test_all_modes_that_choose_blocks_are_named(planned):
    moba = {"mode": "moba", "block": 64, "num_chosen_blocks": 8}
    block = {"mode": "indexer", "block": 64, "num_chosen_blocks": 4, "layers": {"0-2": moba, "3": None}}
    with pytest.raises(ValueError, match=r"layers 0-2 \(moba, block 64\) and 4-11 \(indexer, block 64\) choose"):
        planned(block)
