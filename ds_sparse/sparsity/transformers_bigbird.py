from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import RowStep, row_step, sliding_window, within
from .declarations import RandomBlocks, declared, require

if TYPE_CHECKING:
    from torch import Tensor

_PAPER_LENGTHS = (1024, 3072, 4096)
"""Tokens at which Transformers draws as the code of the paper did."""

_PAPER_REACH = 1024
"""Tokens that the random blocks are drawn from then."""


def long_enough_for_blocks(num_random_blocks: int, blocks: int) -> str | None:
    needed = 5 + 2 * num_random_blocks
    if blocks <= needed:
        return (
            f"A row of {blocks} blocks is too short for {num_random_blocks} random blocks: up to {needed} blocks "
            "Transformers attends to all. Use a smaller block, or mode dense."
        )
    return None


@register_sparsity("transformers_bigbird")
@declared
class TransformersBigBirdSparsityConfig(SparsityConfig):
    """BigBird as the models of Transformers train with it: mode "transformers_bigbird".

    A window of three blocks, the first and the last block global, and random blocks of each head, from NumPy's
    generator. With the seed i it is the layout of layer i of a `BigBirdModel` that trains on sequences of `seq_len`
    tokens and has as many positions. The last block is that of the whole layout: pad sequences to that length. The
    class draws 3 a row by default, as Transformers, the JSON block 0.

    Source: Zaheer et al., "Big Bird: transformers for longer sequences", 2020, arXiv 2007.14062; Transformers'
    attention_type "block_sparse".

    Raises:
        ValueError: a field of the wrong type or out of bounds; at `make_layout`, at most 5 + 2 * num_random_blocks
            blocks, or fewer to draw from than asked for.

    Examples:
        >>> import ds_sparse
        >>> structure = ds_sparse.TransformersBigBirdSparsityConfig(num_heads=1, block=16, num_random_blocks=1, seed=0)
        >>> structure.make_layout(seq_len=128)
        tensor([[[1, 1, 1, 1, 1, 1, 1, 1],
                 [1, 1, 1, 1, 0, 0, 0, 1],
                 [1, 1, 1, 1, 1, 0, 0, 1],
                 [1, 0, 1, 1, 1, 1, 0, 1],
                 [1, 0, 1, 1, 1, 1, 0, 1],
                 [1, 0, 1, 0, 1, 1, 1, 1],
                 [1, 0, 0, 0, 1, 1, 1, 1],
                 [1, 1, 1, 1, 1, 1, 1, 1]]])
    """

    different_layout_per_head: bool = Field(default=True, init=False)
    num_random_blocks: RandomBlocks = 3

    length_rules = (long_enough_for_blocks,)
    json_defaults: ClassVar[dict[str, Any]] = {"num_random_blocks": 0}  # as in bigbird, whose key it is

    @row_step
    def _random(self, h: int, blocks: int) -> RowStep:
        require(long_enough_for_blocks(self.num_random_blocks, blocks))
        seed = self._says("seed")
        seed = random.getrandbits(32) if seed is None else seed
        columns = _random_blocks(seed, self.num_heads, blocks, self.block, self.num_random_blocks)[h]

        def step(live: Tensor, rows: range) -> None:
            for row in rows:
                live[row - rows.start, columns[row]] = 1

        return step

    @row_step
    def _window(self, h: int, blocks: int) -> RowStep:
        return sliding_window(blocks, 3, unidirectional=False)

    @row_step
    def _edges(self, h: int, blocks: int) -> RowStep:
        def step(live: Tensor, rows: range) -> None:
            for edge in (0, blocks - 1):
                live[within(rows, edge, edge + 1)] = 1
                live[:, edge] = 1

        return step


@functools.lru_cache(maxsize=16)
def _random_blocks(seed: int, heads: int, blocks: int, block: int, wanted: int) -> list[list[list[int]]]:
    """The random blocks of each row, by head, drawn in the order in which Transformers draws them.

    Raises:
        ValueError: fewer blocks to draw from than wanted.
    """
    import numpy

    generator = numpy.random.RandomState(seed)
    drawn: list[list[list[int]]] = [[[] for _ in range(blocks)] for _ in range(heads)]
    if blocks * block in _PAPER_LENGTHS:
        reach = _PAPER_REACH // block - 1 if 2 * block < _PAPER_REACH else blocks - 1
        for rows in drawn:
            for row in range(1, blocks - 1):
                rows[row] = _taken(generator.permutation(_paper_candidates(row, blocks, reach)), wanted)
        return drawn
    near = 2 * wanted + 5  # all are among so many first blocks
    for row in range(1, blocks):  # of the last row, which is global, too: the generator goes on
        avoided = {0, row - 1, row, row + 1, near - 1}
        avoided |= {near - 2} if row == 1 else {1} if row == near - 2 else set()
        for rows in drawn:
            rows[row] = _taken([column for column in generator.permutation(near) if column not in avoided], wanted)
    return drawn


def _taken(permuted: Any, wanted: int) -> list[int]:
    if len(permuted) < wanted:
        raise ValueError(
            f"A row has {len(permuted)} blocks to draw from, and {wanted} random blocks are wanted; use a smaller "
            "block, or fewer of them."
        )
    return [int(column) for column in permuted[:wanted]]


def _paper_candidates(row: int, blocks: int, reach: int) -> Any:
    """The blocks that a row draws from at the lengths of the paper. Near the end of `reach` they are not all that the
    window leaves, and in the last two rows some are of the window: so it was trained."""
    import numpy

    middle: Any = numpy.arange(1, blocks - 1, dtype=numpy.int32)
    before = row - 2
    if row in (1, 2):
        return middle[row + 1 : reach]
    if row in (blocks - 3, blocks - 2) or before > reach:
        return middle[:reach]
    if row + 1 == reach:
        return middle[:before]
    return numpy.concatenate((middle[:before], middle[row + 1 : reach]))
