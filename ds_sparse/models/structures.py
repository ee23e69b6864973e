"""The structures that were asked for, for the number of heads that layers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError
from ..config.block import beyond, seed_of
from ..modules.multihead_attention import check_repeatable
from ..modules.structure_argument import for_all_layers, read_structures
from ..sparsity import SparsityConfig
from ..sparsity.declarations import declared_value
from .common_seed import set_common_seed

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
            ValueError: as `make_structures`; an entry names a layer that the model, of this name, does not have.
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


def make_structures(wanted: Wanted, num_heads: int, seed: int | None = None) -> LayerStructures:
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
    for structure in structures.all():
        had_none = declared_value(structure, "seed") is None
        set_common_seed(structure, seed)
        seed = declared_value(structure, "seed") if had_none and seed is None else seed
