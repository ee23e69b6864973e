"""Whether a structure draws blocks, and whether a seed repeats them."""

import copy
import random

import numpy as np
import pytest
import torch

from ds_sparse.sparsity import BigBirdSparsityConfig, FixedSparsityConfig, SparsityConfig, VariableSparsityConfig
from ds_sparse.sparsity.draws import Draws, draws, without_seed


class Own(SparsityConfig):
    """A structure of a user's: two blocks a row, or what a test gives."""

    def __init__(self, num_heads, pick=None, seed=None):
        super().__init__(num_heads, seed=seed)
        self.pick = pick

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        for row in range(layout.shape[1]):
            layout[:, row, self.pick(self, row, layout.shape[2])] = 1
        return layout


def by_sampler(structure, row, blocks):
    return structure.sampler(row)(range(blocks), 2)


def by_a_generator_of_its_seed(structure, row, blocks):
    return random.Random(structure.seed).sample(range(blocks), 2)


def by_pythons_random(structure, row, blocks):
    return random.sample(range(blocks), 2)


def by_numpy(structure, row, blocks):
    return int(np.random.randint(blocks))


def by_torch(structure, row, blocks):
    return torch.randperm(blocks)[:2]


def the_diagonal(structure, row, blocks):
    return row


def only_where_it_is_long(structure, row, blocks):
    return by_sampler(structure, row, blocks) if blocks > 100 else row


class WiderBigBird(BigBirdSparsityConfig):
    def set_sliding_window_layout(self, h, layout):
        return layout


class NotOfOurs:
    """Any object with these three is a structure."""

    num_heads, block = 2, 16

    def make_layout(self, seq_len):
        return (torch.rand(2, seq_len // 16, seq_len // 16) < 0.5).long()


@pytest.mark.parametrize(
    "structure, how",
    [
        (FixedSparsityConfig(2), Draws.NOTHING),
        (BigBirdSparsityConfig(2, num_random_blocks=0), Draws.NOTHING),
        (BigBirdSparsityConfig(2), Draws.BY_SEED),
        (VariableSparsityConfig(2, num_random_blocks=1, seed=3), Draws.BY_SEED),
        (WiderBigBird(2), Draws.BY_SEED),
        (WiderBigBird(2, num_random_blocks=0), Draws.NOTHING),
        (Own(2, the_diagonal), Draws.NOTHING),
        (Own(2, by_sampler), Draws.BY_SEED),
        (Own(2, by_sampler, seed=3), Draws.BY_SEED),
        (Own(2, by_a_generator_of_its_seed), Draws.BY_SEED),
        (Own(2, by_pythons_random), Draws.UNREPEATABLY),
        (Own(2, by_pythons_random, seed=3), Draws.UNREPEATABLY),
        (Own(2, by_numpy), Draws.UNREPEATABLY),
        (Own(2, by_torch), Draws.UNREPEATABLY),
        (NotOfOurs(), Draws.UNREPEATABLY),
    ],
)
def test_what_a_structure_draws_by(structure, how):
    before = copy.deepcopy(vars(structure))
    assert draws(structure) is how
    assert vars(structure) == before


def test_the_answer_is_for_the_length_that_is_asked_for():
    structure = Own(2, only_where_it_is_long)
    assert draws(structure) is draws(structure, 1600) is Draws.NOTHING
    assert draws(structure, 1616) is Draws.BY_SEED


def test_a_structure_that_refuses_some_lengths_is_tried_at_another():
    class Long(Own):
        def make_layout(self, seq_len):
            assert seq_len // self.block > 64, "too short"
            return super().make_layout(seq_len)

    assert draws(Long(2, by_sampler)) is Draws.BY_SEED
    assert draws(Long(2, by_sampler), 64) is Draws.NOTHING


def test_asking_changes_no_random_numbers():
    def numbers():
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    for pick in (by_pythons_random, by_numpy, by_torch):
        draws(Own(2, pick))
    assert numbers() == expected


def test_it_is_tried_on_the_cpu_where_the_default_device_is_another():
    with torch.device("meta"):
        assert draws(Own(2, by_torch)) is Draws.UNREPEATABLY
        assert draws(Own(2, the_diagonal)) is Draws.NOTHING


def test_without_a_seed_code_of_a_user_may_draw_unless_it_says_that_it_does_not():
    class SaysSo(Own):
        draws_random_blocks = False

    assert without_seed(Own(2, the_diagonal)) and without_seed(NotOfOurs())
    assert not without_seed(Own(2, by_sampler, seed=3)) and not without_seed(FixedSparsityConfig(2))
    assert not without_seed(SaysSo(2, the_diagonal)) and draws(SaysSo(2, by_torch)) is Draws.NOTHING
