"""Several documents in a row by positions that start again: refused, where they would see each other."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..pretrained import NAME


def watch(model: nn.Module) -> RemovableHandle | None:
    """Has a model refuse rows of several documents; None where it does already."""
    if any(hook is _refuse_packed for hook in model._forward_pre_hooks.values()):
        return None
    return model.register_forward_pre_hook(_refuse_packed, with_kwargs=True)


def _refuse_packed(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
    config: Any = model.config
    given = {**dict(zip(inspect.signature(model.forward).parameters, arguments, strict=False)), **named}
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None or config._attn_implementation != NAME:
        return
    if not torch.compiler.is_compiling() and bool((positions.diff(dim=-1) < 0).any()):
        raise ValueError(
            f"position_ids of {type(model).__name__} start again within a row, as of documents that are packed, and "
            f"with {NAME} tokens of one would see the others. Give each document a row, with an attention_mask for the "
            "padding; where they are meant to see each other, an attention_mask of ones."
        )
