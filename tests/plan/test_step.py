from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.model import NAMED
from ds_sparse.plan.rates import walk_in_bert
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.step import flops_of, odd_vocabulary, step_of

MODEL, SETTINGS = NAMED["bert-base"], Settings(2)
WALKS = [walk_in_bert("longformer-64", 12, 8192)] * 12


def test_a_step_of_several_passes_repeats_all_but_the_optimizer(rates):
    once = step_of(rates, MODEL, SETTINGS, 8192, WALKS)
    twice = step_of(rates, MODEL, replace(SETTINGS, accumulation=2), 8192, WALKS)
    assert (twice.products, twice.kernels, twice.attention) == pytest.approx(
        (2 * once.products, 2 * once.kernels, 2 * once.attention)
    )
    assert (twice.optimizer, twice.training) == (once.optimizer, once.training)


def test_layers_count_each_by_what_they_attend_to(rates):
    sparse = step_of(rates, MODEL, SETTINGS, 8192, WALKS).attention
    dense = step_of(rates, MODEL, SETTINGS, 8192, [None] * 12).attention
    mixed = step_of(rates, MODEL, SETTINGS, 8192, [*WALKS[:9], None, None, None]).attention
    assert mixed == pytest.approx((9 * sparse + 3 * dense) / 12)


def test_checkpoints_repeat_the_forward_pass(rates):
    kept = step_of(rates, MODEL, SETTINGS, 8192, WALKS)
    again = step_of(rates, MODEL, replace(SETTINGS, checkpoints=True), 8192, WALKS)
    assert kept.checkpoints == 0
    assert 0.2 < again.checkpoints / (kept.products + kept.kernels + kept.attention) < 0.4


def test_zero_divides_the_optimizers_work_among_gpus(rates):
    alone, shared = (step_of(rates, MODEL, Settings(2, gpus=8, zero_stage=z), 8192, WALKS).optimizer for z in (0, 1))
    assert shared == pytest.approx(alone / 8)


def test_an_odd_vocabulary_costs_what_a_multiple_of_8_saves(rates):
    even = replace(MODEL, vocabulary=30528)
    saved = (step_of(rates, x, SETTINGS, 8192, WALKS).products for x in (MODEL, even))
    cost = odd_vocabulary(rates, MODEL, SETTINGS, 8192)
    assert next(saved) - next(saved) == pytest.approx(cost, rel=0.01)
    assert odd_vocabulary(rates, even, SETTINGS, 8192) == 0


def test_flops_of_attention_are_those_of_live_blocks():
    model_flops, attention_flops = flops_of(MODEL, SETTINGS, 8192, [walk.live for walk in WALKS])
    _, of_dense = flops_of(MODEL, SETTINGS, 8192, [None] * 12)
    assert attention_flops / of_dense == pytest.approx(WALKS[0].density)
    assert of_dense == 2 * 12 * 12 * 8192**2 * 14 * 64
    # Six FLOPs a token for each weight of a layer, and of the logits.
    weights = 12 * (4 * 768**2 + 2 * 768 * 3072) + 768**2 + 768 * 30522
    assert model_flops == 6 * weights * 2 * 8192
