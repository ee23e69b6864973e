"""Rows of a layout that stand for a part of a sequence: what queries need that begin at a later position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..layout import count_live, on_cpu, unpack_bits
from .block import BlockIndex
from .build import bits_of
from .cache import Cache, Refusal
from .master_layout import MasterLayout
from .on_device import OnDevice

MOST_PARTS = 64
"""Layouts whose parts are kept, and parts and lists of each, the last that were used."""

NO_TOKEN = 1 << 30
"""Above all tokens: the first of a block that is not there."""

_UNBUILT, _UNLISTED, _UNREAD = (
    Refusal(what, "call once before.", "call once before the capture.")
    for what in (
        "The index of rows of a layout cannot be built",
        "The keys that queries see cannot be listed",
        "The layout of an index cannot be read",
    )
)


@dataclass(frozen=True, eq=False)
class RowTable(OnDevice):
    """The live blocks of all block rows, as lists of one length.

    Letters: R block rows, L stored layout heads, N the longest list.

    Attributes:
        starts: int32 (R, L, N), the first token of each block, ascending, then `NO_TOKEN`.
        places: int32 (b,), the tokens' places in a block.
        lengths: the longest list of each row, on the host.
    """

    starts: Tensor
    places: Tensor
    lengths: list[int]

    def of(self, row: Tensor) -> Tensor:
        """`starts` of such rows, (..., L, N); on the CPU with N of the longest of these, on a GPU nobody knows it."""
        starts = self.starts
        if row.is_cpu and not isinstance(row, FakeTensor):
            starts = starts[..., : max(self.lengths[i] for i in row.flatten().tolist())]
        return starts.index_select(0, row.flatten()).unflatten(0, row.shape)


@dataclass(frozen=True, eq=False)
class KeysSeen(OnDevice):
    """The key tokens that some queries see.

    Letters: P 1, or the sequences of the batch; L stored layout heads; T queries; M tokens of the longest list.

    Attributes:
        token: int64 (P, L, M); queries of several block rows have a list of each, one after another.
        seen: bool (P, L, T, M), whether a query sees the token.
        position: int64 (P, T), of the queries.
        all_read: whether it is known that each token is seen by a query.
    """

    token: Tensor
    seen: Tensor
    position: Tensor
    all_read: bool


@dataclass(frozen=True, eq=False)
class _Made(OnDevice):
    """What has been made of the layout's bits."""

    tensor: Tensor


