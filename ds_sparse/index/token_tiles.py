"""Token pairs as bits in tiles: how attention on a Hopper GPU walks lists that have many pairs in few places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..dispatch import HOPPER_TILE
from .packing import block_of, place_of
from .tiles import SIDES, Tiles

if TYPE_CHECKING:
    from .token import TokenIndex

BLOCK = 64
"""Tokens on the side of the blocks that hold pairs."""

LEAST_PAIRS = 160
"""Pairs in the mean entry, of 128 x 64, from which tiles take less time than to gather the key and value of each pair:
as measured on an H200, forward and backward together, with heads of 64 numbers; longer ones cost both more."""

MOST_BLOCKS = 4
"""Blocks of the layout, most of them perhaps empty, for each pair: as many bytes as the list has."""


@dataclass(frozen=True, eq=False)
class TokenTiles:
    """The pairs of a `TokenIndex` whose lists all sequences share, in blocks of 64 x 64 tokens.

    Attributes:
        layout_heads: heads whose blocks are stored, 1 where all have the same.
        rows, columns: the tiles of the blocks that hold a pair, of 128 tokens.
        row_pairs, column_pairs: int32 (1 or H, E, 128, 2), E the entries of those tiles; H where heads with lists of
            their own have the same blocks. For each line of an entry's tile 64 bits, the low ones first: which tokens
            of the entry's block it is paired with.
    """

    layout_heads: int
    rows: Tiles
    columns: Tiles
    row_pairs: torch.Tensor
    column_pairs: torch.Tensor

    @classmethod
    def of(cls, index: TokenIndex) -> TokenTiles | None:
        """The tiles of a list's pairs, on any device. None where they would not pay, or cannot say what is listed: a
        list for each sequence, a pair twice. Waits for the device."""
        heads, queries, keys = index.heads, index.queries, index.keys
        # A layout, a square of the tokens, is made only where it is no larger than the list.
        blocks = heads * -(-queries // BLOCK) * -(-keys // BLOCK)
        if index.batch > 1 or index.num_pairs == 0 or blocks > MOST_BLOCKS * index.num_pairs:
            return None
        rows, columns = index.make_places()
        head, row, column = rows // queries, rows % queries, columns % keys
        for own, other, width in ((rows, column, keys), (columns, row, queries)):
            # Numbers of all heads' tokens: a tile that reaches from one head to the next is counted once, and may be.
            entries = torch.unique(own // HOPPER_TILE * width + other // BLOCK)
            if len(rows) < LEAST_PAIRS * len(entries):
                return None
        if index.repeated is not None:
            return None
        live = index.blocks(BLOCK)
        row_tiles, column_tiles = (live.tiles(side, HOPPER_TILE) for side in SIDES)
        sizes = heads, live.layout_heads
        return cls(
            live.layout_heads, row_tiles, column_tiles,
            _bits(row_tiles, *sizes, head, row, column), _bits(column_tiles, *sizes, head, column, row),
        )  # fmt: skip


def _bits(
    tiles: Tiles, heads: int, layout_heads: int, head: torch.Tensor, own: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """The bits of pairs in the entries of tiles, as `TokenTiles` has them.

    Args:
        head, own, other: int64 (N). Each pair's head, its token on the tiles' side and the one on the other.
    """
    device, height = own.device, tiles.tile // BLOCK
    # Which of the layout's heads, and of the bits' that share one.
    of_layout, copy = (head, 0) if layout_heads == heads else (0, head)
    lines = tiles.lines.view(layout_heads, -1).long()
    number, num_tiles = lines.shape[1], lines.numel() // height
    # Where each line is; those that a last tile lacks are written to a place that nobody reads.
    place = torch.empty(layout_heads, number + 1, dtype=torch.int64, device=device)
    place.scatter_(1, lines.where(lines >= 0, number), torch.arange(number, device=device).expand(layout_heads, -1))
    at = place[of_layout, own // BLOCK]
    tile, line = of_layout * (number // height) + at // height, at % height * BLOCK + own % BLOCK

    entries = tiles.entries.long()
    ascending, order = place_of(tiles.tile_of_entries(num_tiles), block_of(entries)).sort()
    entry = order[torch.searchsorted(ascending, place_of(tile, other // BLOCK))]
    word = ((copy * len(entries) + entry) * tiles.tile + line) * 2 + other % BLOCK // 32
    # Each bit is added once; the highest makes a negative number.
    shape = (heads // layout_heads, len(entries), tiles.tile, 2)
    bits = torch.zeros(shape, dtype=torch.int64, device=device)
    bits.view(-1).index_add_(0, word, torch.ones_like(other) << other % 32)
    return bits.int()
