"""What families of plain PyTorch models share: which of their layers get one structure, and its layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...sparsity import SparsityConfig
from ..structures import Structures

CROSS_ATTENTION = "cross-attention, whose keys are of another sequence"
"""Why a layer stays dense."""


class Alike(NamedTuple):
    """Layers, by name, of one structure and one kind: their number of heads first, and what else is to be the same."""

    layers: dict[str, nn.Module]
    structure: SparsityConfig
    kind: tuple[Any, ...]

    def attention(self, model: nn.Module, max_seq_length: int | None) -> StructuredAttention:
        """What computes in them, with a layout for so many tokens."""
        tokens = tokens_of_layout(model, max_seq_length)
        return StructuredAttention(self.structure, whole_blocks(tokens, self.structure.block))


def by_structure(
    layers: Mapping[str, nn.Module], kinds: Mapping[str, tuple[Any, ...]], structures: Structures
) -> tuple[list[Alike], dict[str, nn.Module]]:
    """Layers that share what computes, and those that are to stay dense.

    Args:
        layers: of a family.
        kinds: of those that can be sparse, by name.
    """
    alike: dict[tuple[Any, ...], Alike] = {}
    left: dict[str, nn.Module] = {}
    for name, kind in kinds.items():
        structure = structures.of_layer(name, kind[0])
        if structure is None:
            left[name] = layers[name]
        else:
            alike.setdefault((id(structure), kind), Alike({}, structure, kind)).layers[name] = layers[name]
    return list(alike.values()), left


def tokens_of_layout(model: nn.Module, max_seq_length: int | None) -> int:
    """Tokens that the layouts of a model are built for."""
    return longest_sequence(getattr(model, "config", None)) if max_seq_length is None else max_seq_length


def longest_sequence(config: Any) -> int:
    """Tokens that a layout is built for where none are asked for."""
    return getattr(config, "max_position_embeddings", None) or 2048
