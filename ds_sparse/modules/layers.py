"""Which modules of a model are attention layers, by what they hold."""

from __future__ import annotations

from torch import nn

from ..sparsity import SparsityConfig
from .intercepted_attention import SparseCalls, structure_of_calls
from .multihead_attention import SparseMultiheadAttention
from .self_attention import SparseSelfAttention

_PROJECTIONS = (
    {"query", "key", "value"}, {"q_proj", "k_proj", "v_proj"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"q", "k", "v"}, {"wq", "wk", "wv"}, {"query_proj", "key_proj", "value_proj"}, {"linear_q", "linear_k", "linear_v"},
    {"q_head", "k_head", "v_head"}, {"query_key_value"}, {"c_attn"}, {"qkv"}, {"wqkv"}, {"to_qkv"}, {"qkv_proj"},
    {"to_q", "to_kv"}, {"q", "kv"},
)  # fmt: skip


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


def cross_attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of PyTorch's decoders, by name, whose keys are of another sequence than their queries."""
    return {
        f"{name}.multihead_attn" if name else "multihead_attn": module.multihead_attn
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerDecoderLayer)
    }


def _has_projections(module: nn.Module) -> bool:
    children = {name.lower() for name, _ in module.named_children()}
    return any(names <= children for names in _PROJECTIONS)
