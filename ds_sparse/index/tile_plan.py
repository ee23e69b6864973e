"""From a layout to its tiles: which lines share a tile, and in which order their entries follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.nn.functional import pad

from ..dispatch import HOPPER_TILE
from ..layout import count_live, pack_bits
from .cuts import cut_lists
from .packing import MAX_LINES, pack_entries_
from .tiles import Tiles
from .transforms import outside_of_graphs

TURN = 256
"""Target run length, in tokens, of blocks that only one half of a tile needs before the order switches halves: lists of
mean length have runs of it, or of up to twice as many."""

BOTH, SECOND, FIRST = 0, 1, 2
"""Kinds of blocks: lines of both halves of a tile have them, of the second alone, of the first alone. Flags: no line of
the first half, none of the second."""

ORDERS = {"rows": (BOTH, FIRST, SECOND), "columns": (FIRST, BOTH, SECOND)}
"""As the kernels that hold a side take them fastest: those of rows begin where both halves have work."""

Lengths = dict[tuple[str, int], list[list[int]]]
"""By side and height of tiles, for each head: the entries of each tile."""


@dataclass(frozen=True, eq=False)
class TilePlan:
    """Plans which lines share a tile. Its sizes follow from the layout's, so that making it waits for no device;
    those of `Tiles` follow from `lengths`, which the host has to fetch. On a GPU the time goes into the number of
    operations: sides of the same shape and several heights are planned, and packed, together.

    Letters: G the sides of the first head, then those of the second, and so on; T the tiles of a head from one side,
    all of the first height, then all of the next.

    Attributes:
        block: tokens on a block's side.
        sides: their names.
        tiles: the heights in tokens, ascending.
        lines: for each height int32 (G, n * r), as in `Tiles`.
        owners: uint8 (G, T, other side). Bit k: line k of the tile is live at the block.
        lengths: int64 (G, T), entries of each tile.
        bits: uint8 (G, lines, ceil(other side / 8)). The layout, as `layout.pack_bits` packs it.
        live_blocks: int64 (G).
    """

    block: int
    sides: tuple[str, ...]
    tiles: tuple[int, ...]
    lines: tuple[torch.Tensor, ...]
    owners: torch.Tensor
    lengths: torch.Tensor
    bits: torch.Tensor
    live_blocks: torch.Tensor

    @classmethod
    def make(cls, sides: dict[str, torch.Tensor], block: int, *tiles: int) -> TilePlan:
        """Plans the tiles of some heights.

        Args:
            sides: by name, bool (L, lines, other side), all of one shape.
            tiles: heights in tokens, each twice the one before; at most the first is of a single line.

        Raises:
            ValueError: a tile that is not a power of two, or has more lines than an entry has bits for.
        """
        for tile in tiles:
            if not isinstance(tile, int) or tile < 1 or tile & (tile - 1) or tile > MAX_LINES * block:
                raise ValueError(
                    f"tile is {tile!r}; it has to be a power of two and at most {MAX_LINES} blocks of {block} tokens."
                )
        live = torch.stack(list(sides.values()), 1).flatten(0, 1).view(torch.uint8)
        bits, count = pack_bits(live), count_live(live)
        lines, owners = [], []
        for height in (_height(tile, block) for tile in reversed(tiles)):
            number = -(-live.shape[1] // height)
            if height == 1:
                lines.append(torch.arange(number, dtype=torch.int32, device=live.device).expand(len(live), -1))
                owners.append(live)
            elif not lines:
                order = _similar_lines_together(bits, count)
                missing = number * height - live.shape[1]
                order = pad(order, (0, missing), value=-1) if missing else order
                lines.append(order.int())
                owners.append(_owners(live, order, height))
            else:
                # The halves of a tile, the last of which may be without a line.
                halves = torch.stack([owners[-1] & (1 << height) - 1, owners[-1] >> height], 2)
                lines.append(_first(lines[-1], number * height))
                owners.append(_first(halves.flatten(1, 2), number))
        every = torch.cat(owners[::-1], 1) if len(owners) > 1 else owners[0]
        lengths = count_live(every.clamp(max=1))
        return cls(block, tuple(sides), tiles, tuple(lines[::-1]), every, lengths, bits, count.sum(1))

    def split(self, lengths: list[int], heads: int) -> Lengths:
        """Splits `lengths`, fetched and flat, and keeps those of the first heads."""
        left = iter(lengths)
        found: Lengths = {(side, tile): [] for side in self.sides for tile in self.tiles}
        for _ in range(heads):
            for side in self.sides:
                for tile, lines in zip(self.tiles, self.lines):
                    found[side, tile].append(list(islice(left, lines.shape[1] // _height(tile, self.block))))
        return found

    @outside_of_graphs
    def pack(self, lengths: Lengths) -> dict[tuple[str, int], Tiles]:
        """Makes the tiles of what `split` returned. Arrays of NumPy are no tensors here, as torch.compile would have
        them."""
        device, heads = self.owners.device, len(next(iter(lengths.values())))
        sizes = [sum(of_heads[head]) for head in range(heads) for of_heads in lengths.values()]
        entries = _entries(self._in_order(lengths, sum(sizes)), sum(sizes)).split(sizes)
        units, cuts = zip(*(cut_lists(of_heads, self.block) for of_heads in lengths.values()))
        units, cuts = _rows(units, device), _rows(cuts, device)
        lines = {tile: lines.unbind() for tile, lines in zip(self.tiles, self.lines)}
        made = {}
        for i, (side, tile) in enumerate(lengths):
            of_side = lines[tile][self.sides.index(side) :: len(self.sides)]
            of_heads = _joined(of_side[:heads]), _joined(entries[i :: len(lengths)])
            made[side, tile] = Tiles(tile, *of_heads, units[i], cuts[i])
        return made

    def _in_order(self, lengths: Lengths, count: int) -> torch.Tensor:
        """The owners as entries, `count` of them, follow each other: stretch by stretch, kind by kind, uint8 (G, T,
        stretches, kinds, blocks of one)."""
        groups = len(next(iter(lengths.values()))) * len(self.sides)
        owners = self.owners if len(self.owners) == groups else self.owners[:groups]
        if HOPPER_TILE not in self.tiles or self.block >= HOPPER_TILE:
            return owners.unsqueeze(2).unsqueeze(2)
        tokens = self.block * count // owners.shape[:2].numel()
        # A power of two, so that a half has a turn or two in one if each has half of the entries.
        stretches = 1 << max(0, (tokens // (2 * TURN)).bit_length() - 1)
        missing = -owners.shape[2] % stretches
        owners = pad(owners, (0, missing)) if missing else owners
        owners = owners.view(*owners.shape[:2], stretches, 1, -1)
        first_half, kinds = self._orders(lengths).split((1, 3), 3)
        # Both flags, which is no kind, where nobody has a block.
        kind = owners & first_half
        no_others = kind == owners
        kind.eq_(0).add_(no_others, alpha=FIRST)
        return (kind ^ kinds).eq_(0).mul_(owners)

    def _orders(self, lengths: Lengths) -> torch.Tensor:
        """For each tile of each side of each head the bits of its first half of lines, of none where the order of
        blocks is the ascending one, and the kinds of blocks as they follow each other: uint8 (G, T, 1, 4, 1)."""
        orders = bytearray()
        for (side, tile), of_heads in lengths.items():
            height = _height(tile, self.block)
            in_turns = tile == HOPPER_TILE and (side == "rows" or height > 2)
            orders += bytes([(1 << height // 2) - 1 if in_turns else 0, *ORDERS[side]]) * len(of_heads[0])
        heads = len(of_heads)
        return _on_device(orders * heads, torch.uint8, self.owners.device).view(heads * len(self.sides), -1, 1, 4, 1)


def _height(tile: int, block: int) -> int:
    """Lines of a tile."""
    return max(1, tile // block)


def _entries(owners: torch.Tensor, count: int) -> torch.Tensor:
    """The entries of tiles, as many as `count`, one after the other.

    Args:
        owners: uint8 (G, T, stretches, kinds, blocks of a stretch).
    """
    stretches, kinds, span = owners.shape[2:]
    owners = owners.flatten()
    place = owners.nonzero_static(size=count).squeeze_(1)
    owners = owners[place]
    column = place % span
    if stretches > 1:
        column.add_(place.floor_divide_(kinds * span).remainder_(stretches), alpha=span)
    return pack_entries_(column, owners)


def _owners(live: torch.Tensor, order: torch.Tensor, height: int) -> torch.Tensor:
    """Marks which of a tile's lines are live at each block, as bits: uint8 (G, tiles, other side).

    Args:
        live: uint8 (G, lines, other side).
        order: (G, tiles * height). The lines, tile by tile; -1 for none.
    """
    if order.shape[1] > live.shape[1]:
        live = pad(live, (0, 0, 0, 1))  # -1 takes the last line, one that is live nowhere
    head = torch.arange(len(live), device=live.device).unsqueeze(1)
    of_tiles = live[head, order].unflatten(1, (-1, height))  # a copy
    bit = torch.arange(height, dtype=torch.uint8, device=live.device).unsqueeze(1)
    return of_tiles.bitwise_left_shift_(bit).sum(2, dtype=torch.uint8)


def _similar_lines_together(bits: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The lines of each head, (G, lines), in an order in which neighbours have similar lists.

    Long lists (above twice the median) come first: a global line in a tile of others makes the tile walk all blocks
    for the sake of one line. Then lines stay where they are, which keeps windows together; but those with the very list
    of an earlier line follow that one, as with strides.

    Args:
        bits, count: each line's live blocks as `pack_bits` and `count_live` have them.
    """
    number = count.shape[1]
    median = count.sort(1).values.narrow(1, (number - 1) // 2, 1)
    hashes = _hashes(bits)
    ascending, line = hashes.sort(dim=1, stable=True)
    first_alike = line.gather(1, torch.searchsorted(ascending, hashes))
    return torch.add(first_alike, count <= 2 * median, alpha=number).argsort(dim=1, stable=True)


def _hashes(bits: torch.Tensor) -> torch.Tensor:
    """A number for the list of each line, int64 (G, lines). Different lists with the same number would be put together
    in vain, and no more."""
    # High powers of odd numbers, which wrap around: weights that sums of a few do not repeat.
    weights = torch.arange(1, 2 * bits.shape[-1], 2, device=bits.device) ** 17
    return (bits * weights).sum(-1)


def _rows(rows: Sequence[np.ndarray], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arrays of int32 (rows, width) as tensors."""
    return _on_device(np.concatenate(rows), torch.int32, device).view(-1, rows[0].shape[1]).split(list(map(len, rows)))


def _on_device(numbers: np.ndarray | bytearray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # What is not pinned has been read when the call returns, which does not wait for the device.
    on_host = torch.frombuffer(numbers, dtype=dtype) if len(numbers) else torch.empty(0, dtype=dtype, device="cpu")
    return on_host.to(device, non_blocking=True)


def _first(x: torch.Tensor, count: int) -> torch.Tensor:
    """So many of dimension 1."""
    return x if x.shape[1] == count else x.narrow(1, 0, count)


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
