"""Rows of a layout that stand for a part of a sequence: what queries need that begin at a later position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..layout import on_cpu
from .block import BlockIndex
from .cache import Cache, Refusal
from .master_layout import MasterLayout
from .on_device import OnDevice

MOST_PARTS = 64
"""Layouts whose parts are kept, and parts and lists of each, the last that were used."""

_UNBUILT, _UNLISTED, _UNREAD = (
    Refusal(what, "call once before.", "call once before the capture.")
    for what in (
        "The index of rows of a layout cannot be built",
        "The keys that queries see cannot be listed",
        "The layout of an index cannot be read",
    )
)


@dataclass(frozen=True, eq=False)
class RowLists(OnDevice):
    """The live blocks of some neighbouring block rows, as lists of one length, on the CPU.

    Letters: P places where the rows begin, K rows from each, L stored layout heads, N the longest list.

    Attributes:
        columns: int64 (P, L, N), the block columns that one of the K rows sees, ascending; others behind a list's end.
        live: bool (P, L, K, N), whether a row sees the column.
    """

    columns: Tensor
    live: Tensor

    @property
    def device(self) -> torch.device:
        return self.columns.device


@dataclass(frozen=True, eq=False)
class KeysSeen(OnDevice):
    """The key tokens that some queries see.

    Letters: P 1, or the sequences of the batch; L stored layout heads; T queries; M tokens of the longest list.

    Attributes:
        token: int64 (P, L, M).
        seen: bool (P, L, T, M), whether a query sees the token.
        all_read: whether each token is seen by a query.
    """

    token: Tensor
    seen: Tensor
    all_read: bool

    @property
    def device(self) -> torch.device:
        return self.token.device


class Parts:
    """The layout of a `BlockIndex` or a `MasterLayout`, on the CPU, and what has been made of its rows.

    Attributes:
        layout: bool (L, R, C).
        block, num_heads: as of what it was made of.
    """

    def __init__(self, layout: Tensor, block: int, num_heads: int):
        self.layout, self.block, self.num_heads = layout, block, num_heads
        self._kept: Cache[Any] = Cache(MOST_PARTS)

    def _held(self) -> Iterator[Tensor]:
        yield self.layout
        yield from self._kept._held()

    def is_empty(self, rows: range, columns: range) -> bool:
        return not self.layout[:, rows.start : rows.stop, columns.start : columns.stop].any()

    def index(self, rows: range, columns: range, device: torch.device, up_to_own: bool = False) -> BlockIndex:
        """The index of some rows and columns alone, where asked for of each row's columns up to its own; built at first
        use."""

        def build() -> BlockIndex:
            part = self.layout[:, rows.start : rows.stop, columns.start : columns.stop]
            part = part.tril(rows.start - columns.start) if up_to_own else part
            return BlockIndex.build(part.to(device), self.block)

        return self._kept.get(("index", rows, columns, device, up_to_own), build, _UNBUILT, device)

    def keys_seen(
        self, offsets: tuple[int, ...], tokens: int, keys: int, causal: bool, device: torch.device
    ) -> KeysSeen:
        """Keys that `tokens` queries see, of so many, that begin at each of these positions. Made once for all layers
        of a step."""

        @on_cpu()
        def build() -> KeysSeen:
            return self._keys_seen(offsets, tokens, keys, causal).to(device)

        return self._kept.get(("seen", offsets, tokens, keys, causal, device), build, _UNLISTED, device).ready()

    def _keys_seen(self, offsets: tuple[int, ...], tokens: int, keys: int, causal: bool) -> KeysSeen:
        first = tuple(offset // self.block for offset in offsets)
        rows = max((offset + tokens - 1) // self.block - row for offset, row in zip(offsets, first)) + 1
        columns = -(-keys // self.block)
        lists = self._lists_of(first, rows, min(columns, max(first) + rows) if causal else columns)
        token = (lists.columns.unsqueeze(-1) * self.block + torch.arange(self.block)).flatten(-2)
        at = torch.tensor(offsets)[:, None] + torch.arange(tokens)
        row = at // self.block - torch.tensor(first)[:, None]
        seen = lists.live[torch.arange(len(first))[:, None], :, row].transpose(1, 2)
        seen = seen.repeat_interleave(self.block, dim=-1) & (token < keys).unsqueeze(2)
        if causal:
            seen = seen & (token.unsqueeze(2) <= at[:, None, :, None])
        is_read = seen.any(2)
        if len(is_read) == is_read.shape[1] == 1 and is_read.any():
            token, seen, is_read = token[..., is_read[0, 0]], seen[..., is_read[0, 0]], is_read[..., is_read[0, 0]]
        return KeysSeen(token.clamp(max=keys - 1), seen, bool(is_read.all()))

    def _lists_of(self, first_rows: tuple[int, ...], rows: int, columns: int) -> RowLists:
        """The lists of `rows` block rows from each of some rows, of the first `columns` block columns. What is below
        the last row is no row."""

        def build() -> RowLists:
            row = torch.tensor(first_rows)[:, None] + torch.arange(rows)
            there = row < self.layout.shape[1]
            of_rows = self.layout[:, row.clamp(max=self.layout.shape[1] - 1), :columns].transpose(0, 1)
            of_rows = of_rows & there[:, None, :, None]
            seen = of_rows.any(2)
            longest = max(1, int(seen.sum(-1).max()))
            order = seen.byte().argsort(dim=-1, descending=True, stable=True)[..., :longest]
            return RowLists(order, of_rows.gather(-1, order.unsqueeze(2).expand(-1, -1, rows, -1)))

        return self._kept.get(("lists", first_rows, rows, columns), build)


def parts_of(layout: BlockIndex | MasterLayout) -> Parts:
    """The parts of a layout, kept as long as it lives. The first call waits for an index's device."""

    if isinstance(layout, BlockIndex):
        layout.for_all_sequences("Queries from an offset on are")

    def build() -> Parts:
        live = layout.layout if isinstance(layout, MasterLayout) else layout.layout()
        return Parts(live.cpu(), layout.block, layout.num_heads)

    return _parts.get("parts", build, _UNREAD, layout.device, [layout])


_parts: Cache[Parts] = Cache(MOST_PARTS)
