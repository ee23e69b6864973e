"""The kernels of attention on blocks as an autograd function, with what they are given of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import forced_implementation
from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from ._autograd import Function, differentiable_once
from .attention_operators import attention_backward, attention_bias_backward, attention_forward
from .call import AttentionCall
from .distance_gradient import distance_bias_backward
from .operands import as_added, distinct_when_traced, dropout_seed, key_bias_of, matrices, readable, wide_dtype
from .sinks import grad_of_sinks, with_sinks


def attend(call: AttentionCall, index: BlockIndex | MasterLayout) -> tuple[Tensor, Tensor]:
    """Runs a checked call on the blocks of an index that fits it.

    Returns:
        output (B, H, T, D), and lse (B, H, T).
    """
    query, key, value = call.query, call.key, call.value
    head_dim, keys, wide = query.shape[3], key.shape[2], wide_dtype(query.dtype)
    if query.numel() == 0:
        return results_of_nothing(call)
    padding, mask = call.key_padding_mask, call.attn_mask
    key_bias = None if padding is None else key_bias_of(padding, wide, keys, query.is_cuda)
    mask = None if mask is None else matrices(mask, query.dtype, keys)
    seed = dropout_seed(query.device) if call.dropout_p > 0 else None
    query, key, value = distinct_when_traced(query, key, value)
    output, lse, _ = _Attention.apply(
        readable(query), readable(key), readable(value), _bias(call), call.sinks, key_bias, mask, seed, index,
        call.scale, call.causal, float(call.dropout_p),
    )  # fmt: skip
    return output[..., :head_dim] if head_dim % 8 else output, lse


def results_of_nothing(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns the results of a call without a batch or heads. Sums of nothing keep what was given in the graph."""
    given = (call.key, call.value, call.rpe, call.distance_bias, call.sinks)
    output = call.query + sum(x.sum() for x in given if x is not None)
    return output, output.to(wide_dtype(output.dtype)).sum(-1)


def _bias(call: AttentionCall) -> Tensor | None:
    """rpe as kernels take it: of pairs of tokens, (B or 1, H or 1, T, S), or by distance, (H or 1, 2M - 1)."""
    rpe, by_distance, dtype = call.rpe, call.distance_bias, call.query.dtype
    wide, tokens, keys = wide_dtype(dtype), call.query.shape[2], call.key.shape[2]
    if by_distance is not None:
        return by_distance if by_distance.dtype in (dtype, wide) else as_added(by_distance, wide)
    if rpe is None:
        return None
    if rpe.shape[-2] != tokens or rpe.shape[-1] != keys:
        # PyTorch sums its gradient over what is repeated, in the dtype that it is given in here.
        rpe = rpe.to(torch.promote_types(rpe.dtype, wide))
    return matrices(rpe, dtype, keys).expand(-1, -1, tokens, -1)


class _Attention(Function):
    @staticmethod
    def forward(query, key, value, bias, sinks, key_bias, attn_mask, seed, index, scale, causal, dropout_p):
        output, lse, rows = attention_forward(
            index, query, key, value, bias, key_bias, attn_mask, seed, scale, causal, dropout_p
        )
        return (output, lse, rows) if sinks is None else with_sinks(output, rows, sinks)

    @staticmethod
    def setup_context(ctx, inputs, results):
        *tensors, ctx.index, ctx.scale, ctx.causal, ctx.dropout_p = inputs
        output, _, rows = results
        ctx.forced = forced_implementation()
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(output, rows, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None, _):
        output, rows, query, key, value, bias, sinks, key_bias, attn_mask, seed = ctx.saved_tensors
        grad_output = torch.zeros_like(output) if grad_output is None else readable(grad_output)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        saved = (grad_output, grad_lse, query, key, value, output, rows, bias, key_bias, attn_mask, seed)
        numbers = (ctx.scale, ctx.causal, ctx.dropout_p)
        grads: tuple[Tensor | None, ...] = (None, None, None)
        grad_bias = grad_sinks = None
        if any(ctx.needs_input_grad[:3]):
            deterministic = torch.are_deterministic_algorithms_enabled()
            grads = attention_backward(ctx.index, *saved, *numbers, deterministic, forced=ctx.forced)
        if ctx.needs_input_grad[3]:
            bias_backward = distance_bias_backward if bias.dim() == 2 else attention_bias_backward
            grad_bias = bias_backward(ctx.index, *saved, *numbers).to(bias.dtype)
        if ctx.needs_input_grad[4]:
            grad_sinks = grad_of_sinks(grad_output, grad_lse, output, rows, sinks)
        return *grads, grad_bias, grad_sinks, *(None,) * 7
