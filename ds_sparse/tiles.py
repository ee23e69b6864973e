"""Tiles: the live blocks of a layout as attention walks them, several short lines at a time, in even pieces of work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .layout import count_live, pack_bits

TILE = 64
"""Tokens of a tile's height, unless another is asked for."""

HOPPER_TILE = 128
"""Tokens of the tiles of the kernels for Hopper GPUs."""

STEP = 64
"""Tokens that a kernel takes from the other side at once: a list is cut at multiples of them, so that none is part full
but the last."""

LEAST_CUT = 1024
"""Tokens below which a list is not cut: shorter parts would not pay for putting their results together."""

MAX_LINES = 8
"""Lines of a tile, as an entry has so many bits for them."""

MAX_BLOCKS = 2**24
"""Blocks on a side of the layout, as an entry has 24 bits for their numbers."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The live blocks of a layout from one side, packed into tiles. All tensors are int32.

    A *line* is a block row (in the tiles of rows) or a block column (in those of columns). r = max(1, tile / block)
    lines make a tile of `tile` tokens; where a block is larger than that, a tile is one line. The lines of a tile need
    not be neighbours: those with similar lists are put together, so that walking the union of their lists wastes little.
    Each line of a head is in one tile. Tiles are numbered through the L stored layout heads, n = ceil(lines / r) a head.

    With blocks of 16, four lines that are live at the blocks {0, 1}, {1}, {1, 2} and {1} make a tile with the lines 0, 1,
    3, 2 (lines 1 and 3 are alike) and the entries 1 (bits 1111), 0 (bits 0001) and 2 (bits 1000).

    Attributes:
        tile: tokens of a tile's height.
        lines: (L * n * r). The number of each line within its head, tile by tile; -1 where a tile is not filled.
        entries: (E). For each tile the union of its lines' live blocks on the other side, tiles in their order. The low
            24 bits are the block's number on the other side; bit 24 + k is set iff line k of the tile is live there.
            The blocks that all existing lines have come first, then the others, both in ascending order. Bit 31 is
            the sign: read entries as uint32.
        units: (U, 4). The work of one thread block (for each batch, and each head that shares the layout head): tile,
            first entry, number of entries, part. A tile has one unit, perhaps of no entries, with part -1; or, where
            its list is longer than a bound, several of about equal length. These parts are numbered from 0 through all
            tiles that are cut, ascending. Units of a head are together, the longest first.
        cuts: (K, 3). The tiles that are cut: tile, first part, number of parts. What the parts give is put together in
            that order.
    """

    tile: int
    lines: torch.Tensor
    entries: torch.Tensor
    units: torch.Tensor
    cuts: torch.Tensor

    def to(self, device: torch.device | str) -> Tiles:
        """The same tiles on another device."""
        return Tiles(self.tile, *(x.to(device) for x in (self.lines, self.entries, self.units, self.cuts)))


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Which lines share a tile and how its list is cut. The sizes of a plan follow from the layout's, so that it is made
    without waiting for the device; those of `Tiles` follow from the plan.

    Attributes:
        tile, block: tokens of a tile's height and of a block's side.
        lines: int32 (L, n, r), as in `Tiles`.
        all_bits: uint8 (L, n). Bit k: the tile has a line k.
        owners: uint8 (L, n, other side). Bit k: line k of the tile is live at the block.
        lengths: int64 (L, n), entries of each tile.
        parts: int64 (L, n), units of each tile.
    """

    tile: int
    block: int
    lines: torch.Tensor
    all_bits: torch.Tensor
    owners: torch.Tensor
    lengths: torch.Tensor
    parts: torch.Tensor

    @classmethod
    def make(cls, live: torch.Tensor, block: int, tile: int) -> TilePlan:
        """Plans the tiles of `live`, bool (L, lines, other side).

        Raises:
            ValueError: a tile that is not a power of two, or has more lines than an entry has bits for.
        """
        if tile < 1 or tile & (tile - 1) or tile > MAX_LINES * block:
            raise ValueError(
                f"tile is {tile}; it has to be a power of two and at most {MAX_LINES} blocks of {block} tokens."
            )
        count = max(1, tile // block)
        lines = _similar_lines_together(live) if count > 1 else _in_order(live)
        lines = pad(lines, (0, -lines.shape[1] % count), value=-1).unflatten(1, (-1, count))
        bits = (lines >= 0).to(torch.uint8) << torch.arange(count, dtype=torch.uint8, device=live.device)
        head = torch.arange(len(live), device=live.device)[:, None, None]
        # The indexing copies. Where there is no line, -1 takes the last one, which has no bit.
        owners = live.view(torch.uint8)[head, lines].mul_(bits.unsqueeze(-1)).sum(2, dtype=torch.uint8)
        lengths = count_live(owners != 0)
        all_bits = bits.sum(2, dtype=torch.uint8)
        return cls(tile, block, lines.int(), all_bits, owners, lengths, _parts(lengths, block))

    def sizes(self) -> torch.Tensor:
        """The entries, units and cuts of each head: int64 (3, L), on the device."""
        return torch.stack([self.lengths, self.parts, self.parts > 1]).sum(2)

    def of_heads(self, heads: int) -> TilePlan:
        """The plan of the first heads."""
        tensors = (self.lines, self.all_bits, self.owners, self.lengths, self.parts)
        return TilePlan(self.tile, self.block, *(x[:heads] for x in tensors))

    def pack(self, entries: int, units: int, cuts: int) -> Tiles:
        """Makes the tiles. The arguments are `sizes().sum(1)`, on the host."""
        return Tiles(self.tile, self.lines.flatten(), self._entries(entries), *self._cut(units, cuts))

    def _entries(self, count: int) -> torch.Tensor:
        in_some, in_all = self.owners != 0, self.owners == self.all_bits.unsqueeze(-1)
        groups = torch.stack([in_all, in_some ^ in_all], 2)
        place = groups.flatten().nonzero_static(size=count).squeeze(1)
        blocks = self.owners.shape[2]
        tile, block = place // (2 * blocks), place % blocks
        return self.owners.flatten(0, 1)[tile, block].int() << 24 | block.int()

    def _cut(self, num_units: int, num_cuts: int) -> tuple[torch.Tensor, torch.Tensor]:
        step, tiles_of_head = max(1, STEP // self.block), self.lengths.shape[1]
        lengths, parts = self.lengths.flatten(), self.parts.flatten()
        is_cut = parts > 1
        numbers = torch.stack([lengths, parts, parts * is_cut])
        first_entry, first_unit, first_part = (numbers.cumsum(1) - numbers).unbind()

        unit, cut = (torch.arange(number, device=parts.device) for number in (num_units, num_cuts))
        tile = torch.searchsorted(first_unit, unit, right=True) - 1
        tiles = torch.stack([lengths, first_entry, first_unit, first_part, parts], 1)
        length, first_entry, first_unit, first_part, parts = tiles[tile].unbind(1)
        part = unit - first_unit
        steps = _ceil_div(length, step)
        begin, end = (torch.minimum(steps * edge // parts * step, length) for edge in (part, part + 1))
        part = torch.where(parts > 1, first_part + part, -1)
        length = end - begin
        longest_first = (tile // tiles_of_head * (self.owners.shape[2] + 1) - length).argsort(stable=True)
        units = torch.stack([tile, first_entry + begin, length, part], 1)[longest_first]

        tile = torch.searchsorted(is_cut.cumsum(0), cut, right=True)
        cuts = torch.cat([tile.unsqueeze(1), tiles[tile, 3:]], 1)
        return units.int(), cuts.int()


def _similar_lines_together(live: torch.Tensor) -> torch.Tensor:
    """The lines of each head, (L, lines), in an order in which neighbours have similar lists.

    Long lists (above twice the median) come first: a global line in a tile of others makes the tile walk all blocks
    for the sake of one line. Then lines stay where they are, which keeps windows together; but those with the very list
    of an earlier line follow that one, as with strides.
    """
    count, number = count_live(live), live.shape[1]
    median = count.sort(1).values[:, (number - 1) // 2, None]
    hashes, line = _hashes(live).sort(dim=1, stable=True)
    first_alike = line.gather(1, torch.searchsorted(hashes, hashes))
    place = (count <= 2 * median).gather(1, line) * number + first_alike
    return line.gather(1, place.argsort(dim=1, stable=True))


def _in_order(live: torch.Tensor) -> torch.Tensor:
    return torch.arange(live.shape[1], device=live.device).expand(live.shape[:2])


def _hashes(live: torch.Tensor) -> torch.Tensor:
    """A number for the list of each line, int64 (L, lines). Different lists with the same number would be put together
    in vain, and no more."""
    bits = pack_bits(live)
    # High powers of odd numbers, which wrap around: weights that sums of a few do not repeat.
    weights = torch.arange(1, 2 * bits.shape[-1], 2, device=live.device) ** 17
    return (bits * weights).sum(-1)


def _parts(lengths: torch.Tensor, block: int) -> torch.Tensor:
    """Into how many units each tile is cut: a unit has at most twice the mean length of its head's tiles, in whole
    steps, or LEAST_CUT tokens where that is more."""
    step = max(1, STEP // block)
    twice_the_mean = _ceil_div(2 * lengths.sum(1, keepdim=True), lengths.shape[1] * step)
    longest = twice_the_mean.clamp(min=max(1, LEAST_CUT // (step * block)))
    return (lengths - 1).clamp(min=0) // step // longest + 1


def _ceil_div(x: torch.Tensor, y: int) -> torch.Tensor:
    return (x + (y - 1)) // y
