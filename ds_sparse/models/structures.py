"""The structures that were asked for, for the number of heads that layers have."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError
from ..config.block import beyond, seed_of
from ..modules.multihead_attention import check_repeatable
from ..modules.structure_argument import for_all_layers, read_structures
from ..sparsity import SparsityConfig
from ..sparsity.declarations import declare, declared_value
from ..sparsity.draws import Draws, draws, why_unrepeatable
from ..tools.ranks import can_talk, from_rank_0, say, world_size

Wanted = SparsityConfig | Mapping[str, Any] | LayerStructures | None
"""A structure, a dict with the keys of the JSON block, or what has been read of one; None where none is asked for."""


class Structures:
    """The structures that were asked for, by number of heads, so that all layers of a kind have the same.

    Args:
        wanted: the structure, or a block.
        numbers: those of layers, by name, by which `layers` of the block counts them (`models/layers.py`); not those
            of families that count them themselves.
        model: the name of the model, for errors.
    """

    def __init__(self, wanted: Wanted, numbers: Mapping[str, int] | None = None, model: str = "the model"):
        self.wanted, self._numbers, self._model = wanted, numbers or {}, model
        self._read: LayerStructures | None = None
        self._made: dict[tuple[int, int, int | None], LayerStructures] = {}

    def make(self, num_heads: int) -> SparsityConfig:
        """The one structure of all layers, as `by_layer`.

        Raises:
            ValueError: as `by_layer`; layers have structures of their own.
        """
        return for_all_layers(self.by_layer(num_heads))

    def by_layer(
        self,
        num_heads: int,
        num_layers: int | None = None,
        saved: Mapping[str, Any] | None = None,
        model: str = "the model",
    ) -> LayerStructures:
        """The structures for so many heads; where none was asked for, those of the block that was saved with the model,
        and where they have no seed, with the seed of that block.

        Raises:
            SparseAttentionConfigError: a dict that is wrong (a ValueError).
            ValueError: they are for another number of heads; an entry names a layer that the model, of this name, does
                not have.
            TypeError: neither a structure nor a dict.
            RuntimeError: several ranks would draw a seed before torch.distributed runs.
        """
        seed = None if saved is None else seed_of(saved)
        key = (id(saved) if self.wanted is None else 0, num_heads, seed)
        if key not in self._made:
            read = read_structures(saved, num_heads) if self.wanted is None else self._unseeded(num_heads)
            set_common_seeds(read, seed)
            self._made[key] = read
        structures = self._made[key]
        wrong = [] if num_layers is None else beyond(structures.entries, num_layers, model)
        if wrong:
            raise SparseAttentionConfigError([f"{BLOCK_KEY}.{LAYERS_KEY}.{sentence}" for sentence in wrong])
        return structures

    def of_layer(self, name: str, num_heads: int) -> SparsityConfig | None:
        """The structure of a layer that `numbers` has, for its number of heads; None where it is to stay dense.

        Raises:
            ValueError: as `by_layer`.
        """
        return self.by_layer(num_heads, len(self._numbers), model=self._model).of(self._numbers[name])

    def check_repeatable(self, kinds: Iterable[tuple[Any, ...]]) -> None:
        """Raises ValueError where random blocks have no seed from who asked, for layers that save neither structure nor
        layout. A kind of layers begins with their number of heads."""
        heads = {kind[0] for kind in kinds} if self.wanted is not None else ()
        for structure in (structure for number in sorted(heads) for structure in self._unseeded(number).all()):
            check_repeatable(structure)

    def _unseeded(self, num_heads: int) -> LayerStructures:
        """The structures as asked for; a block is read once, for whatever heads come first."""
        if self._read is None and isinstance(self.wanted, Mapping):
            self._read = read_structures(self.wanted, num_heads)
        return read_structures(self.wanted if self._read is None else self._read, num_heads)


def set_common_seeds(structures: LayerStructures, seed: int | None = None) -> None:
    """`set_common_seed` for all of them; those without a seed get one and the same."""
    for structure in structures.all():
        had_none = declared_value(structure, "seed") is None
        set_common_seed(structure, seed)
        seed = declared_value(structure, "seed") if had_none and seed is None else seed


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
