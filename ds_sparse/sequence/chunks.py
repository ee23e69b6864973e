"""Attention between its exchanges: a rank's heads in chunks, of which one is computed while others are on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from ..ops._autograd import differentiable_once
from .deal import HeadDeal
from .exchange import Exchange, Flight, RanksOfSequence

CHUNKS = 3
"""Into how many chunks heads are cut. Nothing hides the way of the first chunk to attention and that of the last from
it: more chunks shorten these, and make kernels small."""

CHUNKS_FROM = {"cuda": 192 << 20}
"""By device, from how many bytes of query, key and value a rank on heads are cut: 44,000 tokens of BERT-base in 16
bits. With fewer a GPU waits for Python, which takes longer for each chunk."""


def most_chunks(query: torch.Tensor, key: torch.Tensor, lengths: tuple[int, ...]) -> int:
    """Into how many chunks it pays to cut heads; the same on all ranks."""
    fewest = CHUNKS_FROM.get(query.device.type)
    if fewest is None:
        return 1
    batch, heads, _, width = query.shape
    numbers = batch * sum(lengths) * width * (heads + 2 * key.shape[1])
    return CHUNKS if numbers * query.element_size() >= fewest * len(lengths) else 1


class HeadChunks:
    """How the heads of a deal go between ranks: a chunk of each rank's at a time.

    Args:
        deal: the heads of each rank.
        lengths: tokens of each rank.
        ranks: those that exchange.
        most: chunks; there are fewer where a rank has fewer key heads. Query heads of one key head stay together.

    Attributes:
        own: the query heads of this rank, by chunk.
        there, back: the exchanges of query, key and value, and of the output, by chunk.
        heads: of query, key and value.
        shares_keys: whether several ranks have a key head.
        tokens: of this rank.
    """

    def __init__(self, deal: HeadDeal, lengths: tuple[int, ...], ranks: RanksOfSequence, most: int):
        count = min(most, *map(len, deal.keys))
        parts = [_part(deal, chunk, count) for chunk in range(count)]
        self.own = [part.queries[ranks.rank] for part in parts]
        self.there = [Exchange((x.queries, x.keys, x.keys), lengths, ranks, overlaps=count > 1) for x in parts]
        self.back = [Exchange((x.queries,), lengths, ranks, overlaps=count > 1) for x in parts]
        key_heads = 1 + max(chain(*deal.keys))
        self.heads = (sum(map(len, deal.queries)), key_heads, key_heads)
        self.shares_keys = sum(map(len, deal.keys)) > key_heads
        self.tokens = lengths[ranks.rank]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Attention of the rank's own tokens of all heads, (B, heads, lengths[rank], D), tokens before heads in memory.

        All chunks leave before the first is computed. Backward goes the same way from its end, as autograd takes what
        was made last first.

        Args:
            query, key, value: (B, heads, lengths[rank], D).
            attention: `attention(chunk, query, key, value)`, of all tokens of the rank's own heads of a chunk, (B, own
                heads, T, D) each.
        """
        call, last = _Call(self, len(query), query.shape[-1]), len(self.own) - 1
        try:
            first = _TokensToHeads.apply(call, query, key, value)
            heads, tickets, sent = first[:3], first[3:], []
            for chunk, ticket in enumerate(tickets):
                sent.append(_SendOutput.apply(call, chunk, attention(chunk, *heads)))
                heads = _AwaitHeads.apply(call, chunk + 1, ticket)
            result: torch.Tensor = _HeadsToTokens.apply(call, attention(last, *heads), *sent)
        except BaseException:
            call.land()
            raise
        # Transposed here, not in the function, whose results may then be written over.
        return result.transpose(1, 2)