class Parts:
    """The layout of a `BlockIndex` or a `MasterLayout`, and what has been made of its rows.

    What is made of a position that is a tensor is made on its device, which nothing waits for, and is not kept: nothing
    tells whether it has been changed. On a GPU it has the length of the longest row of all.

    Attributes:
        rows, columns: block rows and columns.
        block, num_heads: as of what it was made of.
    """

    def __init__(self, bits: Tensor, columns: int, block: int, num_heads: int):
        self._bits = bits
        self.rows, self.columns = bits.shape[1], columns
        self.block, self.num_heads = block, num_heads
        self._kept: Cache[Any] = Cache(MOST_PARTS)

    @property
    def layout(self) -> Tensor:
        """bool (L, R, C), on the CPU. The first call waits for the device of an index."""

        def build() -> _Made:
            return _Made(unpack_bits(self._bits.cpu(), self.columns))

        return self._kept.get(("layout",), build, _UNREAD, self._bits.device).tensor

    def bits(self, device: torch.device) -> Tensor:
        """The layout's bits, as of `BlockIndex`, on a device; nothing waits."""
        if self._bits.device == device:
            return self._bits
        return self._kept.get(("bits", device), lambda: _Made(self._bits.to(device)), _UNLISTED, device).ready().tensor

    def _held(self) -> Iterator[Tensor]:
        yield self._bits
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

    def keys_seen(self, offset: int | Tensor, tokens: int, keys: int, causal: bool, device: torch.device) -> KeysSeen:
        """Keys that `tokens` queries see, of so many, that begin at a position, or each sequence's at its own, (1 or
        B,) on the device. Of a number made once for all layers of a step."""

        def build() -> KeysSeen:
            return self._keys_seen(offset, tokens, keys, causal, self._table(causal, device))

        if isinstance(offset, Tensor):
            return build()
        return self._kept.get(("seen", offset, tokens, keys, causal, device), build, _UNLISTED, device).ready()

    def _keys_seen(self, offset: int | Tensor, tokens: int, keys: int, causal: bool, table: RowTable) -> KeysSeen:
        listed, device = None, table.device
        position = torch.arange(tokens, device=device)
        if isinstance(offset, Tensor):
            position = offset.long()[:, None] + position
            row, rows = position // self.block, (tokens + self.block - 2) // self.block + 1
            # The last query's own row has to be there. None sees what is listed again to make lists of one length.
            starts = table.of(torch.minimum(row[:, :1] + torch.arange(rows, device=device), row[:, -1:]))
        else:
            position = (position + offset)[None]
            first, end = offset // self.block, (offset + tokens - 1) // self.block + 1
            row, rows = position // self.block, end - first
            starts = table.starts[None, first:end, :, : max(table.lengths[first:end])]
            if tokens == len(self.layout) == 1:
                # Block column of the last token that the query may see, and the token's place in it.
                column, place = divmod(min(offset, keys - 1) if causal else keys - 1, self.block)
                live = self.layout[0, first]
                # Where it sees nothing all of the row stays listed, unseen: a softmax is of one number at least.
                listed = int(live[:column].sum()) * self.block + (place + 1 if live[column] else 0) or None
        token = (starts.transpose(1, 2).unsqueeze(-1) + table.places).flatten(-2)  # (P, L, K, M)
        last = position.clamp(max=keys - 1) if causal else torch.full_like(position, keys - 1)
        seen = token.unsqueeze(2) <= last[:, None, :, None, None]
        if rows > 1:
            of_row = (row - row[:, :1]).unsqueeze(-1) == torch.arange(rows, device=device)
            seen = seen & of_row[:, None, :, :, None]
        token, seen = token.flatten(2)[..., :listed], seen.flatten(3)[..., :listed]
        return KeysSeen(token.clamp(max=keys - 1).long(), seen, position, listed is not None)

    def _table(self, causal: bool, device: torch.device) -> RowTable:
        """The lists of all rows, of causal queries without the blocks above the diagonal; made at first use."""

        @on_cpu()
        def build() -> RowTable:
            live = self.layout.tril() if causal else self.layout
            lengths = count_live(live)
            head, row, column = live.nonzero(as_tuple=True)
            ends, counts = lengths.flatten().cumsum(0), lengths.flatten()
            number = torch.arange(len(head)) - (ends - counts).repeat_interleave(counts)
            longest = lengths.amax(0).clamp(min=1).tolist()
            starts = torch.full((live.shape[1], len(live), max(longest)), NO_TOKEN, dtype=torch.int32)
            starts[row, head, number] = (column * self.block).int()
            return RowTable(starts, torch.arange(self.block, dtype=torch.int32), longest).to(device)

        return self._kept.get(("table", causal, device), build, _UNLISTED, device).ready()


def parts_of(layout: BlockIndex | MasterLayout) -> Parts:
    """The parts of a layout, kept as long as it lives."""
    if isinstance(layout, BlockIndex):
        layout.for_all_sequences("Queries from an offset on are").ready()

    def build() -> Parts:
        if isinstance(layout, BlockIndex):
            return Parts(layout.bits, layout.columns, layout.block, layout.num_heads)
        return Parts(bits_of(layout.layout.cpu()), layout.blocks, layout.block, layout.num_heads)

    return _parts.get("parts", build, None if isinstance(layout, BlockIndex) else _UNREAD, layout.device, [layout])


_parts: Cache[Parts] = Cache(MOST_PARTS)
