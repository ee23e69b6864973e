"""From the bits of a layout to its tiles, by the native builder: csrc/index.h says which lines share a tile, in which
order entries follow each other, and where lists are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from .kernels import require_kernel
from .packing import MAX_LINES
from .tiles import SIDES, Tiles, lines_differ
from .transforms import outside_transforms_or_traced

NUMBERS = 38
"""Numbers at the beginning of a plan's counts that are for the host: Header in csrc/index.h."""

NEVER_CUT = 1024
"""Tokens of the longest list that no builder cuts: twice `kLeastCut` in csrc/index.h."""


class Counts(NamedTuple):
    """What the host has to know of a plan.

    Attributes:
        layout_heads: heads to store, 1 where all are equal.
        live_blocks: of these.
        reaches_ahead: whether a block above the diagonal is live.
        sizes: the numbers of entries, units and cuts of these heads, for each side and height.
    """

    layout_heads: int
    live_blocks: int
    reaches_ahead: bool
    sizes: list[int]


@dataclass(eq=False)
class TilePlan:
    """Which lines of a layout share a tile, and how long the lists of tiles are; made without waiting for the device.

    Attributes:
        bits: uint8 (L, R, 4 * ceil(C / 32)), the layout as `BlockIndex` has it.
        columns: C.
        block: tokens on a block's side.
        heights: those of the tiles in tokens, one or two, ascending; at most the first is of a single line.
        sides: 'rows', 'columns' or both in this order.
        bounded: for tiles that nobody counts.
        row_block: tokens of a block row, where `block` is those of a block column alone; rows keep their order then.
        most_of_line: of a bounded plan, live blocks that no row or column has more of, where that is known: tiles
            whose lists are too short to be cut get no space for cuts, and nothing is launched to combine splits.
        memory: int32, the plan.
        counts: int64, its numbers.

    Raises:
        RuntimeError: bits on a device without kernels.
        ValueError: a height that is not a power of two, or has more lines than an entry has bits for.
    """

    bits: Tensor
    columns: int
    block: int
    heights: Sequence[int]
    sides: Sequence[str] = SIDES
    bounded: bool = False
    row_block: int | None = None
    most_of_line: int | None = None

    memory: Tensor = field(init=False)
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        least = min(self.block, self.row_block or self.block)
        for tile in self.heights:
            if not isinstance(tile, int) or tile < 1 or tile & (tile - 1) or tile > MAX_LINES * least:
                raise ValueError(
                    f"tile is {tile!r}; it has to be a power of two and at most {MAX_LINES} blocks of {least} tokens."
                )
        require_kernel("index_plan", self.bits.device)
        self.memory, self.counts = ops.index_plan(
            self.bits, self.columns, self.block, self.heights, "rows" in self.sides, "columns" in self.sides,
            self.bounded, self.row_block,
        )  # fmt: skip

    def fetch(self, *more: Tensor) -> tuple[Counts, list[int]]:
        """The counts, and what else the host has to know, tensors of one number, in one transfer."""
        numbers = _on_host(self.counts[:NUMBERS], *more)
        ahead, differs, _, _, live, live_of_first, *totals = numbers[:NUMBERS]
        totals = totals[:16] if differs else totals[16:]
        sets = range(len(self.sides) * len(self.heights))
        sizes = [number for i in sets for number in totals[4 * i : 4 * i + 3]]
        heads, live = (len(self.bits), live) if differs else (1, live_of_first)
        return Counts(heads, live, bool(ahead), sizes), numbers[NUMBERS:]

    def fill(
        self, layout_heads: int, sizes: list[int], live_blocks: int | None = None, lost: Tensor | None = None
    ) -> dict[tuple[str, int], Tiles]:
        """The tiles by side and height, of so many heads.

        Args:
            sizes, live_blocks: those of `Counts`; of a bounded plan one size, the entries of each that there is space
                for, and None.
            lost: of a bounded plan, int32 (1), 1 where there is space for none, so that all is NaN.
        """
        made = ops.index_fill(
            self.bits, self.memory, self.counts, self.columns, self.block, self.heights, "rows" in self.sides,
            "columns" in self.sides, self.bounded, layout_heads, sizes, lost, self.row_block,
        )  # fmt: skip
        keys = enumerate(product(self.sides, self.heights))
        tiles = {}
        for i, (side, tile) in keys:
            lines_of_entry = None if live_blocks is None else live_blocks / max(1, sizes[3 * i])
            differ = lines_differ(self.block, tile, lines_of_entry)
            lines, entries, units, cuts = made[4 * i : 4 * i + 4]
            if self.most_of_line and max(1, tile // self.block) * self.most_of_line * self.block <= NEVER_CUT:
                cuts = cuts.new_empty(0, 3)  # no view: a graph of torch.compile hands on none
            tiles[side, tile] = Tiles(tile, lines, entries, units, cuts, differ)
        return tiles


@outside_transforms_or_traced
def bits_of(layout: Tensor) -> Tensor:
    """The bits of what is not 0 in a layout (L, R, C). Raises RuntimeError where it is on a device without kernels."""
    require_kernel("index_bits", layout.device)
    return ops.index_bits(layout.bool())


@outside_transforms_or_traced
def bits_of_blocks(block_indices: Tensor, columns: int) -> Tensor:
    """The same of the blocks that `block_indices` (L, R, k) names for each row."""
    require_kernel("index_bits_of_blocks", block_indices.device)
    return ops.index_bits_of_blocks(block_indices.contiguous(), columns)


def _on_host(*tensors: Tensor) -> list[int]:
    """The numbers of all tensors, one after the other, in one transfer."""
    return torch.cat([x.flatten() for x in tensors]).tolist()
