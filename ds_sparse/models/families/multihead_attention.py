"""nn.MultiheadAttention, also in PyTorch's transformers: each layer becomes a SparseMultiheadAttention in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward
from torch.utils._pytree import tree_leaves

from ...modules.code_names import functions_of, names_in
from ...modules.multihead_attention import SparseMultiheadAttention, refuse_added_keys
from ...modules.structured_attention import StructuredAttention
from ..report import Change, Kind, describe
from ..structures import Structures
from ..trial import Input, fake_copy, in_trial, made_up_inputs
from ._plain import (
    changes_by_structure,
    cross_attention_layers,
    named,
    refuse_asked,
    refuse_head_size,
    refuse_methods_past_the_class,
)
from ._registry import Family

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


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
        changes = changes_by_structure(
            layers,
            kinds,
            structures,
            lambda alike: Turn(model, alike.layers, alike.attention(model, max_seq_length)),
            cross_attention_layers(model),
        )
        sparse = [kind for change in changes for kind in change.kinds if kind.sparse]
        _refuse_computed_past(model, {name: layer for kind in sparse for name, layer in kind.layers.items()})
        return changes


class Turn(Change):
    """Layers of as many heads that `on` turns into SparseMultiheadAttention and `off` back. The objects stay, and with
    them parameters, hooks and whatever else holds them."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], attention: StructuredAttention):
        for name, layer in layers.items():
            refuse_asked(name, layer, attention.sparsity_config, dropout_p=layer.dropout)
        was, now = nn.MultiheadAttention.__name__, SparseMultiheadAttention.__name__
        self.kinds = [Kind(layers, [was] * len(layers), [now] * len(layers), describe(attention), attention=attention)]
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


def _refuse_computed_past(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a model computes one of these layers from its weights: where the code of a class around
    it names PyTorch's function for that, or a trial shows it, if the model runs on made-up inputs."""
    if not layers:
        return
    for module in model.modules():
        kind: Any = type(module)
        functions = [function for those in functions_of(kind).values() for function in those]
        if any(multi_head_attention_forward.__name__ in names_in(function) for function in functions):
            inside = set(module.modules())
            by = f"{kind.__name__} calls {multi_head_attention_forward.__name__}"
            _refuse(next((name for name, layer in layers.items() if layer in inside), None), by)
    _refuse(_computed_past(model, layers), f"a trial of {type(model).__name__} had it computed without a call of it")


def _refuse(name: str | None, why: str) -> None:
    if name is not None:
        raise ValueError(
            f"attention layer {name or 'of the model itself'} (MultiheadAttention) would stay dense: {why}, from its "
            'weights. Call the layer itself, or keep it dense, by null in "layers" of the block.'
        )


def _computed_past(model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
    """The first layer whose weights are in the output of a model although its forward takes them out of it."""
    for given in made_up_inputs(model):
        try:
            return in_trial(model, functools.partial(_reached, model, layers, given))
        except Exception:  # noqa: BLE001  code that is not ours, on inputs that it may not expect
            continue
    return None


@torch.enable_grad()
def _reached(model: nn.Module, layers: Mapping[str, nn.Module], given: Input) -> str | None:
    double = fake_copy(model)
    twins = dict(zip(model.modules(), double.modules(), strict=True))
    weights = {name: _watched_weights(twins[layer]) for name, layer in layers.items()}
    shape, dtype = given
    output = double(torch.zeros(shape, dtype=dtype))
    sums = [x.sum() for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    return next((name for name, those in weights.items() if sums and _reaches(those, sum(sums))), None)


def _watched_weights(twin: Any) -> list[nn.Parameter]:
    """The projections of a layer in a trial, the only ones with gradients, and not in what its forward returns."""
    twin.forward = lambda query, *_, **__: (torch.zeros_like(query), None)
    twin._qkv_same_embed_dim = False  # as in SparseMultiheadAttention
    found = [weight for weight in (getattr(twin, name) for name in _WEIGHTS) if weight is not None]
    return [weight.requires_grad_() for weight in found]


def _reaches(weights: list[nn.Parameter], total: Any) -> bool:
    return any(grad is not None for grad in torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True))
