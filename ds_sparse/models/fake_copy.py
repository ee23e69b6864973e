"""A copy of a model to try without computing: fake tensors, no weights, no hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

TOKENS = 8
"""Tokens of a trial of a model in plain PyTorch, in a batch of two."""

_LEFT_OUT = object()


def fake_copy(model: nn.Module, without: str | None = None) -> nn.Module:
    """A copy in eval mode and without hooks, with fake tensors for its parameters and buffers, in a trial.

    Args:
        without: the name of attributes of modules that the copy is made without.
    """
    memo: dict[int, Any] = {}
    for x in (*model.parameters(), *model.buffers()):
        fake = torch.empty(getattr(x, "ds_shape", x.shape), dtype=x.dtype)  # ZeRO 3 keeps the whole shape in ds_shape
        memo[id(x)] = nn.Parameter(fake, requires_grad=False) if isinstance(x, nn.Parameter) else fake
    for module in model.modules():
        if without in vars(module):
            memo[id(vars(module)[without])] = _LEFT_OUT
    double = copy.deepcopy(model, memo).eval()
    for module in double.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return double


def made_up_inputs(model: nn.Module) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of what a model in plain PyTorch may take: token ids where it has a table of embeddings; hidden
    states."""
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        yield torch.int64, (2, TOKENS)
    widths = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    if widths:
        yield torch.float32, (2, TOKENS, widths[0])


def first_line(error: Exception) -> str:
    """An error of code that is not ours, in a sentence of ours."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
