"""Attention with a bias by distance: `block_sparse_attention` with `distance_bias`, in memory linear in tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from ._autograd import Function, differentiable_once
from ._library import DTYPES
from .attention_function import gradients_of, results_of, save
from .distance_operators import distance_backward, distance_bias_backward, distance_forward
from .operands import as_added, broadcasts, readable, wide_dtype


def check_distance_bias(bias: Tensor, query: Tensor, keys: int, last: int, rpe: Tensor | None) -> None:
    """Raises ValueError unless it has the distances of queries up to the position `last` and so many keys."""
    if rpe is not None:
        raise ValueError(
            "rpe and distance_bias are both given; rpe is a matrix of tokens by tokens already, so add to it what "
            "distance_bias has for each pair, ds_sparse.reference.bias_of_pairs(distance_bias, tokens, keys)."
        )
    if bias.device != query.device:
        raise ValueError(f"distance_bias is on {bias.device} and query on {query.device}; move it there.")
    if bias.dtype not in DTYPES:
        raise ValueError(f"distance_bias is {bias.dtype}; it has to be float16, bfloat16, float32 or float64.")
    heads, least = query.shape[1], max(last + 1, keys)
    if bias.dim() != 2 or not broadcasts(bias.shape[:1], (heads,)) or bias.shape[1] % 2 == 0:
        raise ValueError(
            f"distance_bias has shape {tuple(bias.shape)}; it has to be ({heads}, 2 * M - 1) or (1, 2 * M - 1), that "
            f"of the distance 0 in the middle, with M at least {least}."
        )
    if bias.shape[1] < 2 * least - 1:
        raise ValueError(
            f"distance_bias has {bias.shape[1]} distances, up to {bias.shape[1] // 2}, and there are queries up to the "
            f"position {last} and {keys} keys; give {2 * least - 1} or more, from -{least - 1} to {least - 1}."
        )


def shifted(bias: Tensor, by: int) -> Tensor:
    """A bias by distance whose middle is the distance `by` of the given one."""
    return pad(bias, (-by, by)) if by else bias


def as_matrix(bias: Tensor, tokens: int, keys: int) -> Tensor:
    """A bias by distance (H or 1, 2M - 1) as one of pairs of tokens, (H or 1, T, S)."""
    middle = bias.shape[1] // 2 + 1
    return pad(bias, (tokens - middle, keys - middle)).unfold(-1, keys, 1).flip(1)


def attention_by_distance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
    key_bias: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    index: BlockIndex | MasterLayout,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output and lse; arguments as `block_sparse_attention` has made them for the kernels.

    Raises:
        RuntimeError: the index in the opposite order is not there yet, and torch.compile traces or a CUDA graph is
            captured.
    """
    tokens, keys = query.shape[2], key.shape[2]
    rows = (tokens + index.block - 1) // index.block * index.block
    # In a graph for any length it is not asked whether there is something to fill.
    is_short = torch.compiler.is_compiling() or rows > tokens

    def turned(x: Tensor) -> Tensor:
        """Queries in the opposite order, behind what fills their last block."""
        return (pad(x, (0, 0, 0, rows - tokens)) if is_short else x).flip(-2)

    if attn_mask is not None and attn_mask.shape[2] > 1:
        attn_mask = turned(attn_mask)
    if isinstance(index, BlockIndex):
        index = index.reversed()
    output, lse, _ = _AttentionByDistance.apply(
        readable(turned(query)), readable(key), readable(value), _distances(bias, query.dtype, rows, keys, causal),
        sinks, key_bias, attn_mask, seed, index, scale, causal, dropout_p, rows - tokens,
    )  # fmt: skip
    return output.flip(2)[:, :, :tokens], lse.flip(2)[:, :, :tokens]


def _distances(bias: Tensor, dtype: torch.dtype, rows: int, keys: int, causal: bool) -> Tensor:
    """The bias for so many queries in the opposite order, (H or 1, rows + keys - 1): of i and j number i + j."""
    middle = bias.shape[1] // 2 + 1
    wide = wide_dtype(dtype)
    wider = bias.to(wide) if bias.dtype in (dtype, wide) else as_added(bias, wide)  # kernels know finite lows
    distances = pad(wider, (rows - middle, keys - middle))
    if causal:
        ahead = torch.arange(rows + keys - 1, device=bias.device) >= rows
        distances = distances.masked_fill(ahead, float("-inf"))
    return distances.contiguous()


class _AttentionByDistance(Function):
    @staticmethod
    def forward(query, key, value, distances, sinks, key_bias, attn_mask, seed, index, scale, causal, dropout_p, fill):
        tensors = (query, key, value, distances, sinks, key_bias, attn_mask, seed)
        output, lse, rows = results_of(distance_forward, *tensors, index, scale, causal, dropout_p)
        # Backward takes what fills the last block for rows with nothing left: what they see may be NaN.
        is_fill = torch.arange(rows.shape[2], device=rows.device)[:, None] < fill
        return output, lse, rows.masked_fill(is_fill, 0)

    @staticmethod
    def setup_context(ctx, inputs, results):
        save(ctx, inputs[:-1], results)

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None, _):
        return *gradients_of(distance_backward, distance_bias_backward, ctx, grad_output, grad_lse), None
