"""What the autograd functions of attention share, by pairs of tokens (rpe) or by distance: results, what is saved, and
gradients. `bias` is the operand of the one or the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..dispatch import forced_implementation
from .operands import readable
from .sinks import grad_of_sinks, with_sinks

Gradients = tuple[Tensor | None, ...]


def results_of(
    forward: Callable, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, *call
) -> tuple[Tensor, Tensor, Tensor]:
    """output, lse and the saved statistics of rows. `forward` takes the index, then the operands but for sinks."""
    key_bias, attn_mask, seed, index, *numbers = call
    output, lse, rows = forward(index, query, key, value, bias, key_bias, attn_mask, seed, *numbers)
    return (output, lse, rows) if sinks is None else with_sinks(output, rows, sinks)


def save(ctx, inputs: tuple, results: tuple[Tensor, Tensor, Tensor]) -> None:
    """A function's setup_context."""
    *tensors, ctx.index, ctx.scale, ctx.causal, ctx.dropout_p = inputs
    output, _, rows = results
    ctx.forced = forced_implementation()
    ctx.mark_non_differentiable(rows)
    ctx.save_for_backward(output, rows, *tensors)
    ctx.set_materialize_grads(False)


def gradients_of(
    backward: Callable, bias_backward: Callable, ctx, grad_output: Tensor | None, grad_lse: Tensor | None
) -> Gradients:
    """One for each of the function's inputs, by two operators: of query, key and value, and of the bias."""
    output, rows, query, key, value, bias, sinks, key_bias, attn_mask, seed = ctx.saved_tensors
    grad_output = torch.zeros_like(output) if grad_output is None else readable(grad_output)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    saved = (grad_output, grad_lse, query, key, value, output, rows, bias, key_bias, attn_mask, seed)
    numbers = (ctx.scale, ctx.causal, ctx.dropout_p)
    grads: Gradients = (None, None, None)
    grad_bias = grad_sinks = None
    if any(ctx.needs_input_grad[:3]):
        deterministic = torch.are_deterministic_algorithms_enabled()
        grads = backward(ctx.index, *saved, *numbers, deterministic, forced=ctx.forced)
    if ctx.needs_input_grad[3]:
        grad_bias = bias_backward(ctx.index, *saved, *numbers).to(bias.dtype)
    if ctx.needs_input_grad[4]:
        grad_sinks = grad_of_sinks(grad_output, grad_lse, output, rows, sinks)
    return *grads, grad_bias, grad_sinks, *(None,) * 7
