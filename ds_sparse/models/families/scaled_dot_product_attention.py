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
    RanDense,
    SparseCalls,
    make_calls_dense,
    make_calls_sparse,
    watched_methods,
)
from ...modules.structured_attention import StructuredAttention
from ...ops.operands import check_attention_operands
from ..report import Change, Kind, describe
from ..structures import Structures
from ..trial import Input, fake_copy, hidden_states, in_trial, made_up_inputs
from ._plain import Alike, changes_by_structure, named, refuse_asked, refuse_methods_past_the_class
from ._registry import Family
from .bing_bert import check_in_the_manner, in_the_manner


class ScaledDotProductAttention(Family):
    """Models whose own modules call scaled_dot_product_attention; not those that `BingBert` takes."""

    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        candidates = {name: layer for name, layer in layers.items() if not in_the_manner(name, layer)}
        return _TriedLayers(candidates, _try(model, candidates))

    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        assert isinstance(layers, _TriedLayers), "layers have to come from of_this_family"
        for name, (layer, error) in layers.failed.items():
            check_in_the_manner(name, layer, None if isinstance(error, RanDense) else error)
        tried = layers.tried
        cross_attention = {name: layers[name] for name, seen in tried.items() if seen.is_cross_attention}
        selves = {name: seen for name, seen in tried.items() if name not in cross_attention}
        kinds = {name: (_heads(name, layers[name], seen),) for name, seen in selves.items()}
        refuse_methods_past_the_class({name: layers[name] for name in selves}, watched_methods)
        structures.check_repeatable(kinds.values())
        return changes_by_structure(
            layers,
            kinds,
            structures,
            lambda alike: _interceptions(alike, selves, model, max_seq_length),
            cross_attention,
        )

    def left_dense(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
        return {name for name, seen in _try(model, layers).items() if seen.is_cross_attention}

    def switched(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        return {name: layer for name, layer in layers.items() if isinstance(layer, SparseCalls)}


class Interceptions(Change):
    """Layers of as many heads whose calls `on` makes sparse and `off` dense again."""

    def __init__(self, layers: Mapping[str, nn.Module], attention: StructuredAttention):
        was = [f"{type(layer).__name__}, scaled_dot_product_attention" for layer in layers.values()]
        now = [f"{type(layer).__name__}, ds_sparse" for layer in layers.values()]
        self.kinds = [Kind(layers, was, now, describe(attention), attention=attention)]
        self._layers, self._attention = layers, attention

    def on(self) -> None:
        for name, layer in self._layers.items():
            make_calls_sparse(layer, name, self._attention)

    def off(self) -> None:
        for layer in self._layers.values():
            make_calls_dense(layer)


@dataclass
class _Tried:
    """A layer's calls in a trial, the last one's options."""

    heads: set[int] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)
    refusal: CannotBeSparse | None = None
    not_taken: ValueError | None = None
    error: Exception | None = None  # with which it did not run

    @property
    def called(self) -> bool:
        return bool(self.heads) or self.refusal is not None

    @property
    def is_cross_attention(self) -> bool:
        return isinstance(self.refusal, CrossAttention) and not self.heads

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Stands for StructuredAttention."""
        self.heads.add(query.shape[1])
        # No tensor of the trial is kept.
        self.options = {name: True if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        try:
            check_attention_operands(query, key, value)
        except ValueError as error:
            self.not_taken = ValueError(str(error))  # without the frames of the trial, which hold its tensors
        return torch.empty_like(query)


class _TriedLayers(dict[str, nn.Module]):
    """Layers by name, with what they called in the trial that found them: a trial takes some 40 ms a layer."""

    def __init__(self, layers: Mapping[str, nn.Module], tried: Mapping[str, _Tried]):
        self.tried = {name: seen for name, seen in tried.items() if seen.called}
        super().__init__({name: layers[name] for name in self.tried})
        self.failed = {name: (layers[name], seen.error) for name, seen in tried.items() if seen.error is not None}


def _interceptions(
    alike: Alike, tried: Mapping[str, _Tried], model: nn.Module, max_seq_length: int | None
) -> Interceptions:
    for name, layer in alike.layers.items():
        refuse_asked(name, layer, alike.structure, **tried[name].options)
    return Interceptions(alike.layers, alike.attention(model, max_seq_length))


def _heads(name: str, layer: nn.Module, tried: _Tried) -> int:
    """The number of heads of a layer that can be sparse; raises ValueError for another."""
    what = named(name, layer)
    if tried.refusal is not None:
        raise ValueError(str(tried.refusal)) from tried.refusal
    if tried.not_taken is not None:
        raise ValueError(
            f"{what} calls scaled_dot_product_attention with what sparse attention does not take. {tried.not_taken}"
        ) from tried.not_taken
    if len(tried.heads) > 1:
        raise ValueError(f"{what} calls scaled_dot_product_attention with {sorted(tried.heads)} heads; give all one.")
    return next(iter(tried.heads))


def _try(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, _Tried]:
    """Tries layers, each alone or else in the model, and notes what they called."""
    seen = {name: _alone(name, layer) for name, layer in layers.items()}
    untried = {name: layer for name, layer in layers.items() if not seen[name].called}
    return seen | (_inside(model, untried, seen) if untried else {})


def _alone(name: str, layer: nn.Module) -> _Tried:
    """Hidden states are its first argument; others that it wants, such as masks, are None."""
    states = hidden_states(layer)
    if states is None:
        return _Tried()
    wanted = [p for p in inspect.signature(layer.forward).parameters.values() if p.default is p.empty]
    more = [None for parameter in wanted[1:] if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    tried = _Tried()
    error = _run(layer, {layer: name}, {name: tried}, states, more)
    return tried if error is None else _Tried(error=None if more else error)  # None instead of a mask is our mistake


def _inside(model: nn.Module, layers: Mapping[str, nn.Module], alone: Mapping[str, _Tried]) -> dict[str, _Tried]:
    names = {layer: name for name, layer in layers.items()}
    errors = []
    for given in made_up_inputs(model):
        seen = {name: _Tried() for name in layers}
        errors.append(_run(model, names, seen, given))
        if errors[-1] is None:
            return seen
    return {name: _Tried(error=next((x for x in (alone[name].error, *errors) if x), None)) for name in layers}


def _run(
    module: nn.Module,
    names: Mapping[nn.Module, str],
    seen: Mapping[str, _Tried],
    given: Input,
    more: Sequence[None] = (),
) -> Exception | None:
    """The error with which a copy of a module did not run on such an input; None where it did, or where a layer in it
    was refused."""

    shape, dtype = given

    def run() -> None:
        double = fake_copy(module)
        for original, twin in zip(module.modules(), double.modules(), strict=True):
            if original in names:
                vars(twin).pop("forward", None)  # refused later; what is tried is the module's own
                make_calls_sparse(twin, names[original], seen[names[original]].attention)
                twin.training = True  # alone, so that it asks for dropout as in training
        double(torch.zeros(shape, dtype=dtype), *more)

    try:
        in_trial(module, run)
    except CannotBeSparse as refusal:
        seen[refusal.layer].refusal = refusal
    except Exception as error:  # noqa: BLE001  code that is not ours, on inputs that it may not expect
        return error
    return None
