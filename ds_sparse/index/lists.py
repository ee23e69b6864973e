"""Lists: the live blocks of a layout one by one, by rows and by columns, as MatMul and Softmax walk them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import count_live
from .packing import block_of, owner_bit
from .tiles import Tiles


@dataclass(frozen=True, eq=False)
class Lists:
    """The live blocks by rows and by columns; all tensors are int32. See `BlockIndex` for the letters.

    Attributes:
        row_offsets: (L*R + 1). Block row i of layout head l owns the entries from row_offsets[l*R+i] to
            row_offsets[l*R+i+1].
        row_columns: (V). The block column of each entry, ascending within a row.
        column_offsets: (L*C + 1). The same by columns.
        column_rows: (V). The block row of each entry in column order, ascending within a column.
        column_slots: (V). The entry's number in row order, which is where sparse values store it.
        slots: (E, r), for each side and height of tiles that products walk: of each entry and each line of its tile the
            live block's number in row order, -1 where the line has none. Only for blocks that products walk in tiles,
            on a Hopper GPU.
    """

    row_offsets: torch.Tensor
    row_columns: torch.Tensor
    column_offsets: torch.Tensor
    column_rows: torch.Tensor
    column_slots: torch.Tensor
    slots: dict[tuple[str, int], torch.Tensor]

    @classmethod
    def make(cls, live: torch.Tensor, live_blocks: int, tiles: dict[tuple[str, int], Tiles], block: int) -> Lists:
        """The lists of `live`, bool (L, R, C), which holds so many live blocks, with the slots of these tiles."""
        rows, columns = live.shape[1:]
        place = live.flatten().nonzero_static(size=live_blocks).squeeze(1)
        row, column = place // columns, place % columns
        head, row = row // rows, row % rows
        by_column = torch.argsort((head * columns + column) * rows + row)
        return cls(
            row_offsets=_offsets(count_live(live)),
            row_columns=column.int(),
            column_offsets=_offsets(count_live(live.transpose(1, 2))),
            column_rows=row[by_column].int(),
            column_slots=by_column.int(),
            slots={key: _slots(live, place, made, key[0], block) for key, made in tiles.items()},
        )


def _slots(live: torch.Tensor, place: torch.Tensor, tiles: Tiles, side: str, block: int) -> torch.Tensor:
    """The slots of the tiles of one side, as `Lists` has them.

    Args:
        live: bool (L, R, C).
        place: int64 (V), ascending. The numbers of those that are true, counted through all of `live`.
    """
    heads, rows, columns = live.shape
    height = tiles.tile // block
    lines = tiles.lines.view(-1, height)
    tile = tiles.tile_of_entries(len(lines))
    head, own = (tile // (len(lines) // heads)).unsqueeze(1), lines[tile].long()
    entries = tiles.entries.unsqueeze(1)
    other = block_of(entries)
    row, column = (own, other) if side == "rows" else (other, own)
    slot = torch.searchsorted(place, (head * rows + row) * columns + column)
    line = torch.arange(height, dtype=torch.int32, device=live.device)
    return slot.where(owner_bit(entries, line).bool(), -1).int()


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)).int()
