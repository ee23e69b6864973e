"""What families of plain PyTorch models share: which of their layers get one structure, and its layouts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...sparsity import SparsityConfig
from ..structures import Structures
from .bing_bert import longest_sequence

CROSS_ATTENTION = "cross-attention, whose keys are of another sequence"
"""Why a layer stays dense."""


def by_structure(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    heads: Mapping[str, int],
    structures: Structures,
    max_seq_length: int | None,
) -> tuple[list[tuple[StructuredAttention, dict[str, nn.Module]]], dict[str, nn.Module]]:
    """What computes in layers, with those that share it, by name; and the layers that are to stay dense.

    Args:
        layers: of a family, in the model's order, by which `layers` of the block counts them.
        heads: of those that can be sparse, by name.
    """
    alike: dict[tuple[int, int], dict[str, nn.Module]] = {}
    given: dict[tuple[int, int], SparsityConfig] = {}
    left: dict[str, nn.Module] = {}
    for number, (name, layer) in enumerate(layers.items()):
        if name not in heads:
            continue
        structure = structures.repeatable_by_layer(heads[name], len(layers), type(model).__name__).of(number)
        if structure is None:
            left[name] = layer
            continue
        kind = (heads[name], id(structure))
        alike.setdefault(kind, {})[name] = layer
        given[kind] = structure
    tokens = longest_sequence(getattr(model, "config", None)) if max_seq_length is None else max_seq_length
    attentions = {
        kind: StructuredAttention(structure, whole_blocks(tokens, structure.block)) for kind, structure in given.items()
    }
    return [(attentions[kind], those) for kind, those in alike.items()], left
