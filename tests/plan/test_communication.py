from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.communication import crosses_nodes, exchanged, gathered, of_rank, reduced
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings

MODEL = NAMED["bert-base"]
GROUPED = replace(MODEL, key_heads=2)


def test_ranks_exchange_query_key_value_and_output_and_their_gradients():
    part = 12 * 4 * 768 * 2 * 4096  # layers, tensors, numbers, bytes, tokens of a rank
    assert exchanged(MODEL, Settings(1, gpus=4, ranks=2), 8192) == 2 * part / 2
    assert exchanged(MODEL, Settings(1, gpus=4, ranks=4), 16384) == 2 * part * 3 / 4
    assert exchanged(MODEL, Settings(1, gpus=4), 8192) == 0


def test_checkpoints_exchange_once_more_and_passes_each_time():
    once = exchanged(MODEL, Settings(1, gpus=2, ranks=2), 8192)
    assert exchanged(MODEL, Settings(1, gpus=2, ranks=2, checkpoints=True), 8192) == 1.5 * once
    assert exchanged(MODEL, Settings(2, 3, gpus=2, ranks=2), 8192) == 6 * once
    assert exchanged(MODEL, Settings(1, gpus=2, ranks=2, dtype="fp32"), 8192) == 2 * once


def test_a_rank_has_its_query_heads_and_at_least_one_key_head():
    shared = Settings(1, gpus=8, ranks=8)
    assert (of_rank(MODEL, shared).heads, of_rank(MODEL, shared).key_heads) == (2, 2)
    assert of_rank(GROUPED, replace(shared, ranks=4)).key_heads == 1
    assert of_rank(MODEL, Settings(1)) == MODEL


@pytest.mark.parametrize("stage, times", [(0, 2), (1, 2), (2, 6), (3, 3)])
def test_gradients_are_reduced_as_zero_has_it(stage, times):
    weights = 2 * MODEL.parameters(8192)
    assert reduced(MODEL, Settings(1, 3, gpus=4, zero_stage=stage), 8192) == times * weights * 3 / 4
    assert reduced(MODEL, Settings(1, 3, zero_stage=stage), 8192) == 0


def test_zero_3_reduces_whole_gradients_where_ranks_share_sequences():
    alone, shared = (reduced(MODEL, Settings(1, gpus=4, zero_stage=3, ranks=ranks), 8192) for ranks in (1, 2))
    assert shared == 2 * alone


@pytest.mark.parametrize("stage, times", [(0, 0), (1, 1), (2, 1), (3, 6)])
def test_weights_are_gathered_as_zero_has_it(stage, times):
    weights = 2 * MODEL.parameters(8192)
    assert gathered(MODEL, Settings(1, 3, gpus=4, zero_stage=stage), 8192) == times * weights * 3 / 4


@pytest.mark.parametrize(
    "gpus, ranks, crosses",
    [(8, 8, False), (16, 8, False), (16, 1, False), (16, 16, True), (12, 3, True), (6, 3, False)],
)
def test_groups_that_do_not_divide_a_node_cross_its_border(gpus, ranks, crosses):
    assert crosses_nodes(Settings(1, gpus=gpus, ranks=ranks)) == crosses
