"""Tiles: the live blocks of a layout as attention and products walk them, several short lines at a time, in even pieces
of work."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIDES = ("rows", "columns")


MOST_IN_COMMON = {32: 0.7, 64: 0.9}
"""By the tokens of a block: of the pairs of a tile's lines and of the blocks that any of them sees, those that are
live. With fewer of them halves are walked faster (docs/lab-notebook.md)."""


def lines_differ(block: int, tile: int, lines_of_entry: float | None) -> bool:
    """`Tiles.lines_differ`, of the mean number of lines that see an entry; None: nobody knows it, as where a model
    chooses blocks."""
    most = MOST_IN_COMMON.get(block, 0.0)
    return most > 0 if lines_of_entry is None else lines_of_entry < most * (tile // block)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The live blocks of a layout from one side, packed into tiles. All tensors are int32.

    A *line* is a block row (in the tiles of rows) or a block column (in those of columns). r = max(1, tile / block)
    lines make a tile of `tile` tokens; where a block is larger than that, a tile is one line. The lines of a tile need
    not be neighbours: those with similar lists are put together, so that walking the union of their lists wastes
    little. Each line of a head is in one tile. Tiles are numbered through the L stored layout heads, n = ceil(lines /
    r) a head.

    With blocks of 16, four lines that are live at the blocks {0, 1}, {1}, {1, 2} and {1} make a tile with the lines 0,
    1, 3, 2 (lines 1 and 3 are alike) and the entries 0 (bits 0001), 1 (bits 1111) and 2 (bits 1000).

    Hopper's kernels give each half of a tile's lines to warps of their own, which leave out the steps where it has
    nothing. So in tiles of `HOPPER_TILE` the blocks of one kind are together: those that both halves have, that the
    first alone has, that the second alone has; in tiles of columns those of the first alone come before. Where lists
    are long, by the mean of all that are made together, each stretch of the other side is ordered like that, so that
    neither half waits for the other long. (Not in tiles of columns with blocks of 64, where a half is a single line:
    ascending lists were up to 3 % faster there.)

    Attributes:
        tile: tokens of a tile's height.
        lines: (L * n * r). The number of each line within its head, tile by tile; -1 where a tile is not filled.
        entries: (E). For each tile the union of its lines' live blocks on the other side, tiles in their order. The low
            24 bits are the block's number on the other side; bit 24 + k, an owner bit, is set iff line k of the tile is
            live there (see `packing`). In ascending order, or in that of kinds as above. Bit 31 is the sign: read
            entries as uint32.
        units: (U, 4). The work of one thread block (for each batch, and each head that shares the layout head): tile,
            first entry, number of entries, part. A tile has one unit, perhaps of no entries, with part -1; or, where
            its list is longer than a bound and cutting pays, several of about equal length. These parts are numbered
            from 0 through all tiles that are cut, ascending. Units of a head are together, the longest first.
        cuts: (K, 3). The tiles that are cut: tile, first part, number of parts. What the parts give is put together in
            that order.
        lines_differ: whether the two halves of a tile's lines have so little in common that each is better walked by
            itself, where a kernel can do either.
    """

    tile: int
    lines: torch.Tensor
    entries: torch.Tensor
    units: torch.Tensor
    cuts: torch.Tensor
    lines_differ: bool = False

    def tile_of_entries(self, count: int) -> torch.Tensor:
        """The tile that each entry is of, int64 (E), `count` being how many tiles there are."""
        lengths = torch.zeros(count, dtype=torch.int64, device=self.units.device)
        tile, _, length, _ = self.units.long().unbind(1)
        lengths.index_add_(0, tile, length)
        return torch.arange(count, device=lengths.device).repeat_interleave(lengths, output_size=len(self.entries))
