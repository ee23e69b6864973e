"""One seed on all ranks for a structure that draws its blocks by a seed and was given none."""

from __future__ import annotations

import random

from ..sparsity import SparsityConfig
from ..sparsity.declarations import declare, declared_value
from ..sparsity.draws import Draws, draws, why_unrepeatable
from ..tools.ranks import can_talk, from_rank_0, say, world_size


def set_common_seed(structure: SparsityConfig, seed: int | None = None) -> None:
    """Gives a structure that draws blocks by its `seed`, and has none, the same one on all ranks: `seed`, else one that
    rank 0 draws and prints. One line says what to do where no seed would repeat the blocks.

    Raises:
        RuntimeError: several ranks, and torch.distributed does not run yet.
    """
    how = draws(structure)
    if how is Draws.UNREPEATABLY:
        say(why_unrepeatable(structure))
    if how is not Draws.BY_SEED or declared_value(structure, "seed") is not None:
        return
    if seed is not None:
        declare(structure, "seed", seed)
        return
    if world_size() > 1 and not can_talk():
        raise RuntimeError(
            "The structure has random blocks and no seed, and torch.distributed is not running yet, so the ranks "
            'cannot agree on one; call ds_sparse.init_distributed() first, or set "seed" in the sparse_attention block.'
        )
    seed = from_rank_0(random.SystemRandom().randrange(2**31))
    declare(structure, "seed", seed)
    say(f'random blocks are drawn with seed {seed}; set "seed" in the sparse_attention block to repeat this layout.')
