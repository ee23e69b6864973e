from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ds_sparse import BlockIndex, BSLongformerSparsityConfig, FixedSparsityConfig
from ds_sparse.index.packing import owner_bit
from ds_sparse.plan.layers import Walk, kinds_of, layers_in_words, walk_of
from ds_sparse.plan.model import NAMED

MODEL = NAMED["bert-base"]
BLOCK = {"mode": "bslongformer", "block": 64}


def kinds(block, model=MODEL):
    return kinds_of(block, model, "ds.json")


def test_layers_that_attend_alike_are_together():
    found = kinds(BLOCK | {"layers": {"0-5,7": {"num_sliding_window_blocks": 5}, "11": None}})
    assert [layers_in_words(kind.layers) for kind in found] == ["0-5,7", "6,8-10", "11"]
    assert [kind.in_words() for kind in found] == [*["bslongformer, block 64"] * 2, "dense"]
    assert walk_of(found[2], MODEL, 8192) is None
    assert walk_of(found[0], MODEL, 8192).density > walk_of(found[1], MODEL, 8192).density


def test_a_models_own_windows_stay_its_own():
    found = kinds(BLOCK, NAMED["modernbert-base"])
    assert [len(kind.layers) for kind in found] == [8, 14]
    assert found[1].in_words() == "own window of 64 tokens on either side"
    assert walk_of(found[1], MODEL, 8192).live == (3 * 128 - 2) * 64**2


def test_a_causal_model_walks_no_later_blocks():
    (kind,) = kinds(BLOCK)
    both, causal = (walk_of(kind, model, 8192) for model in (MODEL, replace(MODEL, family="gpt_neox")))
    assert causal.live == (both.live + 8192 * 64) / 2


def test_blocks_that_are_drawn_are_the_same_each_time_and_pythons_numbers_stay():
    (kind,) = kinds({"mode": "bigbird", "block": 64, "num_random_blocks": 3})
    random.seed(7)
    before = random.getstate()
    assert walk_of(kind, MODEL, 8192) == walk_of(kind, MODEL, 8192)
    assert random.getstate() == before


@pytest.mark.parametrize("block", [16, 32, 64])
def test_entries_are_those_of_the_index_and_halves_compute_what_their_owner_bits_say(block):
    layout = BSLongformerSparsityConfig(num_heads=2, block=block).make_bool_layout(2048)
    walk, index = Walk.of(layout, block), BlockIndex.build(layout, block)
    lines = 128 // block
    for side, name in ((walk.forward, "rows"), (walk.backward, "columns")):
        entries = index.tiles(name, 128).entries
        assert side.entries == len(entries)
        assert side.loaded == len(entries) * block * 128
        halves = [
            torch.stack([owner_bit(entries, line) for line in those]).any(0).sum().item()
            for those in (range(lines // 2), range(lines // 2, lines))
        ]
        assert side.computed == sum(halves) * block * 64


@pytest.mark.parametrize(
    "layout, block, computed, loaded, waste",
    [
        (torch.ones(1, 256, 256), 8, 1, 1, 0),
        (torch.ones(1, 32, 32), 64, 1, 1, 0),
        (torch.ones(1, 16, 16), 128, 1, 1, 0),
        # A diagonal: each half of a tile multiplies its four blocks with all of its 64 rows.
        (torch.eye(128)[None], 16, 4 / 128, 8 / 128, 3 / 4),
        (torch.zeros(1, 8, 8), 64, 0, 0, 0),
    ],
)
def test_what_is_computed_and_loaded_of_a_layout_and_what_of_it_is_waste(layout, block, computed, loaded, waste):
    walk = Walk.of(layout.bool(), block)
    assert (walk.computed, walk.loaded, walk.waste) == pytest.approx((computed, loaded, waste))


def test_heads_count_by_their_mean():
    structure = FixedSparsityConfig(
        num_heads=4, block=16, different_layout_per_head=True, num_different_global_patterns=4
    )
    layout = structure.make_bool_layout(1024)
    assert len(layout) == 4
    alone = [Walk.of(layout[head : head + 1], 16) for head in range(4)]
    assert Walk.of(layout, 16).forward.computed == sum(walk.forward.computed for walk in alone) / 4
