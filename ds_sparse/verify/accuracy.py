"""Accuracy: outputs and gradients have to be as near to float64 as plain PyTorch's are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ERROR_ALLOWED = 4.0
"""Our RMS error may be this many times that of plain PyTorch at the same precision: sums run in another order."""


def output_and_gradients(call: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output of a call, and the gradients of its inputs."""
    return results_and_gradients(lambda *leaves: (call(*leaves),), inputs, [grad])


def results_and_gradients(
    call: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """The same of a call with several results."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = call(*leaves)
    return [x.detach() for x in (*results, *torch.autograd.grad(results, leaves, grads))]


def require_as_accurate(
    what: str,
    ours: Tensor,
    plain: Tensor,
    exact: Tensor,
    parts: int = 1,
    terms: Tensor | None = None,
    least: float = 0.0,
) -> None:
    """Compares RMS errors, each of `parts` equal parts along the first dimension by itself: a mistake in one block is
    not lost among the others.

    Besides, half a rounding of the exact values is allowed, since plain PyTorch may be exact, and of fp32 numbers as
    large as `terms`, the sums of the absolute terms, since what is summed up one after the other may cancel. `least` is
    the relative error that is allowed at any rate.

    Raises:
        ArithmeticError: an error more than `ERROR_ALLOWED` times that of plain PyTorch at ours' dtype.
    """

    def rms(x: Tensor) -> Tensor:
        return x.double().reshape(parts, -1).square().mean(1).sqrt()

    error = rms(ours - exact)
    allowed = ERROR_ALLOWED * rms(plain - exact) + torch.finfo(ours.dtype).eps / 2 * rms(exact)
    allowed = allowed.maximum(least * rms(exact))
    if terms is not None:
        allowed += torch.finfo(torch.float32).eps / 2 * rms(terms)
    if not bool((error <= allowed).all()):
        worst = int((error - allowed).nan_to_num(float("inf")).argmax())
        where = f", part {worst + 1} of {parts}," if parts > 1 else ""
        raise ArithmeticError(
            f"{what}{where} has an RMS error of {error[worst]:.2e}; plain PyTorch allows {allowed[worst]:.2e}."
        )
