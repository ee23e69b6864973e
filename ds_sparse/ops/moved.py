"""Tokens of a packed row moved so that each document begins with a whole block, and back, with their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._autograd import Function, differentiable_once, named


def moving_function(name: str, operation: str) -> Any:
    """Makes the autograd function of an operation that gives the tokens of x (1, H, ...) that `numbers` names; their
    gradients go back by `inverse`. exists, existed: which of the result, and of x, there are, the others are zeros;
    None: all of them.

    Args:
        name: of the function.
        operation: its name in sentences.
    """

    class Moved(Function):
        @staticmethod
        def forward(
            x: Tensor,
            numbers: Tensor,
            inverse: Tensor,
            exists: Tensor | None,
            existed: Tensor | None,
        ) -> Tensor:
            return _moved(x, numbers, exists)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, _, ctx.inverse, _, ctx.existed = inputs

        @staticmethod
        @differentiable_once(operation)
        def backward(ctx, grad: Tensor):
            return _moved(grad, ctx.inverse, ctx.existed), None, None, None, None

    return named(name, Moved)


def _moved(x: Tensor, numbers: Tensor, exists: Tensor | None) -> Tensor:
    x = x.index_select(2, numbers)
    # Not in place: torch.compile of PyTorch 2.11 loses what a backward writes into a tensor of its own.
    return x if exists is None else x.where(exists.view(-1, *[1] * (x.dim() - 3)), 0)
