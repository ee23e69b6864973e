from __future__ import annotations

from dataclasses import replace

import pytest

from ds_sparse.plan.advice import advise
from ds_sparse.plan.fitting import walk_in_bert
from ds_sparse.plan.memory import GIB, LEFT_FREE, memory_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.settings import Settings
from ds_sparse.plan.step import step_of

MODEL = NAMED["bert-base"]
WALKS = [walk_in_bert("longformer-64", 12, 8192)] * 12


def advised(rates, settings, gib):
    return advise(rates, MODEL, settings, 8192, WALKS, gib, MODEL.heads)


def gib_of(settings):
    """What a step takes, and a little more."""
    return 1.001 * memory_of(MODEL, settings, 8192).total / GIB / (1 - LEFT_FREE)


@pytest.mark.parametrize("ranks, checkpoints", [(1, False), (1, True), (2, True), (4, True), (8, True), (12, True)])
def test_the_first_that_fits_is_advised(rates, ranks, checkpoints):
    settings = Settings(1, gpus=24, zero_stage=2, ranks=4)
    wanted = replace(settings, ranks=ranks, checkpoints=checkpoints)
    found = advised(rates, settings, gib_of(wanted))
    assert found.settings == wanted and found.step == step_of(rates, MODEL, wanted, 8192, WALKS)


def test_ranks_within_a_node_come_before_fewer_across_nodes(rates):
    settings = Settings(1, gpus=24, zero_stage=2)
    assert advised(rates, settings, gib_of(replace(settings, ranks=3, checkpoints=True))).settings.ranks == 4


def test_fewer_sequences_a_pass_come_before_checkpoints(rates):
    settings = Settings(4, gpus=8)
    fewer = replace(settings, micro_batch=2)
    assert advised(rates, settings, gib_of(fewer)).settings == fewer


def test_where_nothing_fits_there_is_no_advice(rates):
    assert advised(rates, Settings(1, gpus=64), 1) is None


def test_there_are_no_more_ranks_than_heads(rates):
    settings = Settings(1, gpus=16, zero_stage=3)
    assert advised(rates, settings, 0.99 * gib_of(replace(settings, ranks=8, checkpoints=True))) is None


def test_without_a_block_no_ranks_share_a_sequence(rates):
    settings = Settings(1, gpus=16, zero_stage=3)
    gib = gib_of(replace(settings, ranks=8, checkpoints=True))
    assert advised(rates, settings, gib).settings.ranks == 8
    assert advise(rates, MODEL, settings, 8192, WALKS, gib, 1) is None


def test_tokens_a_second_are_those_of_all_gpus(rates):
    found = advised(rates, Settings(2, 3, gpus=8), 139)
    assert found.tokens_per_second(8192) == pytest.approx(2 * 3 * 8 * 8192 / found.step.total * 1e3)
