"""What the kernels of attention walk of a layout: its tiles, and how much of them is waste."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import HOPPER_TILE, TILE
from ..index.packing import MAX_LINES
from ..index.tile_plan import TilePlan


@dataclass(frozen=True)
class Side:
    """The tiles of a side, of one head, mean over heads.

    Attributes:
        computed: scores that are multiplied: each half of a tile leaves out the steps where it has nothing.
        loaded: scores of whole tiles: what they bring from L2 goes by these.
        entries: blocks in the lists of tiles.
    """

    computed: float
    loaded: float
    entries: float


@dataclass(frozen=True)
class Walk:
    """A layout as attention computes it.

    Attributes:
        seq_len: tokens, whole blocks.
        live: scores of live blocks, mean over heads.
        rows: what forward walks.
        columns: what backward walks.
    """

    block: int
    seq_len: int
    live: float
    rows: Side
    columns: Side

    @classmethod
    def of(cls, layout: Tensor, block: int) -> Walk:
        """The tiles of an index of this layout, as on a Hopper GPU.

        Args:
            layout: bool (H or 1, R, R).
            block: tokens on a block's side.
        """
        live = torch.count_nonzero(layout).item() / len(layout) * block**2
        sides = {"rows": layout, "columns": layout.transpose(1, 2)}
        return cls(block, layout.shape[1] * block, live, **_sides(sides, block))

    @property
    def density(self) -> float:
        return self.live / self.seq_len**2

    @property
    def computed(self) -> float:
        """Part of all scores that is multiplied, mean of forward and backward."""
        return (self.rows.computed + self.columns.computed) / (2 * self.seq_len**2)

    @property
    def loaded(self) -> float:
        """Part of all scores that is in whole tiles, mean of forward and backward."""
        return (self.rows.loaded + self.columns.loaded) / (2 * self.seq_len**2)

    @property
    def waste(self) -> float:
        """Part of the scores multiplied that no live block has."""
        return 1 - self.density / self.computed if self.live else 0.0


def _sides(sides: Mapping[str, Tensor], block: int) -> dict[str, Side]:
    # Blocks of a tile's height and more are lines of their own; of the smallest, a tile has as many as it may.
    heights = [height for height in (TILE, HOPPER_TILE) if block < HOPPER_TILE and height <= MAX_LINES * block]
    heights = heights or [HOPPER_TILE]
    plan = TilePlan.make(dict(sides), block, *heights)
    height = max(block, heights[-1])
    found = {}
    for number, name in enumerate(sides):
        lengths = plan.lengths[number :: len(sides)].double()
        tall = -(-plan.lines[-1].shape[1] // max(1, heights[-1] // block))
        entries = lengths[:, -tall:].sum().item() / len(lengths)
        computed = entries * block * height
        if len(heights) > 1:
            computed = lengths[:, :-tall].sum().item() / len(lengths) * block * max(block, TILE)
        found[name] = Side(computed, entries * block * height, entries)
    return found
