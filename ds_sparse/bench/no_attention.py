"""Attention that returns the value as it is, for models of Transformers: what a step takes without any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..extras import optional_imports
from .cases import FLOOR, NO_ATTENTION

with optional_imports():
    from transformers import AttentionInterface

WITHOUT = {
    NO_ATTENTION: "ds_sparse_bench_value",
    FLOOR: "ds_sparse_bench_value_and_projections",
}
"""Their names in Transformers."""


class _Value(torch.autograd.Function):
    """The value as it is. Query and key get its gradient, so that the projections that make them keep their
    backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return value.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = grad.transpose(1, 2)
        return grad, grad, grad


def value_alone(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return value.transpose(1, 2).contiguous(), None


def value_and_projections(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return _Value.apply(query, key, value), None


AttentionInterface.register(WITHOUT[NO_ATTENTION], value_alone)
AttentionInterface.register(WITHOUT[FLOOR], value_and_projections)
