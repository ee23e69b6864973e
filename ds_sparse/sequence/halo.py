"""Attention where each rank computes the rows of its own tokens, and gets the keys that these see from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index import BlockIndex
from ..modules.local_attention import LocalAttention
from ..ops._autograd import differentiable_once
from ..ops.attention_function import attend
from ..ops.call import AttentionCall
from .exchange import RanksOfSequence
from .halo_plan import HaloPlan, parts_of, tokens_seen, within

# Here tokens stand before heads, (B, T, H, D), as projections of models make them: of one row, what goes to a rank or
# comes from one is then a range, and keys are put together in whole copies.

Pieces = Sequence[Sequence[Tensor]]
"""For each tensor what goes to ranks, or comes from them, (B, n, H, D) in the order of ranks, without those of no
token."""


class TokenExchange:
    """An exchange between ranks, both ways at once, without a gradient: copies of some tokens, and what comes back for
    these, which is added up.

    Args:
        sent: for each tensor the places of tokens that go to each rank, int64, on the tensors' device.
        coming: for each tensor how many tokens come from each rank.

    Attributes:
        coming: the same without zeros.
        before: how many pieces of the first tensor come from ranks before this one.
    """

    def __init__(self, sent: Sequence[Sequence[Tensor]], coming: Sequence[Sequence[int]], ranks: RanksOfSequence):
        self._ranks = ranks
        self._going, self._coming = _Order([[len(x) for x in of_tensor] for of_tensor in sent]), _Order(coming)
        self.coming, self.before = self._coming.counts, sum(n > 0 for n in coming[0][: ranks.rank])
        self._all = [torch.cat(list(of_tensor)) for of_tensor in sent]
        self._places = [x.split(counts) for x, counts in zip(self._all, self._going.counts, strict=True)]

    def copies(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The pieces of each tensor (B, T, H, D) that come from other ranks."""
        chosen = [x.index_select(1, places) for x, places in zip(tensors, self._all, strict=True)]
        pieces = [x.split(counts, 1) for x, counts in zip(chosen, self._going.counts, strict=True)]
        return self._moved(tensors, pieces, self._going, self._coming)

    def add_back(self, tensors: Sequence[Tensor], pieces: Pieces) -> None:
        """Adds to each tensor (B, T, H, D) what other ranks have for the copies that they got, in the order of
        ranks."""
        moved = self._moved(tensors, pieces, self._coming, self._going)
        for x, places, of_ranks in zip(tensors, self._places, moved, strict=True):
            for chosen, piece in zip(places, of_ranks, strict=True):
                x.index_add_(1, chosen, piece)

    def _moved(self, like: Sequence[Tensor], pieces: Pieces, going: _Order, coming: _Order) -> list[list[Tensor]]:
        """Sends each rank its pieces of tensors like these, one behind the other, and takes apart what comes."""
        batch = len(like[0])
        widths = [x[:, :1].numel() for x in like]
        flat = [pieces[tensor][place].reshape(-1) for tensor, place, _ in going.pieces]
        sent = torch.cat(flat) if flat else like[0].new_empty(0)
        received = self._ranks.exchange(sent, going.sizes(widths), coming.sizes(widths))
        found: list[list[Tensor]] = [[] for _ in like]
        if not coming.pieces:
            return found
        parts = received.split([n * widths[tensor] for tensor, _, n in coming.pieces])
        for part, (tensor, _, n) in zip(parts, coming.pieces, strict=True):
            found[tensor].append(part.view(batch, n, *like[tensor].shape[2:]))
        return found


class _Order:
    """In which order pieces go: by rank, and of a rank by tensor.

    Args:
        numbers: for each tensor the tokens of each rank.

    Attributes:
        counts: the same without zeros.
        pieces: of each its tensor, its place among those of the tensor, and its tokens.
    """

    def __init__(self, numbers: Sequence[Sequence[int]]):
        self._by_rank = list(zip(*numbers, strict=True))
        self.counts = [[n for n in of_tensor if n] for of_tensor in numbers]
        places = [iter(range(len(of_tensor))) for of_tensor in self.counts]
        self.pieces = [(x, next(places[x]), n) for of_rank in self._by_rank for x, n in enumerate(of_rank) if n]

    def sizes(self, widths: Sequence[int]) -> list[int]:
        """Numbers that go to each rank, where a token of each tensor has so many."""
        return [sum(n * width for n, width in zip(of_rank, widths, strict=True)) for of_rank in self._by_rank]


