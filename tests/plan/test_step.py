"""What ranks send each other, and the time and FLOPs of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.communication import crosses_nodes, exchanged, gathered, of_rank, reduced
from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.step import flops_of, odd_vocabulary, step_of

MODEL, SETTINGS = NAMED["bert-base"], Settings(2)
SHARED = replace(SETTINGS, gpus=4, ranks=4)
WALKS = [walk_in_bert("longformer-64", 12, 8192)] * 12


@pytest.fixture
def step(rates):
    """The step of settings with some changes, or of another model."""

    def made(settings=SETTINGS, walks=WALKS, model=MODEL, rates=rates, **changes):
        return step_of(rates, model, replace(settings, **changes), 8192, walks)

    return made


def test_ranks_exchange_query_key_value_and_output_and_their_gradients():
    part = 12 * 4 * 768 * 2 * 4096  # layers, tensors, numbers, bytes, tokens of a rank
    once = exchanged(MODEL, Settings(1, gpus=2, ranks=2), 8192)
    assert once == 2 * part / 2
    assert exchanged(MODEL, Settings(1, gpus=4, ranks=4), 16384) == 2 * part * 3 / 4
    assert exchanged(MODEL, Settings(1, gpus=4), 8192) == 0
    assert exchanged(MODEL, Settings(1, gpus=2, ranks=2, checkpoints=True), 8192) == 1.5 * once
    assert exchanged(MODEL, Settings(2, 3, gpus=2, ranks=2), 8192) == 6 * once
    assert exchanged(MODEL, Settings(1, gpus=2, ranks=2, dtype="fp32"), 8192) == 2 * once


def test_a_rank_has_its_query_heads_and_at_least_one_key_head(step):
    shared = Settings(1, gpus=8, ranks=8)
    assert (of_rank(MODEL, shared).heads, of_rank(MODEL, shared).key_heads) == (2, 2)
    assert of_rank(replace(MODEL, key_heads=2), replace(shared, ranks=4)).key_heads == 1
    assert of_rank(MODEL, Settings(1)) == MODEL
    # The rank with most heads sets the time.
    assert step(gpus=8, ranks=8).attention == step(model=replace(MODEL, heads=2, key_heads=2)).attention


@pytest.mark.parametrize("stage, sent, got", [(0, 2, 0), (1, 2, 1), (2, 6, 1), (3, 3, 6)])
def test_gradients_and_weights_are_sent_as_zero_has_it(stage, sent, got):
    weights, settings = 2 * MODEL.parameters(8192), Settings(1, 3, gpus=4, zero_stage=stage)
    assert reduced(MODEL, settings, 8192) == sent * weights * 3 / 4
    assert reduced(MODEL, replace(settings, gpus=1), 8192) == 0
    assert gathered(MODEL, settings, 8192) == got * weights * 3 / 4
    shared = reduced(MODEL, replace(settings, ranks=2), 8192)
    assert shared == reduced(MODEL, settings, 8192) * (2 if stage == 3 else 1), "whole gradients where ranks share"


def test_groups_that_do_not_divide_a_node_cross_its_border():
    cases = [(8, 8), (16, 8), (16, 1), (6, 3), (16, 16), (12, 3)]
    assert [crosses_nodes(Settings(1, gpus=gpus, ranks=ranks)) for gpus, ranks in cases] == [False] * 4 + [True] * 2


def test_ranks_of_a_sequence_compute_a_part_of_it_and_copy_what_they_send(rates, step):
    alone, shared = step(), step(SHARED)
    assert shared.products == pytest.approx(alone.products / 4)
    assert shared.attention == step(model=replace(MODEL, heads=3, key_heads=3)).attention
    copied = 12 * 4 * 4 * 768 * 2 * 8192 * 2 / 4  # layers, reads and writes, tensors, numbers, bytes, tokens, sequences
    assert shared.kernels - alone.kernels / 4 == pytest.approx(rates.moved * copied)
    assert alone.exchange == alone.reduction == 0 < min(shared.exchange, shared.reduction)
    unknown = step(SHARED, rates=replace(rates, exchange=None, reduction=None))
    assert unknown.exchange == unknown.reduction == 0, "what was not measured takes no time"


def test_across_nodes_bytes_go_at_the_rate_of_an_adapter(rates, step):
    within, across = (step(gpus=12, ranks=ranks) for ranks in (4, 12))
    assert within.exchange == pytest.approx(rates.exchange * exchanged(MODEL, Settings(2, gpus=12, ranks=4), 8192))
    assert across.exchange == pytest.approx(exchanged(MODEL, Settings(2, gpus=12, ranks=12), 8192) / 50e6)
    assert within.reduction == pytest.approx(reduced(MODEL, Settings(2, gpus=12), 8192) / 50e6)


def test_gpus_share_the_check_of_gradients_that_a_json_may_leave_out(rates, step):
    large = replace(MODEL, layers=24)
    assert step().check == 0 and step(checks=True).check == rates.check == 24
    assert step(checks=True, gpus=4, model=large).check == 12
    assert step(checks=True, rates=replace(rates, check=None)).check == 0
    assert step(checks=True).total == pytest.approx(step().total + 24)


def test_an_odd_vocabulary_costs_what_a_multiple_of_8_saves(rates, step):
    even = replace(MODEL, vocabulary=30528)
    cost = odd_vocabulary(rates, MODEL, SETTINGS, 8192)
    assert step().products - step(model=even).products == pytest.approx(cost, rel=0.01)
    assert odd_vocabulary(rates, even, SETTINGS, 8192) == 0


def test_flops_of_attention_are_those_of_live_blocks_and_of_a_gpu_its_part():
    live = [walk.live for walk in WALKS]
    model_flops, attention_flops = flops_of(MODEL, SETTINGS, 8192, live)
    _, of_dense = flops_of(MODEL, SETTINGS, 8192, [None] * 12)
    assert attention_flops / of_dense == pytest.approx(WALKS[0].density)
    assert of_dense == 2 * 12 * 12 * 8192**2 * 14 * 64
    # Six FLOPs a token for each weight of a layer, and of the logits.
    weights = 12 * (4 * 768**2 + 2 * 768 * 3072) + 768**2 + 768 * 30522
    assert model_flops == 6 * weights * 2 * 8192
    assert flops_of(MODEL, SHARED, 8192, live) == (model_flops / 4, attention_flops / 4)
