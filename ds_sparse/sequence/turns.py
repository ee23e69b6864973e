"""Attention between its exchanges: the heads of a rank in turns, of which one is computed while the next is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch

from ..ops._autograd import differentiable_once
from .deal import HeadDeal
from .exchange import Exchange, Flight, RanksOfSequence

MOST_TURNS = 2
"""The first exchange and the last are waited for: with two turns half of what is sent. More would shorten that, and
make kernels small."""

LEAST_ELEMENTS = 1 << 27
"""Of query, key and value on a rank, from which on heads take turns: 58,000 tokens of BERT-base. A GPU computes these
for longer than Python takes for a pass; with fewer it would wait for the launches of a second turn."""


def most_turns(elements: int) -> int:
    """How many turns pay, for so many elements of query, key and value on the rank that has most."""
    return MOST_TURNS if elements >= LEAST_ELEMENTS else 1


class Turn(NamedTuple):
    """Heads that are exchanged and computed together.

    Attributes:
        own: the query heads of this rank.
        there: exchanges of query, key and value: one of all, or one of each.
        back: that of the output.
    """

    own: tuple[int, ...]
    there: tuple[Exchange, ...]
    back: tuple[Exchange, ...]


@dataclass(frozen=True)
class Turns:
    """How the heads of a deal are exchanged.

    Attributes:
        turns: one after the other.
        heads, key_heads: of all ranks.
        shares_keys: whether several ranks have a key head.
        tokens: of this rank.
    """

    turns: tuple[Turn, ...]
    heads: int
    key_heads: int
    shares_keys: bool
    tokens: int

    @classmethod
    def of(cls, deal: HeadDeal, lengths: tuple[int, ...], ranks: RanksOfSequence, most: int) -> Turns:
        """Those of a deal: `most`, or as many as the rank with the fewest key heads has."""
        count = min(most, *map(len, deal.keys))
        key_heads = 1 + max(chain(*deal.keys))
        return cls(
            tuple(_turn(_part(deal, turn, count), lengths, ranks, apart=count > 1) for turn in range(count)),
            sum(map(len, deal.queries)),
            key_heads,
            sum(map(len, deal.keys)) > key_heads,
            lengths[ranks.rank],
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Attention of the rank's own tokens of all heads, (B, heads, lengths[rank], D), tokens before heads in memory.

        All turns depart before the first is computed: attention's kernels keep all multiprocessors of a Hopper GPU, so
        that what is sent beside them has to begin before they do. Backward goes the same way from the end to the start,
        as autograd takes what was computed last first.

        Args:
            attention: `attention(own, query, key, value)`, that of some query heads of this rank, (B, own heads, T, D),
                over the whole sequence.
        """
        batch, _, _, width = query.shape
        trips = [_Trip(self, turn, batch, width) for turn in self.turns]
        sent = []
        for trip, ticket in zip(trips, _Depart.apply(trips, query, key, value), strict=True):
            output = attention(trip.turn.own, *_Arrive.apply(trip, ticket))
            sent.append(_DepartBack.apply(trip, output))
        # Transposed here, not in the function, whose results may then be written over.
        return _ArriveBack.apply(trips, *sent).transpose(1, 2)


