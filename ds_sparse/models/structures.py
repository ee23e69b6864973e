"""The structures that were asked for, for the number of heads that layers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..common_seed import set_common_seed
from ..config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError, beyond, seed_of
from ..modules.multihead_attention import check_repeatable
from ..modules.structure_argument import for_all_layers, read_structures
from ..sparsity import SparsityConfig


class Structures:
    """The structures that were asked for, by number of heads, so that all layers of a kind have the same."""

    def __init__(self, wanted: SparsityConfig | Mapping[str, Any] | None):
        self.wanted = wanted
        self._made: dict[tuple[int, int, int | None], LayerStructures] = {}

    def make(self, num_heads: int, saved: Mapping[str, Any] | None = None) -> SparsityConfig:
        """The one structure of all layers, as `by_layer`.

        Raises:
            ValueError: as `by_layer`; layers have structures of their own.
        """
        return for_all_layers(self.by_layer(num_heads, saved=saved))

    def by_layer(
        self, num_heads: int, num_layers: int | None = None, saved: Mapping[str, Any] | None = None, model: str = ""
    ) -> LayerStructures:
        """The structures for so many heads; where none was asked for, those of the block that was saved with the model,
        and where they have no seed, with the seed of that block.

        Raises:
            ValueError: as `make_structures`; an entry names a layer that the model, of this name, does not have.
        """
        wanted = saved if self.wanted is None else self.wanted
        seed = None if saved is None else seed_of(saved)
        key = (id(wanted), num_heads, seed)
        if key not in self._made:
            self._made[key] = make_structures(wanted, num_heads, seed)
        structures = self._made[key]
        wrong = [] if num_layers is None else beyond(structures.entries, num_layers, model or "the model")
        if wrong:
            raise SparseAttentionConfigError([f"{BLOCK_KEY}.{LAYERS_KEY}.{sentence}" for sentence in wrong])
        return structures

    def repeatable_by_layer(self, num_heads: int, num_layers: int, model: str) -> LayerStructures:
        """`by_layer` for a model that saves neither structure nor layout: random blocks need a seed from who asked.

        Raises:
            ValueError: as `by_layer`; they have none.
        """
        if self.wanted is not None:
            given = read_structures(self.wanted, num_heads)
            for structure in (given.others, *given.entries.values()):
                if structure is not None:
                    check_repeatable(structure)
        return self.by_layer(num_heads, num_layers, model=model)


def make_structures(
    wanted: SparsityConfig | Mapping[str, Any] | None, num_heads: int, seed: int | None = None
) -> LayerStructures:
    """The structures that were asked for, copies, with `seed` or one that rank 0 draws where they have none.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        ValueError: they are for another number of heads.
        TypeError: neither a structure nor a dict.
        RuntimeError: several ranks would draw a seed before torch.distributed runs.
    """
    structures = read_structures(wanted, num_heads)
    set_common_seeds(structures, seed)
    return structures


def set_common_seeds(structures: LayerStructures, seed: int | None = None) -> None:
    """`set_common_seed` for all of them; those without a seed get one and the same."""
    for structure in (structures.others, *structures.entries.values()):
        if structure is not None:
            had_none = getattr(structure, "seed", None) is None
            set_common_seed(structure, seed)
            seed = structure.seed if had_none and seed is None and hasattr(structure, "seed") else seed
