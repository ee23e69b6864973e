"""The floor of a step: attention that returns the value, where the projections of query and key keep their backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_sparse.extras import optional_imports

with optional_imports():
    from transformers import AttentionInterface

PROJECTIONS = "ds_sparse_bench_value_and_projections"
"""Its name in Transformers."""


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


def value_and_projections(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return _Value.apply(query, key, value), None


AttentionInterface.register(PROJECTIONS, value_and_projections)
