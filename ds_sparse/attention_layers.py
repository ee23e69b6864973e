"""Which modules of a model are attention layers, and whether they are sparse."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from .self_attention import SparseSelfAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRANSFORMERS_NAME = "ds_sparse"
"""The `attn_implementation` of a Transformers model whose attention is sparse."""

_PROJECTIONS = (
    {"query", "key", "value"}, {"q_proj", "k_proj", "v_proj"}, {"q_lin", "k_lin", "v_lin"}, {"to_q", "to_k", "to_v"},
    {"q", "k", "v"}, {"wq", "wk", "wv"}, {"query_proj", "key_proj", "value_proj"}, {"linear_q", "linear_k", "linear_v"},
    {"q_head", "k_head", "v_head"}, {"query_key_value"}, {"c_attn"}, {"qkv"}, {"wqkv"}, {"to_qkv"}, {"qkv_proj"},
)  # fmt: skip


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The sparse and the dense self-attention layers of a model, by name.

    Sparse is a `SparseSelfAttention`, and a layer of a Transformers model on the attention interface whose
    implementation is "ds_sparse". Dense is another module that holds projections by the names that models give them
    (`query`, `key` and `value` of BERT, `q_proj`, `k_proj` and `v_proj`, `q_lin`, ..., `query_key_value`, `c_attn`,
    `qkv`), and no `SparseSelfAttention`; and `nn.MultiheadAttention`.
    """
    owners = pretrained_model_around(model)
    sparse, dense = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, SparseSelfAttention):
            sparse[name] = module
        elif not (isinstance(module, nn.MultiheadAttention) or _has_projections(module)):
            continue
        elif not any(isinstance(child, SparseSelfAttention) for child in module.modules()):
            (sparse if _is_switched(owners.get(module)) else dense)[name] = module
    return sparse, dense


def pretrained_model_around(model: nn.Module) -> dict[nn.Module, PreTrainedModel]:
    """Each module inside a Transformers model, with the innermost one around it. Does not import Transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}
    pretrained = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    return {module: outer for outer in pretrained for module in outer.modules()}


def innermost_pretrained_models(owners: dict[nn.Module, PreTrainedModel]) -> list[PreTrainedModel]:
    """The Transformers models that hold no other, from `pretrained_model_around`."""
    models = dict.fromkeys(owners.values())
    return [model for model in models if all(owners[module] is model for module in model.modules())]


def layers_by_model(model: nn.Module) -> dict[PreTrainedModel, dict[str, nn.Module]]:
    """The attention layers inside Transformers models, by the innermost such model around them and by name. A
    Transformers model that holds no other is in it without a layer too, unless it holds a `SparseSelfAttention`; that
    is no layer here."""
    owners = pretrained_model_around(model)
    sparse, dense = attention_layers(model)
    ours = {owners.get(layer) for layer in sparse.values() if isinstance(layer, SparseSelfAttention)}
    found: dict[PreTrainedModel, dict[str, nn.Module]] = {
        owner: {} for owner in innermost_pretrained_models(owners) if owner not in ours
    }
    for name, layer in (sparse | dense).items():
        if layer in owners and not isinstance(layer, SparseSelfAttention):
            found.setdefault(owners[layer], {})[name] = layer
    return found


def models_around(model: nn.Module, inner: PreTrainedModel) -> list[PreTrainedModel]:
    """The Transformers models inside a model that hold another one."""
    return [
        outer
        for outer in dict.fromkeys(pretrained_model_around(model).values())
        if outer is not inner and any(module is inner for module in outer.modules())
    ]


def through_interface(model: PreTrainedModel) -> bool:
    """Whether a Transformers model leaves its attention to `attn_implementation`, as far as its source tells; others
    accept any name and ignore it. For the innermost model around a layer."""
    return type(model)._can_set_attn_implementation()


def _is_switched(model: PreTrainedModel | None) -> bool:
    return model is not None and model.config._attn_implementation == TRANSFORMERS_NAME and through_interface(model)


def _has_projections(module: nn.Module) -> bool:
    children = {name.lower() for name, _ in module.named_children()}
    return any(names <= children for names in _PROJECTIONS)
