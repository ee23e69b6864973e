"""Tiles that kernels walk of a layout, and how much of them is waste, for the page that shows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..dispatch import HOPPER_TILE, walkers
from ..index.build import TilePlan, bits_of
from ..index.packing import BLOCK_BITS

OPERATION = "block_sparse_attention"

LARGEST = 8192
"""Block rows above which no tiles are made for a page: the layout has to be whole for them."""


@dataclass(frozen=True)
class Walk:
    """The tiles of a head from one side. `index.Tiles` says what lines, entries and owner bits are.

    Attributes:
        side: "rows", which forward and the gradient of the query walk, or "columns", those of key and value.
        tile: tokens of a tile's height.
        by: the implementations that walk such tiles.
        height: lines of a tile.
        parts: of a tile that leave out alone what none of their lines has: 2 on Hopper, else 1.
        lines: int32 (tiles * height), the lines tile by tile, -1 for none.
        entries: of all lists together.
        walked: blocks that lines walk, of all entries and all lines of the part of the tile that has the block.
        live: those of them that are live; the others are waste.
    """

    side: str
    tile: int
    by: list[str]
    height: int
    parts: int
    lines: np.ndarray
    entries: int
    walked: int
    live: int


def walks(live: Tensor, block: int) -> list[Walk]:
    """The tiles that each implementation of attention walks of a head, bool (R, R)."""
    found, live_blocks, bits = [], int(live.count_nonzero()), bits_of(live[None])
    for tile, by in walkers(OPERATION, block).items():
        plan = TilePlan(bits, live.shape[1], block, [tile])
        height = max(1, tile // block)
        parts = 2 if tile == HOPPER_TILE and height > 1 else 1
        counts, _ = plan.fetch()
        for (side, _), tiles in plan.fill(counts.layout_heads, counts.sizes).items():
            walked = _walked(tiles.entries >> BLOCK_BITS, height, parts)
            lines, entries = tiles.lines.numpy(), len(tiles.entries)
            found.append(Walk(side, tile, by, height, parts, lines, entries, walked, live_blocks))
    return found


def _walked(owners: Tensor, height: int, parts: int) -> int:
    of_part = height // parts
    masks = [((1 << of_part) - 1) << of_part * part for part in range(parts)]
    return sum(int(torch.count_nonzero(owners & mask)) * of_part for mask in masks)
