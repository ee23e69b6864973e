"""Transformers models inside a model, and their attention layers. Imports no Transformers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

from ..modules.layers import ours_and_others

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "ds_sparse"
"""The `attn_implementation` of a Transformers model whose attention is sparse."""


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
    ours, others = ours_and_others(model)
    around_ours = {owners.get(layer) for layer in ours.values()}
    found: dict[PreTrainedModel, dict[str, nn.Module]] = {
        owner: {} for owner in innermost_pretrained_models(owners) if owner not in around_ours
    }
    for name, layer in others.items():
        if layer in owners:
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


def is_switched(model: PreTrainedModel | None) -> bool:
    """Whether the attention layers of which this is the innermost model are sparse."""
    return model is not None and model.config._attn_implementation == NAME and through_interface(model)
