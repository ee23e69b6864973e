"""Rows of a layout that stand for a part of a sequence: what queries need that begin at a later position."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .block import BlockIndex
from .cache import Made, kept, kept_with, refuse_captured
from .lasting import lasting
from .master_layout import MasterLayout

MOST_PARTS = 64
"""Parts and lists of a layout that are kept, the last that were used."""


@dataclass(frozen=True, eq=False)
class RowLists:
    """The live blocks of some neighbouring block rows, as lists of one length.

    Letters: P places where the rows begin, K rows from each, L stored layout heads, N the longest list.

    Attributes:
        columns: int64 (P, L, N), the block columns that one of the K rows sees; 0 behind the end of a list.
        live: bool (P, L, K, N), whether a row sees the column.
    """

    columns: Tensor
    live: Tensor

    def _held(self) -> Iterator[Tensor]:
        yield from (self.columns, self.live)


class Parts:
    """The layout of a `BlockIndex` or a `MasterLayout`, on the CPU, and what has been made of its rows.

    Attributes:
        layout: bool (L, R, C).
        block, num_heads: as of what it was made of.
    """

    def __init__(self, layout: Tensor, block: int, num_heads: int):
        self.layout, self.block, self.num_heads = layout, block, num_heads
        self._indices: OrderedDict[Hashable, BlockIndex] = OrderedDict()
        self._lists: OrderedDict[Hashable, RowLists] = OrderedDict()

    def _held(self) -> Iterator[Tensor]:
        yield self.layout
        for index in tuple(self._indices.values()):
            yield from index._held()
        for lists in tuple(self._lists.values()):
            yield from lists._held()

    def is_empty(self, rows: range, columns: range) -> bool:
        return not self.layout[:, rows.start : rows.stop, columns.start : columns.stop].any()

    def index(self, rows: range, columns: range, device: torch.device) -> BlockIndex:
        """The index of some rows and columns alone, built at first use."""

        @lasting
        def build() -> BlockIndex:
            refuse_captured("The index of rows of a layout cannot be built", device, "call once before the capture.")
            part = self.layout[:, rows.start : rows.stop, columns.start : columns.stop]
            return BlockIndex.build(part.to(device), self.block)

        return kept(self._indices, (rows, columns, device), build, MOST_PARTS)

    def lists(self, first_rows: tuple[int, ...], rows: int, columns: int, device: torch.device) -> RowLists:
        """The lists of `rows` block rows from each of some rows, of the first `columns` block columns. What is below
        the last row is no row."""

        @lasting
        def build() -> RowLists:
            refuse_captured("The lists of a layout's rows cannot be made", device, "call once before the capture.")
            row = torch.tensor(first_rows)[:, None] + torch.arange(rows)
            there = row < self.layout.shape[1]
            of_rows = self.layout[:, row.clamp(max=self.layout.shape[1] - 1), :columns].transpose(0, 1)
            of_rows = of_rows & there[:, None, :, None]
            seen = of_rows.any(2)
            longest = max(1, int(seen.sum(-1).max()))
            order = seen.byte().argsort(dim=-1, descending=True, stable=True)[..., :longest]
            live = of_rows.gather(-1, order.unsqueeze(2).expand(-1, -1, rows, -1))
            return RowLists((order * seen.gather(-1, order)).to(device), live.to(device))

        return kept(self._lists, (first_rows, rows, columns, device), build, MOST_PARTS)


def parts_of(layout: BlockIndex | MasterLayout) -> Parts:
    """The parts of a layout, kept as long as it lives. The first call waits for an index's device."""

    @lasting
    def build() -> Parts:
        if isinstance(layout, MasterLayout):
            return Parts(layout.layout.cpu(), layout.block, layout.num_heads)
        refuse_captured("The layout of an index cannot be read", layout.device, "call once before the capture.")
        return Parts(layout.layout().cpu(), layout.block, layout.num_heads)

    return kept_with(_parts, [layout], None, build, MOST_PARTS)


_parts: OrderedDict[Hashable, Made[Parts]] = OrderedDict()
