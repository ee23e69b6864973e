"""The families of models that `sparsify` knows. Families above, which need a library of others, register here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import nn

from ..report import Change
from ..structures import Structures


class Family(ABC):
    """A kind of models, and how their attention layers become sparse. A file of its own has a subclass, and registers
    an object of it."""

    counts_by_model = False
    """Set where each model of this family counts its attention layers itself for `layers` of the block; layers of
    all other families are counted together, and `Structures.of_layer` has the structure of each."""

    @abstractmethod
    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Picks the dense attention layers of a model, by name, that belong to models of this family."""

    @abstractmethod
    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        """Makes the changes by which these layers become sparse. It is called without layers too: the model may hold
        attention that is known by no projection.

        Args:
            layers: what `of_this_family` has returned.

        Raises:
            ValueError: a layer that would stay dense, or would not be computed as before; nothing has been changed.
        """

    def switched(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Picks the layers without a `SparseSelfAttention` that are sparse all the same."""
        return {}

    def left_dense(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
        """The names of those dense layers that are to be dense beside sparse ones of the same model."""
        return set()

    def adapt_replaced(self, model: nn.Module, base: nn.Module) -> None:
        """Is called when BertSparseSelfAttention has taken the place of all layers of `base`, the encoder in it."""


_families: list[Family] = []


def register_family(family: Family) -> None:
    """Adds a family, which is asked before those that are there; one of the same class gives it its place."""
    _families[:] = [family, *(known for known in _families if type(known) is not type(family))]


def families() -> list[Family]:
    """All families, in the order in which they are asked for the layers that none before them has taken."""
    return list(_families)
