"""Where a Transformers model takes the name: one that would stay dense, or fail later, is refused there."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel

from ...notices import say_notices
from ..pretrained import NAME, layers_by_model, models_around, through_interface
from .acceptance import why_not
from .binding import attach
from .causal import say_what_is_cut
from .packing import watch
from .roles import give_encoder_its_config, roles


def _settle(model: PreTrainedModel, one_by_one: bool = False) -> None:
    """Makes what has our name in a model sparse, and what stays dense beside it dense by name too.

    Args:
        one_by_one: the parts of the model were named, so each has to be sparse.

    Raises:
        ValueError: attention layers that have the name would stay dense, or fail later.
    """
    found = roles(model, {owner: layers for owner, layers in layers_by_model(model).items() if _has_name(owner)})
    if one_by_one and found.decoders:
        raise ValueError(why_not(found.decoders[0], layers_by_model(model)[found.decoders[0]]))
    for owner, layers in found.sparse.items():
        give_encoder_its_config(owner, found.decoders)
        with torch.device("cpu"):  # Transformers makes models that it loads on the meta device
            attach(layers)
            say_what_is_cut(owner, layers)
        watch(owner)
    for decoder in found.decoders:
        others = [
            outer for outer in models_around(model, decoder) if getattr(outer.config, "is_encoder_decoder", False)
        ]
        for dense in (decoder, *others):
            dense.config._attn_implementation_internal = _accepted(dense, None)
    say_notices(
        f"{type(model).__name__}: {len(layers)} attention layers stay dense: {why}."
        for why, layers in found.dense.items()
    )


def _has_name(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == NAME


def _is_being_made() -> bool:
    """Whether this is called by the constructor of a Transformers model that another one contains: that one settles
    both."""
    frame: FrameType | None = sys._getframe(1)
    making = set()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            making.add(id(frame.f_locals["self"]))
        frame = frame.f_back
    return len(making) > 1


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
    named = [module for module in self.modules() if isinstance(module, PreTrainedModel) and _has_name(module)]
    if named and not _is_being_made():
        _settle(self)


@functools.wraps(set_unchecked)
def _set_attn_implementation_and_check(
    self: PreTrainedModel, attn_implementation: str | dict, *more: Any, **named: Any
) -> None:
    configs = {id(module.config): module.config for module in self.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        set_unchecked(self, attn_implementation, *more, **named)
        if attn_implementation == NAME:
            for model in layers_by_model(self):
                model.config._attn_implementation_internal = NAME
        _settle(self, one_by_one=isinstance(attn_implementation, dict))
    except ValueError:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        raise


# Transformers takes a registered name for every model, also for one that never calls the function.
PreTrainedModel.get_correct_attn_implementation = _accepted_where_used
PreTrainedModel.post_init = _post_init_and_check
PreTrainedModel.set_attn_implementation = _set_attn_implementation_and_check
