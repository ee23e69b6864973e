from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_sparse.plan.layers import kinds_of, layers_in_words, walk_of
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


def test_a_layout_that_is_too_large_is_a_sentence():
    (kind,) = kinds({"mode": "fixed", "block": 16})
    with pytest.raises(ValueError, match=r"1 layouts of 65,536 x 65,536 blocks are too large .* a larger block"):
        walk_of(kind, MODEL, 2**20)
