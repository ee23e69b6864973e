"""Which rank this process is, before and after torch.distributed runs, and what the ranks have to agree on."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

from .sparsity.draws import Draws, draws, why_unrepeatable

if TYPE_CHECKING:
    from .sparsity import SparsityConfig

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
    """Whether a launcher, mpirun or a training service started this process."""
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


def set_common_seed(structure: SparsityConfig, seed: int | None = None) -> None:
    """Gives a structure that draws blocks by its `seed`, and has none, the same one on all ranks: `seed`, else one that
    rank 0 draws and prints. One line says what to do where no seed would repeat the blocks.

    Raises:
        RuntimeError: several ranks, and torch.distributed does not run yet.
    """
    how = draws(structure)
    if how is Draws.UNREPEATABLY:
        say(why_unrepeatable(structure))
    if how is not Draws.BY_SEED or getattr(structure, "seed", None) is not None:
        return
    if seed is not None:
        structure.seed = seed
        return
    if world_size() > 1 and not _distributed():
        raise RuntimeError(
            "The structure has random blocks and no seed, and torch.distributed is not running yet, so the ranks "
            'cannot agree on one; call ds_sparse.init_distributed() first, or set "seed" in the sparse_attention block.'
        )
    structure.seed = seed = from_rank_0(random.SystemRandom().randrange(2**31))
    say(f'random blocks are drawn with seed {seed}; set "seed" in the sparse_attention block to repeat this layout.')


def _distributed():
    import torch.distributed as distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


def _first(names: tuple[str, ...], otherwise: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), otherwise)
