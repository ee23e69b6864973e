"""Transformers models as a family of models for `sparsify`: switched through their attention interface.

`on_import` imports this, which registers the family, with Transformers. Our side of its interface is imported for a
model of theirs only.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from ..config import BLOCK_KEY
from ..models.families import Family, register_family
from ..models.layers import ours_and_others
from ..models.report import Change, StayDense
from ..models.structures import Structures
from ..modules.dense_attention import dense_attention
from ..sparsity import SparsityWarning

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
    """Tells whether a Transformers model leaves attention to `attn_implementation`, as far as its source says; others
    accept any name and ignore it. For the innermost model around a layer."""
    return type(model)._can_set_attn_implementation()


def is_switched(model: PreTrainedModel | None) -> bool:
    """Tells whether the attention layers of which this is the innermost model are sparse."""
    return model is not None and model.config._attn_implementation == NAME and through_interface(model)


class TransformersModels(Family):
    """Models on the attention interface: no module changes, nor a key of the state dict, but where structures add
    parameters."""

    counts_by_model = True  # as the config of each keeps the block

    def of_this_family(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        owners = pretrained_model_around(model)
        return {name: layer for name, layer in layers.items() if layer in owners}

    def changes(
        self,
        model: nn.Module,
        layers: Mapping[str, nn.Module],
        structures: Structures,
        max_seq_length: int | None,
    ) -> list[Change]:
        layers_of = layers_by_model(model)
        if not layers_of:
            return []
        hf = _interface()
        found = hf.roles(model, layers_of)
        switches = []
        for owner, those in found.sparse.items():
            config = owner.config
            by_layer = structures.by_layer(config.num_attention_heads, saved=getattr(config, BLOCK_KEY, None))
            tokens = max_seq_length
            if structures.wanted is None and tokens is None:
                tokens = getattr(config, hf.MAX_SEQ_LENGTH_KEY, None)
            around = models_around(model, owner)
            switches.append(hf.Switch(owner, those, around, by_layer, tokens, found.decoders))
        for reason in dict.fromkeys(switch.not_saved for switch in switches if switch.not_saved):
            warnings.warn(f"The structure is not saved with the model: {reason}", SparsityWarning, stacklevel=3)
        return [hf.OwnConfigs(model), *switches, *(StayDense(layers, why) for why, layers in found.dense.items())]

    def switched(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        owners = pretrained_model_around(model)
        switched = {name: layer for name, layer in layers.items() if is_switched(owners.get(layer))}
        return {name: layer for name, layer in switched.items() if _computes_sparse(layer)}

    def left_dense(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
        owners = pretrained_model_around(model)
        of_sparse_models = {
            module
            for outer in owners.values()
            if any(is_switched(inner) for inner in outer.modules() if inner in owners.values())
            for module in outer.modules()
        }
        return {name for name, layer in layers.items() if layer in of_sparse_models}

    def adapt_replaced(self, model: nn.Module, base: nn.Module) -> None:
        """Their mask is then (batch, tokens), not a matrix of tokens x tokens."""
        if base in pretrained_model_around(model) and through_interface(base):
            _interface().give_own_configs(model)
            pretrained: Any = base
            pretrained.set_attn_implementation(_interface().NAME)


def _computes_sparse(layer: nn.Module) -> bool:
    """Tells whether a layer of a switched model is sparse too: none that its block leaves dense, nor one not on
    the attention interface."""
    attached: Any = vars(layer).get("_ds_sparse")
    return not isinstance(layer, nn.MultiheadAttention) and getattr(attached, "attention", None) is not dense_attention


def _interface() -> ModuleType:
    from . import transformers

    return transformers


register_family(TransformersModels())
