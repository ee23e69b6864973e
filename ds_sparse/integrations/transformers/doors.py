"""Where a Transformers model takes the name: one that would stay dense, or fail later, is refused there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..pretrained import NAME, layers_by_model, through_interface
from .acceptance import why_not
from .binding import attached_to
from .causal import say_what_is_cut


def _refuse_what_stays_dense(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError unless these layers of a model that has our name are sparse in every forward."""
    reason = why_not(model, layers)
    if reason is not None:
        raise ValueError(reason)
    with torch.device("cpu"):  # Transformers makes models that it loads on the meta device
        for layer in layers.values():
            attached_to(layer)
        say_what_is_cut(model, layers)


_accepted = PreTrainedModel.get_correct_attn_implementation
_post_init = PreTrainedModel.post_init
set_unchecked = PreTrainedModel.set_attn_implementation


@functools.wraps(_accepted)
def _accepted_where_used(self: PreTrainedModel, requested_attention: str | None, *more: Any, **named: Any) -> str:
    if requested_attention == NAME and not through_interface(self):  # its layers may not even be made by this name
        raise ValueError(why_not(self, {}))
    return _accepted(self, requested_attention, *more, **named)


@functools.wraps(_post_init)
def _post_init_and_check(self: PreTrainedModel) -> None:
    _post_init(self)
    if self.config._attn_implementation == NAME:
        layers = layers_by_model(self)
        if self in layers:  # the models inside it have been checked when they were made
            _refuse_what_stays_dense(self, layers[self])


@functools.wraps(set_unchecked)
def _set_attn_implementation_and_check(
    self: PreTrainedModel, attn_implementation: str | dict, *more: Any, **named: Any
) -> None:
    configs = {id(module.config): module.config for module in self.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        set_unchecked(self, attn_implementation, *more, **named)
        for model, layers in layers_by_model(self).items():
            if attn_implementation == NAME or model.config._attn_implementation == NAME:
                _refuse_what_stays_dense(model, layers)
    except ValueError:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        raise


# Transformers takes a registered name for every model, also for one that never calls the function.
PreTrainedModel.get_correct_attn_implementation = _accepted_where_used
PreTrainedModel.post_init = _post_init_and_check
PreTrainedModel.set_attn_implementation = _set_attn_implementation_and_check
