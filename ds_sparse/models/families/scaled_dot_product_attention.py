"""Layers of any kind that call F.scaled_dot_product_attention: their calls become sparse, their code stays.

A layer is tried first, without weights and without computing: alone on made-up hidden states, and where it wants more
than these, inside the model. Only one that called the function, on query, key and value (B, H, T, D) of one sequence,
is taken. What a trial cannot show is seen in each call, which raises where nothing was computed sparsely
(`modules/intercepted_attention.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...modules.intercepted_attention import (
    CannotBeSparse,
    CrossAttention,
    SparseCalls,
    make_calls_dense,
    make_calls_sparse,
    watched_methods,
)
from ...modules.structured_attention import StructuredAttention
from ..fake_copy import TOKENS, fake_copy, made_up_inputs, trying
from ..report import NULL, Change, Kind, StayDense, describe
from ..structures import Structures
from ._plain import CROSS_ATTENTION, by_structure, named, refuse_methods_past_the_class
from ._registry import Family
from .bing_bert import in_the_manner


class ScaledDotProductAttention(Family):
    """Models whose own modules call scaled_dot_product_attention; not those that `BingBert` takes."""

    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        candidates = {name: layer for name, layer in layers.items() if not in_the_manner(name, layer)}
        tried = {name: seen for name, seen in _try(model, candidates).items() if seen.called}
        return _TriedLayers({name: candidates[name] for name in tried}, tried)

    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        tried = layers.tried if isinstance(layers, _TriedLayers) else _try(model, layers)
        cross_attention = {name: layers[name] for name, seen in tried.items() if seen.is_cross_attention}
        selves = {name: seen for name, seen in tried.items() if name not in cross_attention}
        kinds = {name: (_heads(name, layers[name], seen),) for name, seen in selves.items()}
        refuse_methods_past_the_class({name: layers[name] for name in selves}, watched_methods)
        structures.check_repeatable(kinds.values())
        alike, left = by_structure(layers, kinds, structures)
        changes: list[Change] = [Interceptions(those.layers, those.attention(model, max_seq_length)) for those in alike]
        kept = {NULL: left, CROSS_ATTENTION: cross_attention}
        return changes + [StayDense(those, why) for why, those in kept.items() if those]

    def left_dense(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
        return {name for name, seen in _try(model, layers).items() if seen.is_cross_attention}

    def switched(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        return {name: layer for name, layer in layers.items() if isinstance(layer, SparseCalls)}


class Interceptions:
    """Layers of as many heads whose calls `on` makes sparse and `off` dense again."""

    def __init__(self, layers: Mapping[str, nn.Module], attention: StructuredAttention):
        was = [f"{type(layer).__name__}, scaled_dot_product_attention" for layer in layers.values()]
        now = [f"{type(layer).__name__}, ds_sparse" for layer in layers.values()]
        self.kinds = [Kind(layers, was, now, describe(attention))]
        self._layers, self._attention = layers, attention

    def on(self) -> None:
        for name, layer in self._layers.items():
            make_calls_sparse(layer, name, self._attention)

    def off(self) -> None:
        for layer in self._layers.values():
            make_calls_dense(layer)


@dataclass
class _Tried:
    """What a layer's calls were in a trial."""

    heads: set[int] = field(default_factory=set)
    refusal: CannotBeSparse | None = None

    @property
    def called(self) -> bool:
        return bool(self.heads) or self.refusal is not None

    @property
    def is_cross_attention(self) -> bool:
        return isinstance(self.refusal, CrossAttention) and not self.heads

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        """Stands for StructuredAttention."""
        self.heads.add(query.shape[1])
        return torch.empty_like(query)


class _TriedLayers(dict[str, nn.Module]):
    """Layers by name, with what they called in the trial that found them: a trial takes some 40 ms a layer."""

    def __init__(self, layers: Mapping[str, nn.Module], tried: Mapping[str, _Tried]):
        super().__init__(layers)
        self.tried = tried


def _heads(name: str, layer: nn.Module, tried: _Tried) -> int:
    """The number of heads of a layer that can be sparse; raises ValueError for another."""
    what = named(name, layer)
    if tried.refusal is not None:
        raise ValueError(str(tried.refusal)) from tried.refusal
    if len(tried.heads) > 1:
        raise ValueError(f"{what} calls scaled_dot_product_attention with {sorted(tried.heads)} heads; give all one.")
    return next(iter(tried.heads))


def _try(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, _Tried]:
    """What layers called in a trial of each alone, or else of the model."""
    seen = {name: _alone(name, layer) for name, layer in layers.items()}
    untried = {name: layer for name, layer in layers.items() if not seen[name].called}
    return seen | (_inside(model, untried) if untried else {})


def _alone(name: str, layer: nn.Module) -> _Tried:
    """Hidden states are its first argument; others that it wants, such as masks, are None."""
    width = next((module.in_features for module in layer.modules() if isinstance(module, nn.Linear)), None)
    wanted = [p for p in inspect.signature(layer.forward).parameters.values() if p.default is p.empty]
    more = [None for parameter in wanted[1:] if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    tried = _Tried()
    ran = width is not None and _run(layer, {layer: name}, {name: tried}, torch.float32, (2, TOKENS, width), more)
    return tried if ran else _Tried()


def _inside(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, _Tried]:
    names = {layer: name for name, layer in layers.items()}
    for dtype, shape in made_up_inputs(model):
        seen = {name: _Tried() for name in layers}
        if _run(model, names, seen, dtype, shape):
            return seen
    return {name: _Tried() for name in layers}


def _run(
    module: nn.Module,
    names: Mapping[nn.Module, str],
    seen: Mapping[str, _Tried],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    more: Sequence[None] = (),
) -> bool:
    """Whether a copy of a module ran on such an input, or a layer in it was refused."""
    try:
        with trying():
            double = fake_copy(module)
            for original, twin in zip(module.modules(), double.modules(), strict=True):
                if original in names:
                    vars(twin).pop("forward", None)  # refused later; what is tried is the module's own
                    make_calls_sparse(twin, names[original], seen[names[original]].attention)
            of_model = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
            double(torch.zeros(shape, dtype=dtype if dtype == torch.int64 else of_model), *more)
    except CannotBeSparse as refusal:
        seen[refusal.layer].refusal = refusal
    except Exception:  # noqa: BLE001  code that is not ours, on inputs that it may not expect
        return False
    return True
