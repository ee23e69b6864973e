"""Loaders that deal each rank a batch of its own, for ranks that hold parts of a sequence and want the same ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_map

from .exchange import RanksOfSequence


class SequenceBatches:
    """`sequence_batches`, which can be iterated over as often as the loader.

    Attributes:
        left_out: batches at the start of an iteration that are not handed on.
    """

    def __init__(self, loader: Collection[Any], ranks: RanksOfSequence, left_out: int = 0):
        self.loader, self.ranks, self.left_out = loader, ranks, left_out

    def __len__(self) -> int:
        return len(self.loader) * self.ranks.size - self.left_out

    def after(self, batches: int, skip: Callable[[Any, int], Any]) -> SequenceBatches:
        """Skips so many batches; `skip(loader, n)` is the loader without its first n."""
        of_loader, left_out = divmod(self.left_out + batches, self.ranks.size)
        return SequenceBatches(skip(self.loader, of_loader), self.ranks, left_out)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the loader, or of its sampler, where they have one: each epoch shuffles rows anew."""
        set_epoch: Any = getattr(self.loader, "set_epoch", None)
        set_epoch = set_epoch or getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches(), self.left_out, None)

    def _batches(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            own = tree_map(_on_cpu, next(batches, None))
            of_all: list[Any] = [None] * self.ranks.size
            distributed.all_gather_object(of_all, own, group=self.ranks.group)
            missing = [rank for rank, batch in enumerate(of_all) if batch is None]
            if 0 < len(missing) < self.ranks.size:
                raise ValueError(
                    f"The loaders of {self.ranks.size} ranks that hold parts of a sequence have different numbers of "
                    f"batches (rank {missing[0]} of them has none left); give all the same number, as a "
                    "DistributedSampler does."
                )
            if missing:
                return
            yield from of_all


def sequence_batches(
    loader: Collection[Any], group: distributed.ProcessGroup | None = None, *, size: int | None = None
) -> SequenceBatches:
    """The batches of a loader that deals each rank one of its own, for ranks that share sequences and want the same.

    The first rank's goes to all, then the second's, and so on. What this function has returned is returned again.

    Source: DeepSpeed's `UlyssesSPDataLoaderAdapter`, which hands out parts; here `forward` cuts them.

    Args:
        loader: of the rank, such as a DataLoader with a DistributedSampler over all ranks.
        group: the ranks that hold parts of a sequence, such as `engine.get_sequence_parallel_group()`; all if it is not
            given.
        size: in the place of a group, before there is an engine: how many neighbouring ranks hold a sequence. All ranks
            make the groups then.

    Returns:
        An iterable of as many batches as the loaders of the group have together; tensors are on the CPU.

    Raises:
        RuntimeError: torch.distributed does not run.
        ValueError: a group and a size; a size that does not divide the number of ranks; in the iteration, ranks have
            different numbers of batches.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> ds_sparse.init_distributed()  # here of one rank
        >>> loader = torch.utils.data.DataLoader(torch.arange(4), batch_size=2)
        >>> list(ds_sparse.sequence_batches(loader))
        [tensor([0, 1]), tensor([2, 3])]
    """
    if isinstance(loader, SequenceBatches):
        return loader
    if size is None:
        return SequenceBatches(loader, RanksOfSequence(group))
    if group is not None:
        raise ValueError("sequence_batches is given a group and a size; give one of them.")
    return SequenceBatches(loader, RanksOfSequence.neighbours(size))


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