def _part(deal: HeadDeal, turn: int, turns: int) -> HeadDeal:
    """The heads of one of some turns: key heads with all query heads that read them."""
    queries, keys = [], []
    for of_rank, read in zip(deal.queries, deal.keys, strict=True):
        start, end = (len(read) * i // turns for i in (turn, turn + 1))
        shared = len(of_rank) // len(read)
        queries.append(of_rank[start * shared : end * shared])
        keys.append(read[start:end])
    return deal._replace(queries=tuple(queries), keys=tuple(keys))


def _turn(deal: HeadDeal, lengths: tuple[int, ...], ranks: RanksOfSequence, apart: bool) -> Turn:
    """A turn of these heads. Query, key and value go `apart` where they are large: one is copied while another is
    sent, and their gradients need not be put together."""
    inwards = (deal.queries, deal.keys, deal.keys)
    bundles = [(heads,) for heads in inwards] if apart else [inwards]
    there = tuple(Exchange(bundle, lengths, ranks) for bundle in bundles)
    return Turn(deal.queries[ranks.rank], there, (Exchange((deal.queries,), lengths, ranks),))


class _Trip:
    """A turn in a call, with what of it is between ranks. The functions below, of which each but the first goes on with
    what another has sent, hand it on; autograd has a ticket in its place, an empty tensor, for their order."""

    def __init__(self, turns: Turns, turn: Turn, batch: int, width: int):
        self.turns, self.turn, self.batch, self.width = turns, turn, batch, width
        self._flights: list[Flight] = []

    def send_tokens(self, way: tuple[Exchange, ...], tensors: Sequence[torch.Tensor]) -> None:
        """Each (B, heads, lengths[rank], D)."""
        self._flights = [exchange.send_tokens(xs) for exchange, xs in _bundles(way, tensors)]

    def heads(self, way: tuple[Exchange, ...]) -> tuple[torch.Tensor, ...]:
        """What has become of them, (B, own heads, T, D) each."""
        landed = zip(way, self._landing(), strict=True)
        return tuple(x for exchange, flight in landed for x in exchange.heads_of(flight, self.batch, self.width))

    def send_heads(self, way: tuple[Exchange, ...], tensors: Sequence[torch.Tensor]) -> None:
        """Each (B, own heads, T, D)."""
        self._flights = [exchange.send_heads(xs) for exchange, xs in _bundles(way, tensors)]

    def write_tokens(self, way: tuple[Exchange, ...], results: Sequence[torch.Tensor], adds: bool) -> None:
        """What has become of them, in their heads of (B, heads, lengths[rank], D) each."""
        for (exchange, those), flight in zip(_bundles(way, results), self._landing(), strict=True):
            exchange.write_tokens_of(flight, those, adds)

    def _landing(self) -> list[Flight]:
        """What is under way, which is not kept here any longer."""
        flights, self._flights = self._flights, []
        return flights


def _bundles(
    way: tuple[Exchange, ...], tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[Exchange, Sequence[torch.Tensor]]]:
    """Each exchange with those of the tensors that it carries."""
    rest = iter(tensors)
    return ((exchange, list(islice(rest, exchange.carries))) for exchange in way)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trips, *tensors):
        ctx.trips = trips
        for trip in trips:
            trip.send_tokens(trip.turn.there, tensors)
        return tuple(tensors[0].new_empty(0) for _ in trips)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *tickets):
        whole = ctx.trips[0].turns
        make = tickets[0].new_zeros if whole.shares_keys else tickets[0].new_empty
        counts = (whole.heads, whole.key_heads, whole.key_heads)
        grads = [make(ctx.trips[0].batch, whole.tokens, n, ctx.trips[0].width).transpose(1, 2) for n in counts]
        for trip in reversed(ctx.trips):
            trip.write_tokens(trip.turn.there, grads, adds=whole.shares_keys)
        return None, *grads


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip, ticket):
        ctx.trip = trip
        return trip.heads(trip.turn.there)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        ctx.trip.send_heads(ctx.trip.turn.there, grads)
        return None, grads[0].new_empty(0)


class _DepartBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trip, output):
        ctx.trip = trip
        trip.send_heads(trip.turn.back, (output,))
        return output.new_empty(0)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, ticket):
        return None, *ctx.trip.heads(ctx.trip.turn.back)


class _ArriveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trips, *tickets):
        ctx.trips, whole = trips, trips[0].turns
        result = tickets[0].new_empty(trips[0].batch, whole.tokens, whole.heads, trips[0].width)
        for trip in trips:
            trip.write_tokens(trip.turn.back, (result.transpose(1, 2),), adds=False)
        return result

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, grad):
        for trip in reversed(ctx.trips):
            trip.send_tokens(trip.turn.back, (grad.transpose(1, 2),))
        return None, *(grad.new_empty(0) for _ in ctx.trips)
