"""The kernels of attention with `distance_bias` as operators: those of `attention_operators` with distances in place
of rpe, and the gradient of distances.

Queries and the rows of the index are in the opposite order. Number n of the distances is then the bias of every query i
and key j with i + j = n, so that a view of them, whose strides along both are 1, is the matrix that kernels read: no
matrix of tokens by tokens is in memory, and kernels need not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from .attention_operators import attention_backward, attention_forward
from .distance_gradient import Blocks, gradient_of_distances
from .operands import empty_as, wide_dtype

DISTANCE_OPERATORS = (
    "distance_bias_backward",
    "layout_distance_forward",
    "layout_distance_backward",
    "layout_distance_bias_backward",
)


def distance_forward(
    index: BlockIndex | MasterLayout, query: Tensor, key: Tensor, value: Tensor, distances: Tensor, *call
) -> tuple[Tensor, Tensor, Tensor]:
    """output, lse and the saved statistics of rows, in the order of the queries.

    Args:
        index: reversed; a `MasterLayout` as it is.
        query, key, value: (B, H, T, D), T in whole blocks and in the opposite order.
        distances: (H or 1, T + S - 1), fp32 or wider.
        call: key_bias, attn_mask, dropout_seed, scale, whether the master layout is cut for causal attention (the
            distances have that already), dropout_p.
    """
    if isinstance(index, MasterLayout):
        return ops.layout_distance_forward(query, key, value, distances, *call, index.text)
    *tensors, scale, _, dropout_p = call
    return attention_forward(index, query, key, value, _by_pairs(distances, key), *tensors, scale, False, dropout_p)


def distance_backward(
    index: BlockIndex | MasterLayout, *call, forced: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. forced: as of `dispatch.choose`."""
    if isinstance(index, MasterLayout):
        return ops.layout_distance_backward(*call, index.text)
    *before, distances, key_bias, attn_mask, seed, scale, _, dropout_p, deterministic = call
    rpe = _by_pairs(distances, before[3])
    return attention_backward(
        index, *before, rpe, key_bias, attn_mask, seed, scale, False, dropout_p, deterministic, forced=forced
    )


def distance_bias_backward(index: BlockIndex | MasterLayout, *call) -> Tensor:
    """The gradient of distances."""
    if isinstance(index, MasterLayout):
        return ops.layout_distance_bias_backward(*call, index.text)
    *tensors, scale, _, dropout_p = call
    return ops.distance_bias_backward(
        *tensors, scale, dropout_p, index.row_offsets, index.row_columns, index.row_lengths, index.layout_heads,
        index.block,
    )  # fmt: skip


def _by_pairs(distances: Tensor, key: Tensor) -> Tensor:
    """A view of distances as rpe, (1, H or 1, T, S), whose strides along queries and keys are 1."""
    return distances.unfold(-1, key.shape[2], 1).unsqueeze(0)


_SAVED = (
    "Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor rows, "
    "Tensor distances, Tensor? key_bias, Tensor? attn_mask, Tensor? dropout_seed, float scale"
)
_operators = torch.library.Library(ops.name, "FRAGMENT")
_operators.define(
    f"distance_bias_backward({_SAVED}, float dropout_p, Tensor row_offsets, Tensor row_columns, int[] row_lengths, "
    "int layout_heads, int block) -> Tensor"
)
_operators.define(
    "layout_distance_forward(Tensor query, Tensor key, Tensor value, Tensor distances, Tensor? key_bias, "
    "Tensor? attn_mask, Tensor? dropout_seed, float scale, bool causal, float dropout_p, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)
_operators.define(
    f"layout_distance_backward({_SAVED}, bool causal, float dropout_p, bool deterministic, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)
_operators.define(f"layout_distance_bias_backward({_SAVED}, bool causal, float dropout_p, str layout) -> Tensor")


@torch.library.impl(_operators, "distance_bias_backward", "CompositeExplicitAutograd")
def _(*call):
    given: Any = (*call[:-5], Blocks(*call[-5:]))
    return gradient_of_distances(*given)


@torch.library.impl(_operators, "layout_distance_forward", "CompositeExplicitAutograd")
def _(query, *call):
    *given, text = call
    return distance_forward(_index(text, query, given[-2]), query, *given)


@torch.library.impl(_operators, "layout_distance_backward", "CompositeExplicitAutograd")
def _(*call):
    *given, text = call
    return distance_backward(_index(text, given[2], given[-3]), *given)


@torch.library.impl(_operators, "layout_distance_bias_backward", "CompositeExplicitAutograd")
def _(*call):
    *given, text = call
    return distance_bias_backward(_index(text, given[2], given[-2]), *given)


def _index(text: str, query: Tensor, causal: bool) -> BlockIndex:
    return MasterLayout.read(text).index(query.shape[2], query.device, causal).reversed()


@torch.library.register_fake(add_op_namespace_prefix("layout_distance_forward"))
def _(query, *_):
    shape, dtype = query.shape[:3], wide_dtype(query.dtype)
    return empty_as(query), query.new_empty(shape, dtype=dtype), query.new_empty((*shape, 2), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("layout_distance_backward"))
def _(grad_output, grad_lse, query, key, value, *_):
    return empty_as(query), empty_as(key), empty_as(value)


@torch.library.register_fake(add_op_namespace_prefix("distance_bias_backward"))
@torch.library.register_fake(add_op_namespace_prefix("layout_distance_bias_backward"))
def _(grad_output, grad_lse, query, key, value, output, rows, distances, *_):
    return distances.new_empty(distances.shape)
