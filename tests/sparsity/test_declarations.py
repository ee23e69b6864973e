"""What counts of what a structure says of itself: not attributes that a class of a user's has for its own."""

import copy
import pickle
import warnings

import pytest
import torch

from ds_sparse.config import parse_sparse_attention, sparse_attention_block
from ds_sparse.models.structures import set_common_seed
from ds_sparse.sparsity import (
    BigBirdSparsityConfig,
    SparsityConfig,
    SparsityWarning,
    _registry,
    declared,
    register_sparsity,
)
from ds_sparse.sparsity.declarations import declare, declared_value
from ds_sparse.sparsity.draws import Draws, draws, without_seed

NAMES = ("causal", "seed", "strict_causal")


def said(structure):
    return [declared_value(structure, name) for name in NAMES]


class Raster(SparsityConfig):
    """Uses names of ours for its own, before and after our constructor; passes on what `given` has."""

    def __init__(self, num_heads, block=16, causal="raster", **given):
        self.causal = causal
        self.block = 128
        super().__init__(num_heads, block, **given)
        if not given:
            self.seed, self.strict_causal = "its own", True

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        layout[:, 0] = 1
        layout[0, 1, self.sampler(0)(range(layout.shape[2]), 2)] = 1
        return layout


def test_a_users_attribute_with_a_name_of_ours_stays_its_own():
    own = Raster(2)
    assert (own.causal, own.seed, own.strict_causal, own.block) == ("raster", "its own", True, 16)
    assert said(own) == [False, None, False]
    assert own.make_bool_layout(64)[0, 0].all(), "its strict_causal cuts nothing"
    assert draws(own) is Draws.UNREPEATABLY and without_seed(own), "its seed is not the sampler's"
    set_common_seed(own)
    assert own.seed == "its own"


def test_what_is_set_from_outside_and_does_not_count_is_said_once():
    class Own(SparsityConfig):
        def __init__(self, num_heads):
            super().__init__(num_heads)

    structure = Own(2)
    structure.causal = True
    with pytest.warns(SparsityWarning, match="Own has a causal that does not count: .* Pass it there"):
        assert declared_value(structure, "causal") is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert declared_value(structure, "causal") is False and declared_value(Own(2), "seed") is None


def test_what_a_plain_constructor_passes_on_counts():
    structure = Raster(2, seed=3, strict_causal=True)
    assert said(structure) == [False, 3, True]
    assert not structure.make_bool_layout(64).triu(1).any()
    assert draws(structure) is Draws.BY_SEED and not without_seed(structure)
    for other in (copy.copy(structure), copy.deepcopy(structure), pickle.loads(pickle.dumps(structure))):
        assert torch.equal(other.make_bool_layout(64), structure.make_bool_layout(64))


class OnNothing:
    num_heads, block, causal, seed, strict_causal, draws_random_blocks = 2, 16, True, 7, True, False

    def make_layout(self, seq_len):
        return (torch.rand(2, seq_len // 16, seq_len // 16) < 0.5).long()


def test_a_structure_that_derives_from_nothing_declares_nothing():
    assert said(OnNothing()) == [False, None, False]
    assert without_seed(OnNothing()) and draws(OnNothing()) is Draws.UNREPEATABLY


def test_a_class_that_never_calls_our_constructor_declares_nothing():
    class Bare(SparsityConfig):
        def __init__(self):
            self.num_heads, self.block, self.causal = 2, 16, True

    assert said(Bare()) == [False, None, False]


class Diagonal(SparsityConfig):
    def lay_out(self, h, layout):
        layout[h].fill_diagonal_(1)
        return layout


@declared
class Declared(Diagonal):
    causal: bool = True


@pytest.mark.parametrize("structure", [Diagonal(2, causal=True), Declared(2), BigBirdSparsityConfig(2, causal=True)])
def test_classes_with_our_constructor_declare_all(structure):
    assert said(structure) == [True, None, False]
    structure.seed = 3
    assert said(structure) == [True, 3, False]


def test_a_subclass_of_a_structure_of_ours_keeps_its_own_too():
    class Mine(BigBirdSparsityConfig):
        def __init__(self, num_heads):
            super().__init__(num_heads, num_random_blocks=2)
            self.seed, self.strict_causal = 5, True

    torch.manual_seed(0)
    assert Mine(1).make_bool_layout(256).triu(1).any()
    assert len({tuple(Mine(1).make_bool_layout(256).flatten().tolist()) for _ in range(3)}) > 1
    assert draws(Mine(1)) is Draws.UNREPEATABLY


def test_a_common_seed_counts_where_the_class_has_none_of_its_own():
    class Plain(Diagonal):
        def __init__(self, num_heads):
            super().__init__(num_heads)

    structure = Plain(2)
    declare(structure, "seed", 5)
    assert structure.seed == 5 and said(structure) == [False, 5, False] and said(Plain(2)) == [False, None, False]


def test_a_block_has_what_is_declared(monkeypatch):
    monkeypatch.setattr(_registry, "_classes", dict(_registry._classes))

    @register_sparsity("own_causal")
    class OwnCausal(Diagonal):
        def __init__(self, num_heads: int, block: int = 16):
            super().__init__(num_heads, block)
            self.causal = "its own"

    block = sparse_attention_block(OwnCausal(2))
    assert block == {"mode": "own_causal", "block": 16, "seed": None, "causal": False, "strict_causal": False}
    assert parse_sparse_attention({"mode": "own_causal"}, 2).causal == "its own"
    assert said(parse_sparse_attention({"mode": "own_causal", "causal": True, "seed": 2}, 2)) == [True, 2, False]
