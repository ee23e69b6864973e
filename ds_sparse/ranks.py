"""Which rank this process is, before and after torch.distributed runs."""

from __future__ import annotations

import os

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MANAGED = ("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")  # services that DeepSpeed knows how to ask
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def rank() -> int:
    """This process's rank, from torch.distributed where it runs, else from what a launcher or mpirun says; 0 without either."""
    distributed = _distributed()
    return distributed.get_rank() if distributed else _first(_RANKS, 0)


def world_size() -> int:
    """The number of ranks, from the same sources; 1 without either."""
    distributed = _distributed()
    return distributed.get_world_size() if distributed else _first(_WORLD_SIZES, 1)


def is_launched() -> bool:
    """Whether a launcher, mpirun or a training service started this process."""
    return any(name in os.environ for name in (*_LAUNCHERS, *_WORLD_SIZES, *_MANAGED))


def _distributed():
    import torch.distributed as distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _first(names: tuple[str, ...], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), otherwise)
