"""Finds the attention layers of a model, sparse and dense, whatever family it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..modules.code_names import calls_attention
from ..modules.intercepted_attention import SparseCalls, structure_of_calls
from ..modules.multihead_attention import SparseMultiheadAttention
from ..modules.self_attention import SparseSelfAttention
from ..sparsity import SparsityConfig
from .families import families
from .families._plain import cross_attention_layers

_PROJECTIONS = (
    {"query", "key", "value"}, {"q_proj", "k_proj", "v_proj"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"q", "k", "v"}, {"wq", "wk", "wv"}, {"query_proj", "key_proj", "value_proj"}, {"linear_q", "linear_k", "linear_v"},
    {"q_head", "k_head", "v_head"}, {"query_key_value"}, {"c_attn"}, {"qkv"}, {"wqkv"}, {"to_qkv"}, {"qkv_proj"},
    {"to_q", "to_kv"}, {"q", "kv"},
)  # fmt: skip


class AttentionLayers(NamedTuple):
    """The self-attention layers of a model, by name and in its order.

    Attributes:
        sparse: what `ours_and_others` says is ours, and what its family says is switched, such as a layer of a
            Transformers model on the attention interface whose implementation is "ds_sparse".
        dense: the others that it finds, and the innermost modules outside of these whose code names
            scaled_dot_product_attention.
        numbers: by which `layers` of a block counts them: from 0, whatever family they are of. Layers of a family that
            counts them by model have none here.
    """

    sparse: dict[str, nn.Module]
    dense: dict[str, nn.Module]
    numbers: dict[str, int]


def attention_layers(model: nn.Module) -> AttentionLayers:
    """Looks a model through for its attention layers."""
    sparse, dense = ours_and_others(model)
    dense |= _callers(model, {*sparse.values(), *dense.values(), *cross_attention_layers(model).values()})
    for family in families():
        sparse |= family.switched(model, dense)
    layers = {name: {**dense, **sparse}[name] for name, _ in model.named_modules() if name in sparse or name in dense}
    apart = {name for family in families() if family.counts_by_model for name in family.of_this_family(model, layers)}
    return AttentionLayers(
        {name: layer for name, layer in layers.items() if name in sparse},
        {name: layer for name, layer in layers.items() if name not in sparse},
        {name: number for number, name in enumerate(name for name in layers if name not in apart)},
    )


def refuse_sparse(model: nn.Module, sparse: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a model that is to become sparse has a sparse layer."""
    if sparse:
        raise ValueError(
            f"{next(iter(sparse))} of {type(model).__name__} is sparse already; give the dense model (undo() of what "
            "sparsify returned makes it dense again)."
        )


def ours_and_others(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The self-attention layers of a model, by name: each `SparseSelfAttention` and `SparseMultiheadAttention`, and
    the others.

    Another is a module that holds projections by the names that models give them (`query`, `key` and `value` of BERT,
    `q_proj`, `k_proj` and `v_proj`, `q_lin`, ..., `query_key_value`, `c_attn`, `qkv`), and no `SparseSelfAttention`;
    and `nn.MultiheadAttention`, but for `cross_attention_layers`.
    """
    cross_attention = set(cross_attention_layers(model).values())
    ours: dict[str, nn.Module] = {}
    others: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, SparseSelfAttention | SparseMultiheadAttention):
            ours[name] = module
        elif module in cross_attention or not (isinstance(module, nn.MultiheadAttention) or _has_projections(module)):
            continue
        elif not any(isinstance(child, SparseSelfAttention) for child in module.modules()):
            others[name] = module
    return ours, others


def structure_of(layer: nn.Module) -> SparsityConfig | None:
    """The structure of a layer that computes with a module of this package; None for another."""
    if isinstance(layer, SparseSelfAttention):
        return layer.sparsity_config
    if isinstance(layer, SparseMultiheadAttention):
        return layer.attention.sparsity_config
    return structure_of_calls(layer) if isinstance(layer, SparseCalls) else None


def _has_projections(module: nn.Module) -> bool:
    children = {name.lower() for name, _ in module.named_children()}
    return any(names <= children for names in _PROJECTIONS)


def _callers(model: nn.Module, known: set[nn.Module]) -> dict[str, nn.Module]:
    """The innermost modules, neither inside nor around the known ones, whose code names the function."""
    inside = {module for layer in known for module in layer.modules()}
    found: dict[str, nn.Module] = {}
    around: set[nn.Module] = set(known)
    for name, module in reversed(list(model.named_modules())):  # what is inside comes before what is around it
        if module in inside or not around.isdisjoint(module.modules()):
            continue
        kind: Any = type(module)
        if calls_attention(kind):
            found[name] = module
            around.add(module)
    return dict(reversed(found.items()))
