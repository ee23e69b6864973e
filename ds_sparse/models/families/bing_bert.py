"""Layers in the bing_bert manner: each becomes a BertSparseSelfAttention with the same projections, in place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from ...modules.bert import BertSparseSelfAttention
from ...modules.chosen_attention import LEARNED
from ...modules.structured_attention import whole_blocks
from ...sparsity import SparsityConfig
from ..report import Change, Kind, describe
from ..structures import Structures
from ..trial import first_line
from ._plain import (
    BY_HAND,
    Alike,
    changes_by_structure,
    named,
    refuse_head_size,
    refuse_methods_past_the_class,
    tokens_of_layout,
)
from ._registry import Family

_CORE = "sparse_self_attention"
_SIZES = ("num_attention_heads", "attention_head_size", "all_head_size")
"""Sizes that a BertSparseSelfAttention has beside its projections."""

_QUERY_KEY_VALUE = ("query", "key", "value")
_DROPOUTS = (
    "dropout", "dropout_p", "dropout_prob", "attn_dropout", "attention_dropout", "attention_probs_dropout_prob",
)  # fmt: skip


class BingBert(Family):
    """Models with layers in the bing_bert manner: each holds `query`, `key` and `value`, is called with (hidden_states,
    attention_mask) and returns a tensor. What no other family has is taken for one of these, or refused."""

    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        return dict(layers)

    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        for name, layer in layers.items():
            check_in_the_manner(name, layer)
        refuse_methods_past_the_class(layers)
        kinds = {name: _kind(name, layer, structures.wanted) for name, layer in layers.items()}
        tokens = tokens_of_layout(model, max_seq_length)
        return changes_by_structure(layers, kinds, structures, lambda alike: Turn(alike.layers, _around(alike, tokens)))


class Turn(Change):
    """Layers in the bing_bert manner, alike, that `on` turns into BertSparseSelfAttention and `off` back. The objects
    stay, and with them parameters, hooks and whatever else holds them."""

    def __init__(self, layers: dict[str, nn.Module], replacements: list[BertSparseSelfAttention]):
        was = [type(layer).__name__ for layer in layers.values()]
        now = [BertSparseSelfAttention.__name__] * len(layers)
        cores = [replacement.sparse_self_attention for replacement in replacements]
        what = describe(cores[0].attention, [getattr(core, LEARNED, None) for core in cores])
        self.kinds = [Kind(layers, was, now, what, attention=cores[0].attention)]
        self._sparse_for = dict(zip(layers.values(), replacements, strict=True))

    def on(self) -> None:
        self._before = [(layer, type(layer), dict(vars(layer))) for layer in self._sparse_for]
        for layer, sparse in self._sparse_for.items():
            vars(layer).update({size: getattr(sparse, size) for size in _SIZES})
            layer.add_module(_CORE, sparse.sparse_self_attention)
            layer.__class__ = BertSparseSelfAttention

    def off(self) -> None:
        for layer, dense, before in self._before:
            for size in _SIZES:
                del vars(layer)[size]
            vars(layer).update({size: before[size] for size in _SIZES if size in before})
            delattr(layer, _CORE)
            layer.__class__ = dense


def around(
    layers: list[nn.Module], config: Any, structure: SparsityConfig, max_position: int
) -> list[BertSparseSelfAttention]:
    """A sparse layer around the projections of each dense one; they share one layout."""
    tokens = whole_blocks(max_position, structure.block)
    first = BertSparseSelfAttention(config, structure, tokens, projections_of=layers[0])
    return [first, *(first.with_projections_of(layer) for layer in layers[1:])]


def _around(alike: Alike, tokens: int) -> list[BertSparseSelfAttention]:
    heads, hidden, dropout = alike.kind
    config = SimpleNamespace(hidden_size=hidden, num_attention_heads=heads, attention_probs_dropout_prob=dropout)
    return around(list(alike.layers.values()), config, alike.structure, tokens)


def _kind(name: str, layer: nn.Module, wanted: Any) -> tuple[int, int, float]:
    projection: Any = layer.query
    heads = _heads(name, layer, wanted)
    refuse_head_size(name, layer, heads, projection.out_features // heads)
    return heads, projection.out_features, _dropout(name, layer)


def in_the_manner(name: str, layer: nn.Module) -> bool:
    """Tells whether a layer can become a BertSparseSelfAttention."""
    try:
        check_in_the_manner(name, layer)
    except ValueError:
        return False
    return True


def check_in_the_manner(name: str, layer: nn.Module, error: Exception | None = None) -> None:
    """Raises ValueError unless a layer can become a BertSparseSelfAttention, from the error with which a trial of it
    did not run."""
    try:
        _check_replaceable(name, layer, "" if error is None else f": it raised {first_line(error).rstrip('.')}")
        _dropout(name, layer)
    except ValueError as refusal:
        raise refusal from error


def _check_replaceable(name: str, layer: nn.Module, because: str) -> None:
    """Raises ValueError unless a BertSparseSelfAttention with its query, key and value does all that a layer does."""
    what = named(name, layer)
    projections: list[Any] = [getattr(layer, projection, None) for projection in _QUERY_KEY_VALUE]
    if not all(hasattr(projection, "out_features") for projection in projections):
        raise ValueError(
            f"{what} would stay dense: sparsify takes layers that hold Linear modules query, key and value, and those "
            f"that call scaled_dot_product_attention, as a trial of this one on made-up inputs did not{because}. Have "
            f"it call that, or {BY_HAND}"
        )
    taken = [parameter.name for parameter in inspect.signature(layer.forward).parameters.values()]
    if len(taken) > 1 and "mask" not in taken[1]:
        raise ValueError(
            f"{what} would stay dense: it is called with ({', '.join(taken)}), and sparsify takes layers that are "
            f"called with (hidden_states, attention_mask); {BY_HAND}"
        )
    own = {id(x) for projection in projections for x in (*projection.parameters(), *projection.buffers())}
    more = [key for key, x in (*layer.named_parameters(), *layer.named_buffers()) if id(x) not in own]
    if more or len({projection.out_features for projection in projections}) > 1:
        raise ValueError(
            f"{what} would stay dense: besides the attention of query, key and value of one size it has "
            f"{', '.join(more) or 'projections of several sizes'}; {BY_HAND}"
        )


def _heads(name: str, layer: nn.Module, wanted: Any) -> int:
    said = [getattr(layer, attribute, None) for attribute in ("num_attention_heads", "num_heads", "n_heads")]
    said.append(getattr(wanted, "num_heads", None))
    heads = next((number for number in said if isinstance(number, int)), None)
    if heads is None:
        raise ValueError(
            f"{named(name, layer)} does not say its number of heads (num_attention_heads); pass sparsify a sparsity "
            "config made with num_heads, instead of a dict."
        )
    return heads


def _dropout(name: str, layer: nn.Module) -> float:
    """The probability with which a dense layer drops attention probabilities: its only Dropout, or a number by one of
    the usual names."""
    modules = [module.p for module in layer.modules() if isinstance(module, nn.Dropout)]
    numbers = [x for x in (getattr(layer, attribute, None) for attribute in _DROPOUTS) if isinstance(x, int | float)]
    if len(modules) > 1:
        raise ValueError(
            f"{named(name, layer)} would stay dense: it has {len(modules)} Dropout modules, of which one at most can "
            f"be that of the attention; {BY_HAND}"
        )
    return float((modules or numbers or [0.0])[0])