def _part(deal: HeadDeal, chunk: int, chunks: int) -> HeadDeal:
    """A chunk of the heads of each rank: key heads with the query heads that read them. The first is no larger than
    others, as nothing hides its way."""
    queries, keys = [], []
    for of_rank, read in zip(deal.queries, deal.keys, strict=True):
        start, end = (len(read) * edge // chunks for edge in (chunk, chunk + 1))
        together = len(of_rank) // len(read)
        queries.append(of_rank[start * together : end * together])
        keys.append(read[start:end])
    return deal._replace(queries=tuple(queries), keys=tuple(keys))


class _Call:
    """What of a call is on the way between ranks, by chunk, in the order in which it left.

    The functions below hand it on to each other, and autograd has tickets for their order, empty tensors: what a rank
    sends has another shape than what it receives.
    """

    def __init__(self, chunks: HeadChunks, batch: int, width: int):
        self.chunks, self._batch, self._width = chunks, batch, width
        self._flights: dict[int, Flight] = {}

    def send_tokens(self, way: list[Exchange], chunks: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
        """(B, heads, lengths[rank], D) each, these chunks of their heads."""
        for chunk in chunks:
            self._flights[chunk] = way[chunk].send_tokens(tensors)

    def heads(self, way: list[Exchange], chunk: int) -> tuple[torch.Tensor, ...]:
        """What has become of a chunk, (B, own heads, T, D) each."""
        return way[chunk].heads_of(self._flights.pop(chunk), self._batch, self._width)

    def send_heads(self, way: list[Exchange], chunk: int, tensors: Sequence[torch.Tensor]) -> None:
        """(B, own heads, T, D) each, those of a chunk."""
        self._flights[chunk] = way[chunk].send_heads(tensors)

    def tokens(self, way: list[Exchange], heads: Sequence[int], adds: bool) -> list[torch.Tensor]:
        """What has become of all chunks, (B, lengths[rank], heads, D) each: sums where several ranks have a head."""
        received = next(iter(self._flights.values())).received
        make = received.new_zeros if adds else received.new_empty
        results = [make(self._batch, self.chunks.tokens, n, self._width) for n in heads]
        by_heads = [x.transpose(1, 2) for x in results]
        for chunk in tuple(self._flights):
            way[chunk].write_tokens_of(self._flights.pop(chunk), by_heads, adds)
        return results

    def land(self) -> None:
        """Waits for all that is still on the way, as where a checkpoint ends what it computes again before its end."""
        while self._flights:
            self._flights.popitem()[1].land()


class _TokensToHeads(torch.autograd.Function):
    """Sends all chunks; the heads of the first, and a ticket for each of the others."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call, there = call, call.chunks.there
        call.send_tokens(there, range(len(there)), tensors)
        return *call.heads(there, 0), *(tensors[0].new_empty(0) for _ in there[1:])

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        call, chunks = ctx.call, ctx.call.chunks
        call.send_heads(chunks.there, 0, grads[:3])
        return None, *(x.transpose(1, 2) for x in call.tokens(chunks.there, chunks.heads, chunks.shares_keys))


class _AwaitHeads(torch.autograd.Function):
    """The heads of a later chunk."""

    @staticmethod
    def forward(ctx, call, chunk, ticket):
        ctx.call, ctx.chunk = call, chunk
        return call.heads(call.chunks.there, chunk)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        ctx.call.send_heads(ctx.call.chunks.there, ctx.chunk, grads)
        return None, None, grads[0].new_empty(0)


class _SendOutput(torch.autograd.Function):
    """Sends the output of a chunk that is not the last; a ticket."""

    @staticmethod
    def forward(ctx, call, chunk, output):
        ctx.call, ctx.chunk = call, chunk
        call.send_heads(call.chunks.back, chunk, (output,))
        return output.new_empty(0)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, ticket):
        return None, None, *ctx.call.heads(ctx.call.chunks.back, ctx.chunk)


class _HeadsToTokens(torch.autograd.Function):
    """Sends the output of the last chunk; the rank's own tokens of all."""

    @staticmethod
    def forward(ctx, call, output, *tickets):
        ctx.call, chunks = call, call.chunks
        call.send_heads(chunks.back, len(tickets), (output,))
        return call.tokens(chunks.back, chunks.heads[:1], adds=False)[0]

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, grad):
        call, back = ctx.call, ctx.call.chunks.back
        call.send_tokens(back, reversed(range(len(back))), (grad.transpose(1, 2),))
        return None, *call.heads(back, len(back) - 1), *(grad.new_empty(0) for _ in back[1:])
