"""nn.MultiheadAttention, also in PyTorch's transformers: each layer becomes a SparseMultiheadAttention in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...modules.layers import cross_attention_layers
from ...modules.multihead_attention import SparseMultiheadAttention, refuse_added_keys
from ...modules.structured_attention import StructuredAttention
from ..report import NULL, Change, Kind, StayDense, describe
from ..structures import Structures
from ._past_layers import refuse_computed_past
from ._plain import CROSS_ATTENTION, by_structure, named, refuse_head_size, refuse_methods_past_the_class
from ._registry import Family


class MultiheadAttention(Family):
    """Models with `nn.MultiheadAttention`, as nn.TransformerEncoderLayer and nn.TransformerDecoderLayer have it."""

    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        return {name: layer for name, layer in layers.items() if isinstance(layer, nn.MultiheadAttention)}

    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        kinds = {name: (_heads(name, layer),) for name, layer in layers.items()}
        refuse_methods_past_the_class(layers)
        structures.check_repeatable(kinds.values())
        alike, left = by_structure(layers, kinds, structures)
        refuse_computed_past(model, {name: layer for name, layer in layers.items() if name not in left})
        changes: list[Change] = [Turn(model, those.layers, those.attention(model, max_seq_length)) for those in alike]
        kept = {NULL: left, CROSS_ATTENTION: cross_attention_layers(model)}
        return changes + [StayDense(those, why) for why, those in kept.items() if those]


class Turn:
    """Layers of as many heads that `on` turns into SparseMultiheadAttention and `off` back. The objects stay, and with
    them parameters, hooks and whatever else holds them."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], attention: StructuredAttention):
        was, now = nn.MultiheadAttention.__name__, SparseMultiheadAttention.__name__
        self.kinds = [Kind(layers, [was] * len(layers), [now] * len(layers), describe(attention))]
        self._layers, self._attention = list(layers.values()), attention
        # These hand nested tensors to their layers in evaluation.
        self._encoders = [
            module
            for module in model.modules()
            if isinstance(module, nn.TransformerEncoder) and not set(self._layers).isdisjoint(module.modules())
        ]

    def on(self) -> None:
        for layer in self._layers:
            sparse: Any = layer
            sparse.__class__ = SparseMultiheadAttention
            sparse.attend_with(self._attention)
        self._nested = [encoder.use_nested_tensor for encoder in self._encoders]
        for encoder in self._encoders:
            encoder.use_nested_tensor = False

    def off(self) -> None:
        for layer in self._layers:
            sparse: Any = layer
            sparse.attend_densely()
            layer.__class__ = nn.MultiheadAttention
        for encoder, nested in zip(self._encoders, self._nested, strict=True):
            encoder.use_nested_tensor = nested


def _heads(name: str, layer: nn.Module) -> int:
    """The number of heads of a layer; raises ValueError unless SparseMultiheadAttention does all that it does."""
    what = named(name, layer)
    if type(layer) is not nn.MultiheadAttention:
        raise ValueError(
            f"{what} would stay dense: it is of a class of its own, which may compute otherwise than "
            "torch.nn.MultiheadAttention; put ds_sparse.SparseMultiheadAttention into the model. Where "
            "parametrizations or fully_shard gave it its class, call sparsify before them."
        )
    refuse_added_keys(what, layer.bias_k is not None or layer.bias_v is not None, layer.add_zero_attn)
    refuse_head_size(name, layer, layer.num_heads, layer.head_dim)
    return layer.num_heads
