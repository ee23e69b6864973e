"""Rows of a layout that stand for a part of a sequence: what queries need that begin at a later position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..layout import count_live, on_cpu
from .block import BlockIndex
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

    @property
    def device(self) -> torch.device:
        return self.starts.device

    def of(self, row: Tensor) -> Tensor:
        """`starts` of such rows, (..., L, N); on the CPU with N of the longest of these, on a GPU nobody knows it."""
        starts = self.starts
        if row.is_cpu and not isinstance(row, FakeTensor):
            starts = starts[..., : max(self.lengths[i] for i in row.flatten().tolist())]
        return starts.index_select(0, row.flatten()).unflatten(0, row.shape)

    def tokens(self, starts: Tensor) -> Tensor:
        """The tokens of blocks (..., N): (..., N * b)."""
        return (starts.unsqueeze(-1) + self.places).flatten(-2)


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

    @property
    def device(self) -> torch.device:
        return self.token.device


class KeyLists(NamedTuple):
    """The key tokens that one query of each sequence sees, as operators over token pairs take lists.

    Attributes:
        offsets, columns: int32, where each list begins in `columns`, and where the last one ends.
        sequences: those that have lists of their own, or 1.
        spare: whether each is followed by a list of nobody, of what is left of its place.
    """

    offsets: Tensor
    columns: Tensor
    sequences: int
    spare: bool


@dataclass(frozen=True, eq=False)
class _ListsOfRow(OnDevice):
    """Lists of a block row for all places in a block where the tokens that count may end.

    Attributes:
        offsets: int32 (b, lists + 1), as of `KeyLists`, by the place of the last token.
        columns: int32 (L * M,).
        before: tokens of the first head that lie before that block; is_own: whether it sees the block.
    """

    offsets: Tensor
    columns: Tensor
    before: int
    is_own: bool

    @property
    def device(self) -> torch.device:
        return self.columns.device


class Parts:
    """The layout of a `BlockIndex` or a `MasterLayout`, on the CPU, and what has been made of its rows.

    What is made of a position that is a tensor is made on its device, which nothing waits for, and is not kept: nothing
    tells whether it has been changed. On a GPU it has the length of the longest row of all.

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
                column, place = self._end(offset, keys, causal)
                before, is_own = self._seen_before(first, column)
                # Where it sees nothing all of the row stays listed, unseen: a softmax is of one number at least.
                listed = before + (place + 1 if is_own else 0) or None
        token = table.tokens(starts.transpose(1, 2))  # (P, L, K, M)
        last = position.clamp(max=keys - 1) if causal else torch.full_like(position, keys - 1)
        seen = token.unsqueeze(2) <= last[:, None, :, None, None]
        if rows > 1:
            of_row = (row - row[:, :1]).unsqueeze(-1) == torch.arange(rows, device=device)
            seen = seen & of_row[:, None, :, :, None]
        token, seen = token.flatten(2)[..., :listed], seen.flatten(3)[..., :listed]
        return KeysSeen(token.clamp(max=keys - 1).long(), seen, position, listed is not None)

    def key_lists(
        self, offset: int | Tensor, keys: int, causal: bool, keep: Tensor | None, copies: int, device: torch.device
    ) -> KeyLists:
        """Lists of the keys that a query at a position sees, of so many, or one of each sequence at its own.

        Args:
            offset: as of `keys_seen`.
            keep: bool (B or 1, keys), which of them count; None for all.
            copies: lists a sequence: L, or a number of equal ones where that is 1.
        """
        if isinstance(offset, Tensor) or keep is not None:
            return self._lists_at(offset, keys, causal, keep, copies, self._table(causal, device))
        row, (column, place) = offset // self.block, self._end(offset, keys, causal)

        def build() -> _ListsOfRow:
            return self._lists_of_row(row, column, copies, self._table(causal, device))

        lists = self._kept.get(("lists", row, column, causal, copies, device), build, _UNLISTED, device).ready()
        if len(self.layout) > 1:
            return KeyLists(lists.offsets[place], lists.columns.clamp(max=keys - 1), 1, spare=True)
        columns = lists.columns[: lists.before + (place + 1 if lists.is_own else 0)]
        return KeyLists(lists.offsets[place], columns if copies == 1 else columns.repeat(copies), 1, spare=False)

    def _lists_at(
        self, offset: int | Tensor, keys: int, causal: bool, keep: Tensor | None, copies: int, table: RowTable
    ) -> KeyLists:
        last: int | Tensor = keys - 1
        if isinstance(offset, Tensor):
            token = table.tokens(table.of(offset // self.block))  # (P, L, M)
            if causal:
                # Beyond the keys there is no position in a layout that has no more rows.
                last = offset if keys >= len(table.lengths) * self.block else offset.clamp(max=keys - 1)
                last = last[:, None, None]
        else:
            token = self._tokens_of(offset // self.block, table)[None]
            last = min(offset, last) if causal else last
        seen = token <= last
        if keep is not None:
            shape = max(len(token), len(keep)), *token.shape[1:]
            place = token.clamp(max=keys - 1).long().expand(shape)
            seen = seen & keep[:, None].expand(*shape[:2], -1).gather(-1, place)
            token = torch.where(seen, token, NO_TOKEN).sort(-1).values
        counts = seen.sum(-1, dtype=torch.int32).expand(-1, copies)
        offsets = _begins(counts.numel(), token.shape[-1], table.device)
        offsets[1::2].add_(counts.flatten())
        columns = token.clamp_(max=keys - 1).expand(-1, copies, -1).flatten()
        return KeyLists(offsets, columns, len(token), spare=True)

    def _lists_of_row(self, row: int, column: int, copies: int, table: RowTable) -> _ListsOfRow:
        token, last = self._tokens_of(row, table), table.places + column * self.block
        counts = (token <= last[:, None, None]).sum(-1, dtype=torch.int32)  # (b, L)
        if len(token) == 1:
            offsets = counts * torch.arange(copies + 1, dtype=torch.int32, device=table.device)
        else:
            offsets = _begins(copies, token.shape[-1], table.device).repeat(self.block, 1)
            offsets[:, 1::2].add_(counts)
        return _ListsOfRow(offsets, token.flatten(), *self._seen_before(row, column))

    def _tokens_of(self, row: int, table: RowTable) -> Tensor:
        """The tokens of a block row, (L, M)."""
        return table.tokens(table.starts[row, :, : table.lengths[row]])

    def _end(self, offset: int, keys: int, causal: bool) -> tuple[int, int]:
        """Block column of the last token that a query may see, and the token's place in it."""
        return divmod(min(offset, keys - 1) if causal else keys - 1, self.block)

    def _seen_before(self, row: int, column: int) -> tuple[int, bool]:
        """Tokens that a block row of the first head sees before a block column, and whether it sees that."""
        live = self.layout[0, row]
        return int(live[:column].sum()) * self.block, bool(live[column])

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


def _begins(lists: int, longest: int, device: torch.device) -> Tensor:
    """Where lists begin that have places of one length, and the spare ones behind them if they are empty."""
    begins = torch.arange(0, lists * longest + 1, longest, dtype=torch.int32, device=device)
    return begins[:, None].expand(-1, 2).flatten()[:-1]


def parts_of(layout: BlockIndex | MasterLayout) -> Parts:
    """The parts of a layout, kept as long as it lives. The first call waits for an index's device."""

    if isinstance(layout, BlockIndex):
        layout.for_all_sequences("Queries from an offset on are")

    def build() -> Parts:
        live = layout.layout if isinstance(layout, MasterLayout) else layout.layout()
        return Parts(live.cpu(), layout.block, layout.num_heads)

    return _parts.get("parts", build, _UNREAD, layout.device, [layout])


_parts: Cache[Parts] = Cache(MOST_PARTS)
