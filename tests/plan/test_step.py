from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.communication import exchanged, reduced
from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.model import NAMED
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


SHARED = replace(SETTINGS, gpus=4, ranks=4)


def test_ranks_of_a_sequence_compute_a_part_of_it_and_copy_what_they_send(rates):
    alone, shared = (step_of(rates, MODEL, settings, 8192, WALKS) for settings in (SETTINGS, SHARED))
    assert shared.products == pytest.approx(alone.products / 4)
    assert shared.attention == step_of(rates, replace(MODEL, heads=3, key_heads=3), SETTINGS, 8192, WALKS).attention
    copied = 12 * 4 * 4 * 768 * 2 * 8192 * 2 / 4  # layers, reads and writes, tensors, numbers, bytes, tokens, sequences
    assert shared.kernels - alone.kernels / 4 == pytest.approx(rates.moved * copied)
    assert alone.exchange == alone.reduction == 0 < min(shared.exchange, shared.reduction)


def test_the_rank_with_most_heads_sets_the_time(rates):
    eight = step_of(rates, MODEL, replace(SETTINGS, gpus=8, ranks=8), 8192, WALKS)
    two_heads = step_of(rates, replace(MODEL, heads=2, key_heads=2), SETTINGS, 8192, WALKS)
    assert eight.attention == two_heads.attention


def test_across_nodes_bytes_go_at_the_rate_of_an_adapter(rates):
    within, across = (step_of(rates, MODEL, replace(SETTINGS, gpus=12, ranks=ranks), 8192, WALKS) for ranks in (4, 12))
    assert within.exchange == pytest.approx(rates.exchange * exchanged(MODEL, Settings(2, gpus=12, ranks=4), 8192))
    assert across.exchange == pytest.approx(exchanged(MODEL, Settings(2, gpus=12, ranks=12), 8192) / 50e6)
    assert within.reduction == pytest.approx(reduced(MODEL, Settings(2, gpus=12), 8192) / 50e6)


def test_what_was_not_measured_takes_no_time(rates):
    step = step_of(replace(rates, exchange=None, reduction=None), MODEL, SHARED, 8192, WALKS)
    assert step.exchange == step.reduction == 0


def test_flops_of_a_gpu_are_its_part():
    alone, shared = (flops_of(MODEL, settings, 8192, [walk.live for walk in WALKS]) for settings in (SETTINGS, SHARED))
    assert alone == tuple(4 * part for part in shared)


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
