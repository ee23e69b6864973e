"""The exchanges between ranks: a part of the tokens of all heads against all tokens of a part of the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import distributed
from torch.nn.functional import pad

from ..ops._autograd import differentiable_once
from .deal import HeadDeal

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
        """What each rank has for `numbers`, (size, *its shape), which is the same everywhere."""
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deal: HeadDeal,
    lengths: tuple[int, ...],
    ranks: RanksOfSequence,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of the rank's own heads, (B, own heads, T, D), out of its own tokens of all heads, (B, heads,
    lengths[rank], D). One exchange carries all three; what it brings is returned in parts."""
    return _TokensToHeads.apply(query, key, value, _Exchange((deal.queries, deal.keys, deal.keys), lengths, ranks))


def heads_to_tokens(
    output: torch.Tensor, deal: HeadDeal, lengths: tuple[int, ...], ranks: RanksOfSequence
) -> torch.Tensor:
    """The rank's own tokens of all heads, (B, heads, lengths[rank], D), tokens before heads in memory, out of all
    tokens of its own heads, (B, own heads, T, D)."""
    # Here, not in the function, whose results may then be written over.
    return _HeadsToTokens.apply(output, _Exchange((deal.queries,), lengths, ranks)).transpose(1, 2)


class _Exchange(NamedTuple):
    """What goes between ranks at once, both ways, without a gradient. Tokens stand before heads on the way: what a rank
    gets of all others, one after the other, is then the whole sequence of its heads, and is not copied again.

    Attributes:
        heads: of each tensor, by rank.
        lengths: tokens of each rank.
    """

    heads: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...]
    ranks: RanksOfSequence

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """(B, own heads, T, D) of each (B, heads, lengths[rank], D)."""
        batch, _, _, width = tensors[0].shape
        by_tokens, by_heads = self._sizes(batch * width)
        sent = tensors[0].new_empty(sum(by_heads))
        for part, place in self._places(sent, tensors):
            part.copy_(place)
        received = self.ranks.exchange(sent, by_heads, by_tokens)
        own = [len(heads[self.ranks.rank]) for heads in self.heads]
        whole = received.view(sum(self.lengths), batch, sum(own), width)
        return whole.permute(1, 2, 0, 3).split(own, 1)

    def to_tokens(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """(B, lengths[rank], heads, D) of each (B, own heads, T, D): sums where several ranks have a head."""
        batch, _, _, width = tensors[0].shape
        by_tokens, by_heads = self._sizes(batch * width)
        moved = [x.permute(2, 0, 1, 3) for x in tensors]
        sent = moved[0].contiguous() if len(moved) == 1 else torch.cat(moved, 2)
        received = self.ranks.exchange(sent.flatten(), by_tokens, by_heads)
        numbers = [1 + max(head for own in heads for head in own) for heads in self.heads]
        is_shared = sum(numbers) < sum(len(own) for heads in self.heads for own in heads)
        make = received.new_zeros if is_shared else received.new_empty
        results = tuple(make(batch, self.lengths[self.ranks.rank], n, width) for n in numbers)
        for part, place in self._places(received, [x.transpose(1, 2) for x in results]):
            place.copy_(place + part if is_shared else part)
        return results

    def _sizes(self, each: int) -> tuple[list[int], list[int]]:
        """Elements of the rank's own heads in the tokens of each rank, and of its own tokens in the heads of each, with
        `each` for a token of a head."""
        counts = [sum(map(len, of_rank)) for of_rank in zip(*self.heads, strict=True)]
        own = self.ranks.rank
        return [counts[own] * n * each for n in self.lengths], [self.lengths[own] * n * each for n in counts]

    def _places(
        self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views, (lengths[rank], B, n, D): heads in what goes to or comes from each rank, and these in their
        tensor, as many at a time as stand side by side there."""
        batch, _, tokens, width = tensors[0].shape
        _, by_heads = self._sizes(batch * width)
        for rank, chunk in enumerate(flat.split(by_heads)):
            of_rank, first = chunk.view(tokens, batch, sum(len(heads[rank]) for heads in self.heads), width), 0
            for x, heads in zip(tensors, self.heads, strict=True):
                for start, end in _runs(heads[rank]):
                    yield of_rank[:, :, first : first + end - start], x[:, start:end].permute(2, 0, 1, 3)
                    first += end - start


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
    def forward(ctx, query, key, value, exchange):
        ctx.exchange = exchange
        return exchange.to_heads((query, key, value))

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, *grads):
        return *(x.transpose(1, 2) for x in ctx.exchange.to_tokens(grads)), None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, exchange):
        ctx.exchange = exchange
        return exchange.to_tokens((output,))[0]

    @staticmethod
    @differentiable_once("SequenceParallelAttention")
    def backward(ctx, grad):
        return *ctx.exchange.to_heads((grad.transpose(1, 2),)), None
