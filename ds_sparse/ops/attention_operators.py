"""The kernels of `block_sparse_attention` as operators: what they are called with, and what they return when traced.

Each takes the lists of an index. Its twin, `layout_attention_*`, takes a `MasterLayout` as text and finds the index
when it runs: this is what compiled and exported graphs hold, for any length.
"""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix, ops
from ..dispatch import Implementation, choose
from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from .operands import call_on, empty_as, lists_of_tiles, wide_dtype

LAYOUT_OPERATORS = ("layout_attention_forward", "layout_attention_backward", "layout_attention_bias_backward")


def attention_forward(index: BlockIndex | MasterLayout, *call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """output, lse and the saved statistics of rows: `block_attention_forward` without the arguments of the index."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_forward(*call, index.text)
    *tensors, scale, causal, dropout_p = call
    chosen = implementation_for(index, call[0])
    tile = chosen.tile(index.block)
    return ops.block_attention_forward(
        *tensors, *lists_of_tiles(index.tiles("rows", tile)), index.layout_heads, index.block, tile, scale, causal,
        dropout_p, chosen.name,
    )  # fmt: skip


def attention_backward(
    index: BlockIndex | MasterLayout, *call, forced: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, by `block_attention_backward`. forced: as of `dispatch.choose`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_backward(*call, index.text)
    *tensors, scale, causal, dropout_p, deterministic = call
    chosen = implementation_for(index, tensors[2], forced)
    tile = chosen.tile(index.block)
    lists = (*lists_of_tiles(index.tiles("rows", tile)), *lists_of_tiles(index.tiles("columns", tile)))
    return ops.block_attention_backward(
        *tensors, *lists, index.layout_heads, index.block, tile, scale, causal, dropout_p, deterministic, chosen.name
    )


def attention_bias_backward(index: BlockIndex | MasterLayout, *call) -> torch.Tensor:
    """The gradient of rpe, by `block_attention_bias_backward`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_bias_backward(*call, index.text)
    *tensors, scale, causal, dropout_p = call
    rpe = tensors[7]
    tile = implementation_for(index, tensors[2], operation="gradient of rpe").tile(index.block)
    return ops.block_attention_bias_backward(
        *tensors, *lists_of_tiles(index.tiles("rows", tile)), index.layout_heads, index.block, tile, scale, causal,
        dropout_p, rpe.shape,
    )  # fmt: skip


def implementation_for(
    index: BlockIndex, query: torch.Tensor, forced: str | None = None, operation: str = "block_sparse_attention"
) -> Implementation:
    """The implementation that runs attention of a query (B, H, T, D) on a layout. forced: as of `dispatch.choose`."""
    return choose(operation, call_on(index, query), forced)


_SAVED = (
    "Tensor grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, Tensor rows, "
    "Tensor? rpe, Tensor? key_bias, Tensor? attn_mask, Tensor? dropout_seed, float scale, bool causal, float dropout_p"
)
_operators = torch.library.Library(ops.name, "FRAGMENT")
_operators.define(
    "layout_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? rpe, Tensor? key_bias, "
    "Tensor? attn_mask, Tensor? dropout_seed, float scale, bool causal, float dropout_p, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)
_operators.define(f"layout_attention_backward({_SAVED}, bool deterministic, str layout) -> (Tensor, Tensor, Tensor)")
_operators.define(f"layout_attention_bias_backward({_SAVED}, str layout) -> Tensor")


@torch.library.impl(_operators, "layout_attention_forward", "CompositeExplicitAutograd")
def _(query, *call):
    *given, text = call
    return attention_forward(_index(text, query, given[-2]), query, *given)


@torch.library.impl(_operators, "layout_attention_backward", "CompositeExplicitAutograd")
def _(*call):
    *given, text = call
    return attention_backward(_index(text, given[2], given[-3]), *given)


@torch.library.impl(_operators, "layout_attention_bias_backward", "CompositeExplicitAutograd")
def _(*call):
    *given, text = call
    return attention_bias_backward(_index(text, given[2], given[-2]), *given)


def _index(text: str, query: torch.Tensor, causal: bool) -> BlockIndex:
    return MasterLayout.read(text).index(query.shape[2], query.device, causal)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_forward"))
@torch.library.register_fake(add_op_namespace_prefix("layout_attention_forward"))
def fake_forward(query, *_):
    """Shapes and dtypes of output, lse and the saved statistics of rows."""
    shape, dtype = query.shape[:3], wide_dtype(query.dtype)
    return empty_as(query), query.new_empty(shape, dtype=dtype), query.new_empty((*shape, 2), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_backward"))
@torch.library.register_fake(add_op_namespace_prefix("layout_attention_backward"))
def _(grad_output, grad_lse, query, key, value, *_):
    return empty_as(query), empty_as(key), empty_as(value)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_bias_backward"))
def _(grad_output, grad_lse, query, *more):
    return query.new_empty(more[-1], dtype=wide_dtype(query.dtype))


@torch.library.register_fake(add_op_namespace_prefix("layout_attention_bias_backward"))
def _(grad_output, grad_lse, query, key, value, output, rows, rpe, *_):
    return rpe.new_empty(rpe.shape, dtype=wide_dtype(query.dtype))
