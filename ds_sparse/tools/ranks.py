"""The rank of this process, before and after torch.distributed runs, and values of rank 0 for all."""

from __future__ import annotations

import os
from typing import Any

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MANAGED = ("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")  # services that DeepSpeed knows how to ask
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def rank() -> int:
    """This process's rank, from torch.distributed where it runs, else from what a launcher or mpirun says; 0 without
    either."""
    distributed = _distributed()
    return distributed.get_rank() if distributed else _first(_RANKS, 0)


def world_size() -> int:
    """The number of ranks, from the same sources; 1 without either."""
    distributed = _distributed()
    return distributed.get_world_size() if distributed else _first(_WORLD_SIZES, 1)


def is_launched() -> bool:
    """Tells if a launcher, mpirun or a training service started this process."""
    return any(name in os.environ for name in (*_LAUNCHERS, *_WORLD_SIZES, *_MANAGED))


def say(sentence: str) -> None:
    """Prints one line, on rank 0 only."""
    if rank() == 0:
        print(f"ds_sparse: {sentence}", flush=True)


def from_rank_0(value: Any) -> Any:
    """Rank 0's value on all ranks, which all have to ask for it; the value itself where torch.distributed does not
    run."""
    values, distributed = [value], _distributed()
    if distributed:
        # DeepSpeed binds the group to the rank's GPU, and makes that the current one only when it makes its engine.
        distributed.broadcast_object_list(values, src=0, device=distributed.group.WORLD.bound_device_id)
    return values[0]


def can_talk() -> bool:
    """Tells if torch.distributed runs, so that ranks can agree on something."""
    return _distributed() is not None


def _distributed():
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _first(names: tuple[str, ...], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), otherwise)
