"""The exchanges between ranks: a part of the tokens of all heads against all tokens of a part of the heads."""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn.functional import pad

from .deal import HeadDeal

# DeepSpeed's DistributedAttention takes parts of equal length alone, deals heads in their order, and asks groups of the
# process for the rank where heads are uneven. Layouts per head want heads in another order, and any length wants uneven
# parts; torch's differentiable exchange takes both, on gloo and on NCCL.


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
        """Sends `to[r]` elements of a flat tensor to rank r, and returns `of[r]` of each rank, in order.
        Differentiable."""
        # Not above: a PyTorch that is built without distributed has no such module, and imports this file all the same.
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        return all_to_all_single_autograd(sent, of, to, self.group)


def tokens_to_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    deal: HeadDeal,
    lengths: tuple[int, ...],
    ranks: RanksOfSequence,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All tokens of the rank's own heads, (B, own heads, T, D), out of its own tokens of all heads, (B, heads,
    lengths[rank], D). One exchange carries all three."""
    batch, _, tokens, width = query.shape
    q, k, v = (x.unbind(1) for x in (query, key, value))
    heads = [
        x[head]
        for queries, keys in zip(deal.queries, deal.keys, strict=True)
        for x, of_rank in ((q, queries), (k, keys), (v, keys))
        for head in of_rank
    ]
    counts = [len(queries) + 2 * len(keys) for queries, keys in zip(deal.queries, deal.keys, strict=True)]
    own, each = counts[ranks.rank], batch * width
    of = [own * length * each for length in lengths]
    received = ranks.exchange(torch.stack(heads).flatten(), [count * tokens * each for count in counts], of)
    parts = [part.view(own, batch, length, width) for part, length in zip(received.split(of), lengths, strict=True)]
    queries, keys = len(deal.queries[ranks.rank]), len(deal.keys[ranks.rank])
    query, key, value = torch.cat(parts, 2).transpose(0, 1).split([queries, keys, keys], 1)
    return query, key, value


def heads_to_tokens(
    output: torch.Tensor, deal: HeadDeal, lengths: tuple[int, ...], ranks: RanksOfSequence
) -> torch.Tensor:
    """The rank's own tokens of all heads, (B, heads, lengths[rank], D), tokens before heads in memory, out of all
    tokens of its own heads, (B, own heads, T, D)."""
    batch, own, _, width = output.shape
    tokens, order = lengths[ranks.rank], [head for queries in deal.queries for head in queries]
    sent = torch.cat([part.flatten() for part in output.transpose(0, 1).split(lengths, 2)])
    to = [own * batch * length * width for length in lengths]
    of = [len(queries) * batch * tokens * width for queries in deal.queries]
    heads = ranks.exchange(sent, to, of).view(len(order), batch, tokens, width).unbind(0)
    places = sorted(range(len(order)), key=order.__getitem__)
    return torch.stack([heads[place] for place in places], 2).transpose(1, 2)
