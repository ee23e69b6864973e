"""What tokens can find under a layout: keys near them in one layer, and the rest through blocks in between."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SEEN = 0.9
"""Least share of the blocks at a distance that rows see."""


class Reach(NamedTuple):
    """Attributes:
    near: tokens before a query that it sees all of; 0: those of its own block.
    between: blocks that both see and are seen on the way of two layers from a far block to another, the mean.
    """

    near: int
    between: float


def reach_of(layout: Tensor, block: int) -> Reach:
    """What the heads of a layout, bool (H, R, R), see together."""
    seen = layout.any(0)
    blocks = len(seen)
    near = 0
    while near + 1 < blocks and seen.diagonal(-near - 1).float().mean() >= SEEN:
        near += 1
    # Leading and last blocks may be global themselves.
    rows, columns = seen[blocks * 3 // 4 : blocks * 7 // 8 + 1], seen[:, blocks // 8 : blocks // 4 + 1]
    return Reach(near * block, (rows.double().mean(0) @ columns.double().mean(1)).item())
