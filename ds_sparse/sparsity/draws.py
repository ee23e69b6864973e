"""Tells if a structure draws blocks at random, and if a seed repeats them: the one answer, for all who ask.

A structure of this package says so by its fields. One of a user's is tried: its layout is made a few times, as with a
seed, and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..tools.random_numbers import random_numbers_kept
from ._base import SparsityConfig
from .declarations import declare, declared_value, may_declare

if TYPE_CHECKING:
    from torch import Tensor

TRIED = (64, 16, 256, 1024)
"""Blocks in a row of a trial where no length is known: the first of which the structure has a layout."""


class Draws(Enum):
    """How a structure comes to its random blocks."""

    NOTHING = "the layout is the same each time"
    BY_SEED = "the declared seed repeats them: by `sampler`, or by code that reads `seed`"
    UNREPEATABLY = "no seed repeats them"


def draws(structure: SparsityConfig, seq_len: int | None = None) -> Draws:
    """How a structure draws, whether it has a seed or not. Python's, PyTorch's and NumPy's random numbers stay as they
    are.

    Args:
        structure: any object with `block` and `make_layout(seq_len)`.
        seq_len: tokens, a multiple of the block, of the layout that the answer is for; by default a short one. One of a
            user's that has no layout of any length tried counts as drawing NOTHING.
    """
    if not may_draw(structure):
        return Draws.NOTHING
    if isinstance(structure, SparsityConfig) and not structure.overrides_layout():
        return Draws.BY_SEED if may_declare(structure, "seed") else Draws.UNREPEATABLY
    for length in [blocks * structure.block for blocks in TRIED] if seq_len is None else [seq_len]:
        with suppress(Exception):  # code that is not ours, at a length that it may refuse
            return _try(structure, length)
    return Draws.NOTHING


def may_draw(structure: SparsityConfig) -> bool:
    """`draws` without a trial: False where it draws nothing for certain."""
    return structure.draws_random_blocks if isinstance(structure, SparsityConfig) else True


def without_seed(structure: SparsityConfig) -> bool:
    """Tells if the blocks that it may draw follow no seed, so that each rank would draw its own."""
    return declared_value(structure, "seed") is None and may_draw(structure)


def why_unrepeatable(structure: SparsityConfig) -> str:
    """Sentence for the user of a structure that draws UNREPEATABLY."""
    return (
        f"{type(structure).__name__} draws other blocks each time, and no seed repeats them; draw them with "
        "self.sampler(h) of SparsityConfig, which follows the seed that super().__init__ gets."
    )


def _try(structure: SparsityConfig, seq_len: int) -> Draws:
    from ..layout import on_cpu

    drawn: list[int] = []
    with on_cpu(), random_numbers_kept():
        first, again = (_make(structure, 0, seq_len, drawn) for _ in range(2))
        if not first.equal(again):
            return Draws.UNREPEATABLY
        if not may_declare(structure, "seed"):
            return Draws.NOTHING
        other = first if drawn else _make(structure, 1, seq_len, drawn)
    return Draws.BY_SEED if drawn or not first.equal(other) else Draws.NOTHING


def _make(structure: SparsityConfig, seed: int, seq_len: int, drawn: list[int]) -> Tensor:
    """The layout of a copy, with this seed where it takes one; `drawn` then gets what its samplers draw."""
    tried: Any = copy.copy(structure)
    if may_declare(tried, "seed"):
        declare(tried, "seed", seed)
        sampler = tried.sampler

        def noting(h: int) -> Callable[..., list[int]]:
            sample = sampler(h)

            def noted(*arguments: Any, **named: Any) -> list[int]:
                found = sample(*arguments, **named)
                drawn.extend(found)
                return found

            return noted

        tried.sampler = noting
    return getattr(tried, "make_bool_layout", tried.make_layout)(seq_len)
