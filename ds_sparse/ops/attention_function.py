"""Attention by kernels that save two numbers of each row: their autograd function, and those on blocks, with what they
are given of a call.

On blocks they take the lists of an index; where a graph is traced, operators take a `MasterLayout` as text and find the
index when they run: this is what compiled and exported graphs hold, for any length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import choose, forced_implementation, readable
from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from ..index.tiles import SIDES
from ._autograd import Function, differentiable_once, named
from .call import AttentionCall
from .distance_gradient import distance_bias_backward
from .operands import (
    as_added,
    call_on,
    distinct_when_traced,
    dropout_seed,
    key_bias_of,
    lists_of_tiles,
    matrices,
    wide_dtype,
)
from .remembered import Walk
from .sinks import grad_of_sinks, with_sinks


def attention_function(
    name: str,
    operation: str,
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
    gradients: Callable[..., tuple[Tensor | None, ...]],
    read: Callable[[Tensor], Tensor] = readable,
) -> Any:
    """Makes the autograd function of an operation: of query, key, value, bias, sinks, key_bias, attn_mask, seed, index
    and a tuple of numbers it gives output, lse and rows.

    Args:
        name: of the function.
        operation: its name in sentences.
        run: gives output, lse and rows of the index, its walk, if it is known, the numbers, and the operands but for
            sinks.
        gradients: gives those of query, key, value and bias, of the index, its walk, the numbers, which gradients are
            wanted, and the implementation that was forced; the gradients of output and lse; query, key, value, output
            and rows; and the other operands.
        read: makes the output's gradient as kernels read it.
    """

    class Attention(Function):
        @staticmethod
        def forward(query, key, value, bias, sinks, key_bias, attn_mask, seed, index, walk, numbers):
            output, lse, rows = run(index, walk, numbers, query, key, value, bias, key_bias, attn_mask, seed)
            return (output, lse, rows) if sinks is None else with_sinks(output, rows, sinks)

        @staticmethod
        def setup_context(ctx, inputs, results):
            output, _, rows = results
            ctx.how = *inputs[8:], forced_implementation()
            ctx.mark_non_differentiable(rows)
            ctx.save_for_backward(output, rows, *inputs[:8])
            ctx.set_materialize_grads(False)

        @staticmethod
        @differentiable_once(operation)
        def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None, _):
            output, rows, query, key, value, bias, sinks, *masks = ctx.saved_tensors
            grad_output = torch.zeros_like(output) if grad_output is None else read(grad_output)
            grad_lse = None if grad_lse is None else grad_lse.contiguous()
            saved = grad_output, grad_lse, query, key, value, output, rows, bias, *masks
            (index, walk, numbers, forced), wanted = ctx.how, ctx.needs_input_grad
            grads = gradients(index, walk, numbers, wanted, forced, *saved)
            grad_sinks = grad_of_sinks(grad_output, grad_lse, output, rows, sinks) if wanted[4] else None
            return *grads, grad_sinks, None, None, None, None, None, None

    return named(name, Attention)


def walk_of(index: BlockIndex, dense: Tensor, forced: str | None = None) -> Walk:
    """The walk of a call on dense operands. forced: as of `dispatch.choose`."""
    chosen = choose("block_sparse_attention", call_on(index, dense), forced)
    tile = chosen.tile(index.block)
    tiles = [index.tiles(side, tile) for side in SIDES]
    rows, columns = map(lists_of_tiles, tiles)
    sizes = index.heads_of_sequence, index.block, tile
    ends = chosen.name, index.bounded, index.by_sequence
    return Walk((*rows, *sizes), (*rows, *columns, *sizes), ends, tiles[0].lines_differ)


def attend(call: AttentionCall, index: BlockIndex | MasterLayout, walk: Walk | None = None) -> tuple[Tensor, Tensor]:
    """Runs a checked call on the blocks of an index that fits it.

    Args:
        walk: that of a call which is remembered.

    Returns:
        output (B, H, T, D), and lse (B, H, T).
    """
    query, key, value, scale, causal, padding, mask, rpe, by_distance, sinks, dropout_p, softcap = call
    in_place = walk is not None and walk.in_place
    if not in_place:
        if query.numel() == 0:
            return results_of_nothing(call)
        if walk is None and torch.compiler.is_compiling():
            query, key, value = distinct_when_traced(query, key, value)
        query, key, value = readable(query), readable(key), readable(value)
    bias = seed = None
    if padding is not None:
        padding = key_bias_of(padding, wide_dtype(query.dtype), key.shape[2], query.is_cuda)
    if mask is not None:
        mask = matrices(mask, query.dtype, key.shape[2])
    if rpe is not None or by_distance is not None:
        bias = _bias(call)
    if dropout_p > 0:
        seed = dropout_seed(query.device)
    apply = _Attention.apply if walk is None else walk.apply
    numbers = scale, causal, float(dropout_p), float(softcap)
    output, lse, _ = apply(query, key, value, bias, sinks, padding, mask, seed, index, walk, numbers)
    if not in_place and (head_dim := call.query.shape[3]) % 8:
        output = output[..., :head_dim]
    return output, lse


def results_of_nothing(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns the results of a call without a batch or heads. Sums of nothing keep what was given in the graph."""
    given = (call.key, call.value, call.rpe, call.distance_bias, call.sinks)
    output = call.query + sum(x.sum() for x in given if x is not None)
    return output, output.to(wide_dtype(output.dtype)).sum(-1)


