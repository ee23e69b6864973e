"""Transformers' Trainer under `ds_sparse run`: ranks that share sequences are given the same batches to train on, from
where a checkpoint was made if it resumes, and evaluate their own."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..sequence.batches import SequenceBatches, sequence_batches
from .deepspeed_sequence import sequence_parallel_size


def share_batches() -> None:
    """Has `Trainer.get_train_dataloader`, a method that programs may override too, hand the batch of each rank to all
    that hold a sequence with it, where the DeepSpeed JSON says so. A program whose own method does not is refused in
    its first forward. What leaves out the batches of a resumed epoch takes accelerate's loaders alone, and is replaced.
    """
    # Not before Transformers has been imported.
    import transformers

    from .transformers.sequence import EVALUATES_ALONE

    trainer: Any = sys.modules["transformers.trainer"]
    if not hasattr(trainer, "skip_first_batches"):
        return  # there is no accelerate, and no Trainer can be made
    below = trainer.Trainer.get_train_dataloader

    @functools.wraps(below)
    def get_train_dataloader(self: Any) -> Any:
        loader, plugin = below(self), getattr(self.accelerator.state, "deepspeed_plugin", None)
        size = 1 if plugin is None else sequence_parallel_size(plugin.deepspeed_config, "the DeepSpeed JSON")
        if size == 1:
            return loader
        for module in self.model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                vars(module)[EVALUATES_ALONE] = True
        return sequence_batches(loader, size=size)

    skip = trainer.skip_first_batches

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, SequenceBatches):
            return dataloader.after(num_batches, skip)
        return skip(dataloader, num_batches)

    trainer.Trainer.get_train_dataloader = get_train_dataloader
    trainer.skip_first_batches = skip_first_batches
