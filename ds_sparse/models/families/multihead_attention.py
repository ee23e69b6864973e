"""nn.MultiheadAttention, also in PyTorch's transformers: each layer becomes a SparseMultiheadAttention in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...modules.multihead_attention import SparseMultiheadAttention, refuse_added_keys
from ...modules.structured_attention import StructuredAttention, whole_blocks
from ..report import Change
from ..structures import Structures
from ._registry import Family
from .bing_bert import longest_sequence


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
        alike: dict[int, dict[str, nn.MultiheadAttention]] = {}
        for name, layer in layers.items():
            assert isinstance(layer, nn.MultiheadAttention)
            _check(name, layer)
            alike.setdefault(layer.num_heads, {})[name] = layer
        tokens = longest_sequence(getattr(model, "config", None)) if max_seq_length is None else max_seq_length
        changes: list[Change] = []
        for heads, those in alike.items():
            structure = structures.make_repeatable(heads)
            attention = StructuredAttention(structure, whole_blocks(tokens, structure.block))
            changes.append(Turn(model, those, attention))
        return changes


class Turn:
    """Layers of as many heads that `on` turns into SparseMultiheadAttention and `off` back. The objects stay, and with
    them parameters, hooks and whatever else holds them."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.MultiheadAttention], attention: StructuredAttention):
        self.layers, self.attention = layers, attention
        self.was = [nn.MultiheadAttention.__name__] * len(layers)
        self.now = [SparseMultiheadAttention.__name__] * len(layers)
        # These hand nested tensors to their layers in evaluation.
        self._encoders = [
            module
            for module in model.modules()
            if isinstance(module, nn.TransformerEncoder) and not set(layers.values()).isdisjoint(module.modules())
        ]

    def on(self) -> None:
        for layer in self.layers.values():
            layer.__class__ = SparseMultiheadAttention
            sparse: Any = layer
            sparse.attend_with(self.attention)
        self._nested = [encoder.use_nested_tensor for encoder in self._encoders]
        for encoder in self._encoders:
            encoder.use_nested_tensor = False

    def off(self) -> None:
        for layer in self.layers.values():
            sparse: Any = layer
            sparse.attend_densely()
            layer.__class__ = nn.MultiheadAttention
        for encoder, nested in zip(self._encoders, self._nested, strict=True):
            encoder.use_nested_tensor = nested


def _check(name: str, layer: nn.MultiheadAttention) -> None:
    """Raises ValueError unless SparseMultiheadAttention does all that the layer does."""
    what = f"attention layer {name or 'of the model itself'} ({type(layer).__name__})"
    if type(layer) is not nn.MultiheadAttention:
        raise ValueError(
            f"{what} would stay dense: it is of a class of its own, which may compute otherwise than "
            "torch.nn.MultiheadAttention; put ds_sparse.SparseMultiheadAttention into the model. Where "
            "parametrizations or fully_shard gave it its class, call sparsify before them."
        )
    if "forward" in vars(layer):
        raise ValueError(
            f"{what} would stay dense: its forward was replaced, as hooks of accelerate do; call sparsify before that."
        )
    refuse_added_keys(what, layer.bias_k is not None or layer.bias_v is not None, layer.add_zero_attn)
