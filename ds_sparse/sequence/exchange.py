"""The exchanges between ranks: a part of the tokens of all heads against all tokens of a part of the heads."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import distributed
from torch.nn.functional import pad

from ..index.cache import KEPT
from ..ops._autograd import differentiable_once

HeadsByRank = tuple[tuple[int, ...], ...]
"""The heads of a tensor that each rank has."""

LINES_FROM = {"cuda": 1 << 24}
"""By device, from how many elements of a tensor on copies are made 16 bytes at a time. A GPU copies as many elements a
second whether they are small or large. Where they are fewer a step waits for Python, and it takes time to look how they
lie."""

# DeepSpeed's DistributedAttention takes parts of equal length alone, deals heads in their order, and asks groups of the
# process for the rank where heads are uneven. Layouts per head want heads in another order, and any length wants uneven
# parts; torch's exchange takes both, on gloo and on NCCL.


class RanksOfSequence:
    """The ranks that hold the parts of one sequence, in its order.

    Args:
        group: of torch.distributed; all ranks if it is None.

    Raises:
        RuntimeError: torch.distributed does not run.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None):
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "torch.distributed does not run, and ranks cannot share a sequence; call "
                "torch.distributed.init_process_group() or ds_sparse.init_distributed() first, or start the program "
                "with torchrun."
            )
        self.group = distributed.group.WORLD if group is None else group
        self.size = distributed.get_world_size(self.group)
        self.rank = distributed.get_rank(self.group)

    @classmethod
    def neighbours(cls, size: int) -> RanksOfSequence:
        """This rank's among new groups of `size` neighbouring ranks, which all ranks make.

        Raises:
            RuntimeError: torch.distributed does not run.
            ValueError: the number of ranks is no multiple of it.
        """
        ranks = cls().size
        if size < 1 or ranks % size:
            raise ValueError(f"size is {size} and there are {ranks} ranks; their number has to be a multiple of it.")
        return cls(distributed.new_subgroups(size)[0])

    def __deepcopy__(self, memo: object) -> RanksOfSequence:
        return self  # a group of processes has no copy

    def rows_of_all(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gathers each rank's `numbers`, (size, *its shape), which is the same everywhere."""
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        distributed.all_gather(rows, numbers.contiguous(), group=self.group)
        return torch.stack(rows)

    def all_tokens(self, part: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """(B, T) out of the (B, lengths[rank]) of each rank; without a gradient."""
        rows = self.rows_of_all(pad(part.detach(), (0, max(lengths) - part.shape[1])))
        return torch.cat([row[:, :length] for row, length in zip(rows, lengths, strict=True)], 1)

    def from_first(self, value: torch.Tensor) -> torch.Tensor:
        """The first rank's value on all of them."""
        distributed.broadcast(value, group=self.group, group_src=0)
        return value

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; without a gradient."""
        total = value.detach().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def exchange(self, sent: torch.Tensor, to: list[int], of: list[int]) -> torch.Tensor:
        """Sends `to[r]` elements of a flat tensor to rank r, and returns `of[r]` of each rank, in order; without a
        gradient."""
        received = sent.new_empty(sum(of))
        distributed.all_to_all_single(received, sent, of, to, group=self.group)
        return received


def tokens_to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exchange: Exchange
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of the rank's own heads, (B, own heads, T, D), out of its own tokens of all heads, (B, heads,
    lengths[rank], D). One exchange carries all three."""
    return _TokensToHeads.apply(exchange, query, key, value)


def heads_to_tokens(output: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The rank's own tokens of all heads, (B, heads, lengths[rank], D), tokens before heads in memory, out of all
    tokens of its own heads, (B, own heads, T, D)."""
    # Transposed here, not in the function, whose results may then be written over.
    return _HeadsToTokens.apply(exchange, output).transpose(1, 2)


class Exchange:
    """An exchange between ranks, both ways at once, without a gradient: parts of the tokens of all heads, (B, heads,
    lengths[rank], D), against all tokens of a part of the heads, (B, own heads, T, D).

    Tokens stand before heads on the way: what a rank gets of all others, one after the other, is then the whole
    sequence of its heads, and is not copied again.

    Args:
        heads: of each tensor, by rank.
    """

    def __init__(self, heads: Sequence[HeadsByRank], lengths: tuple[int, ...], ranks: RanksOfSequence):
        self._ranks, self._lengths, self._own_tokens = ranks, lengths, lengths[ranks.rank]
        self._counts = [sum(map(len, of_rank)) for of_rank in zip(*heads, strict=True)]
        self._own = [len(of_tensor[ranks.rank]) for of_tensor in heads]
        self._numbers = [1 + max(chain(*of_tensor)) for of_tensor in heads]
        self._is_shared = sum(self._counts) > sum(self._numbers)
        self._strips = _strips(heads, self._counts)
        self._views = functools.lru_cache(KEPT)(self._views_of)

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """(B, own heads, T, D) of each (B, heads, lengths[rank], D)."""
        batch, _, _, width = tensors[0].shape
        by_tokens, by_heads = self._sizes(batch * width)
        sent = tensors[0].new_empty(sum(by_heads))
        for on_the_way, in_place in self._pairs(sent, tensors, by_the_line=True):
            on_the_way.copy_(in_place)
        received = self._ranks.exchange(sent, by_heads, by_tokens)
        whole = received.view(sum(self._lengths), batch, sum(self._own), width)
        return whole.permute(1, 2, 0, 3).split(self._own, 1)

    def to_tokens(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """(B, lengths[rank], heads, D) of each (B, own heads, T, D): sums where several ranks have a head. Of a single
        row whose heads stand inside tokens nothing is copied before it is sent."""
        batch, _, _, width = tensors[0].shape
        by_tokens, by_heads = self._sizes(batch * width)
        moved = _as_lines(*(x.permute(2, 0, 1, 3) for x in tensors))
        sent = moved[0].contiguous() if len(moved) == 1 else torch.cat(moved, 2)
        received = self._ranks.exchange(sent.flatten().view(tensors[0].dtype), by_tokens, by_heads)
        make = received.new_zeros if self._is_shared else received.new_empty
        results = tuple(make(batch, self._own_tokens, n, width) for n in self._numbers)
        by_heads_first = [x.transpose(1, 2) for x in results]
        for on_the_way, in_place in self._pairs(received, by_heads_first, by_the_line=not self._is_shared):
            if self._is_shared:
                in_place += on_the_way
            else:
                in_place.copy_(on_the_way)
        return results

    def _sizes(self, each: int) -> tuple[list[int], list[int]]:
        """Elements of the rank's own heads in the tokens of each rank, and of its own tokens in the heads of each, with
        `each` for a token of a head."""
        own = sum(self._own) * each
        return [own * n for n in self._lengths], [self._own_tokens * each * n for n in self._counts]

    def _pairs(
        self, flat: torch.Tensor, tensors: Sequence[torch.Tensor], by_the_line: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views, (ranks, lengths[rank], B, n, D): heads in what goes to or comes from ranks, and these in
        their tensor; with `by_the_line` as `_as_lines` gives them."""
        if by_the_line:
            *tensors, flat = _as_lines(*tensors, flat)
        batch, _, _, width = tensors[0].shape
        views = self._views(batch, width, tuple(x.stride() for x in tensors))
        for tensor, shape, on_the_way, start, in_place, first in views:
            x = tensors[tensor]
            yield flat.as_strided(shape, on_the_way, start), x.as_strided(shape, in_place, x.storage_offset() + first)

    def _views_of(self, batch: int, width: int, strides: tuple[tuple[int, ...], ...]) -> list[_View]:
        """Views of each strip, for tensors of these strides."""
        views = []
        for strip in self._strips:
            of_batch, of_head, of_token, of_number = strides[strip.tensor]
            row, tokens = strip.of_rank * width, self._own_tokens
            views.append(
                _View(
                    strip.tensor,
                    (strip.ranks, tokens, batch, strip.heads, width),
                    (tokens * batch * row, batch * row, row, width, 1),
                    (tokens * batch * strip.before + strip.first) * width,
                    (strip.heads * of_head, of_token, of_batch, of_head, of_number),
                    strip.start * of_head,
                )
            )
        return views


def _as_lines(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same as elements of 16 bytes, where that pays and all lie so."""
    fewest = LINES_FROM.get(tensors[0].device.type)
    if fewest is None or tensors[0].numel() < fewest or not all(map(_lies_in_lines, tensors)):
        return tensors
    return tuple(x.view(torch.complex128) for x in tensors)


def _lies_in_lines(x: torch.Tensor) -> bool:
    line = 16 // x.element_size()
    *outer, last = x.stride()
    return last == 1 and x.data_ptr() % 16 == 0 and not any(n % line for n in (*outer, x.shape[-1], x.storage_offset()))


class _View(NamedTuple):
    """A strip in what goes between ranks, and in its tensor.

    Attributes:
        on_the_way, start: strides and offset in what goes between ranks.
        in_place, first: strides in the tensor, and the offset from its first number.
    """

    tensor: int
    shape: tuple[int, ...]
    on_the_way: tuple[int, ...]
    start: int
    in_place: tuple[int, ...]
    first: int


class _Strip(NamedTuple):
    """Heads that one copy moves: as many of each of some neighbouring ranks, all side by side in their tensor.

    Attributes:
        start: the first head there.
        ranks, heads: how many.
        before: heads of all tensors that ranks before have.
        of_rank: heads of all tensors that each of these ranks has.
        first: the first head among those of a rank.
    """

    tensor: int
    start: int
    ranks: int
    heads: int
    before: int
    of_rank: int
    first: int


def _strips(heads: Sequence[HeadsByRank], counts: list[int]) -> list[_Strip]:
    strips = []
    before = [0, *accumulate(counts)]
    for rank, count in enumerate(counts):
        first = 0
        for tensor, by_rank in enumerate(heads):
            for start, end in _runs(by_rank[rank]):
                strips.append(_Strip(tensor, start, 1, end - start, before[rank], count, first))
                first += end - start
    return list(_merged(strips))


def _merged(strips: Iterable[_Strip]) -> Iterator[_Strip]:
    """With those of neighbouring ranks as one where they follow each other in their tensor: heads that are dealt in
    order take a copy a tensor, however many ranks there are."""
    longest: dict[tuple[int, int, int, int], _Strip] = {}  # by what all of its ranks have alike
    for strip in strips:
        alike = strip.tensor, strip.heads, strip.of_rank, strip.first
        last = longest.get(alike)
        if last is not None:
            goes_on = last.start + last.ranks * last.heads, last.before + last.ranks * last.of_rank
            if goes_on == (strip.start, strip.before):
                longest[alike] = last._replace(ranks=last.ranks + 1)
                continue
            yield last
        longest[alike] = strip
    yield from longest.values()


def _runs(heads: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of heads that follow each other.

    >>> list(_runs((3, 4, 5, 0, 7)))
    [(3, 6), (0, 1), (7, 8)]
    """
    start = 0
    for place in range(1, len(heads) + 1):
        if place == len(heads) or heads[place] != heads[place - 1] + 1:
            yield heads[start], heads[place - 1] + 1
            start = place


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange = exchange
        return exchange.to_heads(tensors)

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        return None, *(x.transpose(1, 2) for x in ctx.exchange.to_tokens(grads))


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, output):
        ctx.exchange = exchange
        return exchange.to_tokens((output,))[0]

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, grad):
        return None, *ctx.exchange.to_heads((grad.transpose(1, 2),))