def _bias(call: AttentionCall) -> Tensor:
    """rpe as kernels take it: of pairs of tokens, (B or 1, H or 1, T, S), or by distance, (H or 1, 2M - 1)."""
    rpe, by_distance, dtype = call.rpe, call.distance_bias, call.query.dtype
    wide, tokens, keys = wide_dtype(dtype), call.query.shape[2], call.key.shape[2]
    if by_distance is not None:
        return by_distance if by_distance.dtype in (dtype, wide) else as_added(by_distance, wide)
    assert rpe is not None, "or there would be no bias"
    if rpe.shape[-2] != tokens or rpe.shape[-1] != keys:
        # PyTorch sums its gradient over what is repeated, in the dtype that it is given in here.
        rpe = rpe.to(torch.promote_types(rpe.dtype, wide))
    return matrices(rpe, dtype, keys).expand(-1, -1, tokens, -1)


def attention_forward(index: BlockIndex | MasterLayout, *call) -> tuple[Tensor, Tensor, Tensor]:
    """output, lse and the saved statistics of rows: `block_attention_forward` without the arguments of the index."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_forward(*call[:10], index.text, *call[10:])
    return _run(index, walk_of(index, call[0]), call[7:], *call[:7])


def _run(index: Any, walk: Walk | None, numbers: tuple[Any, ...], *tensors):
    if walk is None:
        return attention_forward(index, *tensors, *numbers)
    index.ready()
    # Its only overload, which a call without `default` would look for.
    return ops.block_attention_forward.default(
        *tensors, *walk.rows, *numbers[:3], *walk.ends, walk.rows_differ, *numbers[3:]
    )


def attention_backward(
    index: BlockIndex | MasterLayout, *call, forced: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, by `block_attention_backward`. forced: as of `dispatch.choose`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_backward(*call[:15], index.text, *call[15:])
    return _run_backward(index, walk_of(index, call[2], forced), call[11:], *call[:11])


def _run_backward(index: BlockIndex, walk: Walk, numbers: tuple[Any, ...], *tensors):
    index.ready()
    return ops.block_attention_backward.default(*tensors, *walk.both, *numbers[:4], *walk.ends, *numbers[4:])


def attention_bias_backward(index: BlockIndex | MasterLayout, *call) -> Tensor:
    """The gradient of rpe, by `block_attention_bias_backward`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_bias_backward(*call, index.text)
    *tensors, scale, causal, dropout_p = call
    tile = choose("gradient of rpe", call_on(index, tensors[2])).tile(index.block)
    return ops.block_attention_bias_backward(
        *tensors, *lists_of_tiles(index.tiles("rows", tile)), index.heads_of_sequence, index.block, tile, scale, causal,
        dropout_p, tensors[7].shape, index.bounded, index.by_sequence,
    )  # fmt: skip


def _gradients(index: Any, walk: Walk | None, numbers: tuple[Any, ...], wanted: tuple[bool, ...], forced: str, *saved):
    grads: tuple[Tensor | None, ...] = (None, None, None)
    grad_bias, bias = None, saved[7]
    if any(wanted[:3]):
        of_three = *numbers[:3], torch.are_deterministic_algorithms_enabled(), numbers[3]
        if walk is None:
            grads = attention_backward(index, *saved, *of_three, forced=forced)
        else:
            grads = _run_backward(index, walk, of_three, *saved)
    if wanted[3]:
        bias_backward = distance_bias_backward if bias.dim() == 2 else attention_bias_backward
        grad_bias = bias_backward(index, *saved, *numbers[:3]).to(bias.dtype)
    return *grads, grad_bias


_Attention = attention_function("_Attention", "block_sparse_attention", _run, _gradients)


def remembered_walk(call: AttentionCall, index: BlockIndex) -> Walk:
    """The walk of calls like this one, which has been checked."""
    operands = call.query, call.key, call.value
    return walk_of(index, call.query).of_calls_like(_Attention, operands, call.rpe, call.distance_bias, call.sinks)