def exchange_of(
    wanted: Sequence[Sequence[Tensor]], lengths: Sequence[int], ranks: RanksOfSequence, device: torch.device
) -> TokenExchange:
    """The exchange by which ranks get tokens of the sequence.

    Args:
        wanted: for each tensor, and by rank, the places in the sequence of the tokens that the rank gets, int64,
            ascending.
    """
    parts = parts_of(lengths)
    own = parts[ranks.rank]
    sent = [[(within(places, own) - own.start).to(device) for places in of_tensor] for of_tensor in wanted]
    coming = [[len(within(of_tensor[ranks.rank], part)) for part in parts] for of_tensor in wanted]
    return TokenExchange(sent, coming, ranks)


class BlockHalo:
    """Attention of a layout's rows on the rank that has them.

    A rank's keys are its own and those that it fetches, in the order of the sequence. Wide rows stand behind the rank's
    own queries, so that one call computes both.

    Args:
        layout: bool (1 or H, R, R), as the plan was made for.
        causal: whether tokens see none after them, inside blocks too; the plan has no wide rows then.
    """

    def __init__(
        self,
        plan: HaloPlan,
        layout: Tensor,
        block: int,
        lengths: tuple[int, ...],
        causal: bool,
        ranks: RanksOfSequence,
        device: torch.device,
    ):
        rank, tokens, number = ranks.rank, sum(lengths), lengths[ranks.rank]
        own, fetched = torch.tensor(plan.blocks(rank)), plan.fetched[rank]
        columns = torch.cat([fetched, own]).sort().values
        keys = [_tokens_of(x, block, tokens) for x in plan.fetched]
        wide = _tokens_of(plan.wide, block, tokens)
        # Causality goes by places in a call: own queries stand where own keys do.
        front = int((fetched < own[0]).sum()) if causal else 0
        self._front = front * block
        self._queries = _Queries(number, -number % block if len(wide) else 0)
        rows = _rows(layout, own, columns, plan.wide, front)
        index = BlockIndex.build(rows.to(device), block)
        self._index = index.causal() if causal else index
        self._keys = _tokens_of(columns, block, tokens).to(device)
        self._causal = causal
        wanted, self._wide = [keys, keys], None
        if len(wide):
            wanted.append([wide] * ranks.size)
            self._wide = _WideRows(wide, lengths, self._queries, ranks, device)
        self._there = exchange_of(wanted, lengths, ranks, device)

    def __call__(self, call: AttentionCall) -> Tensor:
        """(B, H, T_r, D) of the rank's own queries, keys and values, and the whole sequence's mask (B or 1, T). No
        sinks where rows are wide: each rank would count them."""
        mask = call.key_padding_mask
        call = call._replace(causal=self._causal, key_padding_mask=None if mask is None else mask[:, self._keys])
        query, keys = call.query, (call.key, call.value)
        if self._wide is not None:
            key, value, query = _WithHalo.apply(self._there, self._queries, *keys, query)
            output, lse = self._attend(call._replace(query=query, key=key, value=value))
            # Transposed here, not in the function, whose result may then be written over.
            return _MergeWideRows.apply(self._wide, output, lse).transpose(1, 2)
        key, value = _WithHalo.apply(self._there, self._queries, *keys)
        query = pad(query, (0, 0, self._front, 0)) if self._front else query
        output, _ = self._attend(call._replace(query=query, key=key, value=value))
        return output[:, :, self._front :].clone()  # which may be written over: attention has saved its own

    def _attend(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return attend(call.checked(), self._index)


class WindowHalo:
    """Attention to the tokens around, on the rank that has them."""

    def __init__(
        self,
        attention: LocalAttention,
        lengths: tuple[int, ...],
        causal: bool,
        ranks: RanksOfSequence,
        device: torch.device,
    ):
        self._attention, self._causal = attention, causal
        parts = parts_of(lengths)
        seen = [tokens_seen(part, attention.window, sum(lengths), causal) for part in parts]
        fetched = [
            torch.cat([torch.arange(around.start, part.start), torch.arange(part.stop, around.stop)])
            for part, around in zip(parts, seen, strict=True)
        ]
        own, around = parts[ranks.rank], seen[ranks.rank]
        self._keys, self._before = slice(around.start, around.stop), own.start - around.start
        self._queries = _Queries(len(own), 0)
        self._there = exchange_of([fetched, fetched], lengths, ranks, device)

    def __call__(self, call: AttentionCall) -> Tensor:
        """(B, H, T_r, D), as `BlockHalo` has it."""
        mask = call.key_padding_mask
        mask = None if mask is None else mask[:, self._keys]
        key, value = _WithHalo.apply(self._there, self._queries, call.key, call.value)
        output = self._attention(
            call.query, key, value, scale=call.scale, causal=self._causal, key_padding_mask=mask, sinks=call.sinks,
            query_offset=self._before,
        )  # fmt: skip
        return output.clone()  # as `BlockHalo` does


class _Queries(NamedTuple):
    """The queries of a call: the rank's own, then padding to whole blocks, and those of wide rows.

    Attributes:
        own, behind: tokens of the first two.
    """

    own: int
    behind: int

    @property
    def wide(self) -> int:
        """The place of the first wide one."""
        return self.own + self.behind


class _WideRows:
    """The rows that all ranks compute, each over its own keys.

    Args:
        wide: their places in the sequence, int64, ascending.

    Attributes:
        own: the places of the rank's own among its tokens.
    """

    def __init__(
        self,
        wide: Tensor,
        lengths: tuple[int, ...],
        queries: _Queries,
        ranks: RanksOfSequence,
        device: torch.device,
    ):
        parts = parts_of(lengths)
        mine = within(wide, parts[ranks.rank])
        self.own, self.queries, self._ranks = (mine - parts[ranks.rank].start).to(device), queries, ranks
        self._of_ranks, self._number = [len(within(wide, part)) for part in parts], len(wide)

    def to_owners(self, rows: Tensor) -> Tensor:
        """Gathers all ranks' parts of the rank's own, (ranks, own, B, ...), from each rank's of all, (B, wide, ...)."""
        rows = rows.transpose(0, 1)
        width, own = prod(rows.shape[1:]), len(self.own)
        to, of = [n * width for n in self._of_ranks], [own * width] * len(self._of_ranks)
        return self._ranks.exchange(rows.reshape(-1), to, of).view(len(of), own, *rows.shape[1:])

    def from_owners(self, parts: Tensor) -> Tensor:
        """Gathers the owners' parts for this rank, (B, wide, ...), from each owner's for all, (ranks, own, B, ...)."""
        width, own = prod(parts.shape[2:]), len(self.own)
        to, of = [own * width] * len(self._of_ranks), [n * width for n in self._of_ranks]
        return self._ranks.exchange(parts.reshape(-1), to, of).view(self._number, *parts.shape[2:]).transpose(0, 1)


class _WithHalo(torch.autograd.Function):
    """Keys and values with those of other ranks in their places; and queries with those of wide rows behind them."""

    @staticmethod
    def forward(ctx, exchange, queries, *tensors):
        ctx.exchange, ctx.queries = exchange, queries
        by_tokens = [x.transpose(1, 2) for x in tensors]
        copies, results, at = exchange.copies(by_tokens), [], exchange.before
        for x, of_ranks in zip(by_tokens[:2], copies[:2], strict=True):
            results.append(torch.cat([*of_ranks[:at], x, *of_ranks[at:]], 1))
        for x, of_ranks in zip(by_tokens[2:], copies[2:], strict=True):
            results.append(torch.cat([*_padded(x, queries.behind), *of_ranks], 1))
        return tuple(x.transpose(1, 2) for x in results)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        exchange, queries, own, pieces = ctx.exchange, ctx.queries, [], []
        at = exchange.before
        # Written in place: the attention that follows has made them, and nobody else has them but a graph of gradients,
        # which is asked for here and refused later.
        by_tokens = [(x.clone() if x.requires_grad else x).transpose(1, 2) for x in grads]
        for x, sizes in zip(by_tokens[:2], exchange.coming[:2], strict=True):
            parts = list(x.split([*sizes[:at], queries.own, *sizes[at:]], 1))
            own.append(parts.pop(at))
            pieces.append(parts)
        for x, sizes in zip(by_tokens[2:], exchange.coming[2:], strict=True):
            own.append(x[:, : queries.own])
            pieces.append(x[:, queries.wide :].split(sizes, 1))
        exchange.add_back(own, pieces)
        return None, None, *(x.transpose(1, 2) for x in own)


class _MergeWideRows(torch.autograd.Function):
    """The rank's own output, (B, T_r, H, D), in which wide rows are merged from what ranks have for them: by their
    shares of the sum of exponentials, which are the softmax of lse over ranks."""

    @staticmethod
    def forward(ctx, wide, output, lse):
        ctx.wide, ctx.lse = wide, (lse.shape, lse.dtype)
        queries = wide.queries
        rows = output.transpose(1, 2)
        sums = lse[:, :, queries.wide :].transpose(1, 2).unsqueeze(-1)
        parts = wide.to_owners(torch.cat([rows[:, queries.wide :].to(sums.dtype), sums], -1))
        result = rows[:, : queries.own].clone(memory_format=torch.contiguous_format)
        outputs, sums = parts[..., :-1], parts[..., -1:]
        shares = sums.softmax(0).nan_to_num_(0)  # of rows that see nothing
        whole = (shares * outputs).sum(0)
        result[:, wide.own] = whole.transpose(0, 1).to(result.dtype)
        # On all ranks, with wide rows or without: a checkpoint stops where it has all that was saved, and has to stop
        # behind the exchange on all.
        ctx.save_for_backward(shares, outputs, whole)
        return result

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, grad):
        wide, (shape, dtype) = ctx.wide, ctx.lse
        shares, outputs, whole = ctx.saved_tensors
        of_outputs = shares * grad[:, wide.own].transpose(0, 1).to(dtype)
        of_sums = (of_outputs * (outputs - whole)).sum(-1, keepdim=True)
        mine = wide.from_owners(torch.cat([of_outputs, of_sums], -1))
        rows = [*_padded(grad, wide.queries.behind), mine[..., :-1].to(grad.dtype)]
        grad_lse = torch.zeros(shape, dtype=dtype, device=grad.device)
        grad_lse[:, :, wide.queries.wide :] = mine[..., -1].transpose(1, 2)
        return None, torch.cat(rows, 1).transpose(1, 2), grad_lse


def _padded(own: Tensor, tokens: int) -> list[Tensor]:
    """The rank's own rows (B, T_r, ...), and zeros for so many that are nobody's."""
    return [own, own.new_zeros(len(own), tokens, *own.shape[2:])] if tokens else [own]


def _tokens_of(blocks: Tensor, block: int, tokens: int) -> Tensor:
    """The tokens of blocks of a sequence, of which the last may be short."""
    places = (blocks[:, None] * block + torch.arange(block)).flatten()
    return places[places < tokens]


def _rows(layout: Tensor, own: Tensor, columns: Tensor, wide: Tensor, front: int) -> Tensor:
    """A rank's part of a layout: its own rows in some columns, and below them the wide ones in its own blocks'.
    Some rows in front are empty."""
    rows = layout[:, own][:, :, columns]
    rows[:, torch.isin(own, wide)] = False
    of_wide = layout[:, wide][:, :, columns] & torch.isin(columns, own)
    return torch.cat([rows.new_zeros(len(rows), front, len(columns)), rows, of_wide], 1)
