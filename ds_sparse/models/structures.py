"""The structures that were asked for, for the number of heads that layers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..common_seed import set_common_seed
from ..config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError, beyond, seed_of
from ..modules.multihead_attention import check_repeatable
from ..modules.structure_argument import for_all_layers, read_structures
from ..sparsity import SparsityConfig
from ..sparsity.declarations import declared_value


class Structures:
    """The structures that were asked for, by number of heads, so that all layers of a kind have the same.

    Args:
        wanted: the structure, or a dict with the keys of the JSON block.
        numbers: those of layers, by name, by which `layers` of the block counts them (`models/layers.py`); not those
            of families that count them themselves.
        model: the name of the model, for errors.
    """

    def __init__(
        self,
        wanted: SparsityConfig | Mapping[str, Any] | None,
        numbers: Mapping[str, int] | None = None,
        model: str = "the model",
    ):
        self.wanted, self._numbers, self._model = wanted, numbers or {}, model
        self._made: dict[tuple[int, int, int | None], LayerStructures] = {}

    def make(self, num_heads: int, saved: Mapping[str, Any] | None = None) -> SparsityConfig:
        """The one structure of all layers, as `by_layer`.

        Raises:
            ValueError: as `by_layer`; layers have structures of their own.
        """
        return for_all_layers(self.by_layer(num_heads, saved=saved))

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
        wanted = saved if self.wanted is None else self.wanted
        seed = None if saved is None else seed_of(saved)
        key = (id(wanted), num_heads, seed)
        if key not in self._made:
            self._made[key] = make_structures(wanted, num_heads, seed)
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

    def check_repeatable(self, kinds: Iterable[tuple[int, ...]]) -> None:
        """Raises ValueError where random blocks have no seed from who asked, for layers that save neither structure nor
        layout. A kind of layers begins with their number of heads."""
        heads = {kind[0] for kind in kinds} if self.wanted is not None else ()
        given = [read_structures(self.wanted, number) for number in sorted(heads)]
        for structure in (structure for those in given for structure in (those.others, *those.entries.values())):
            if structure is not None:
                check_repeatable(structure)


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
            had_none = declared_value(structure, "seed") is None
            set_common_seed(structure, seed)
            seed = declared_value(structure, "seed") if had_none and seed is None else seed
