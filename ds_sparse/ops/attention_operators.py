"""The kernels of `block_sparse_attention` as operators: what they are called with, and what they return when traced.

Each takes the lists of an index. Its twin, `layout_attention_*`, takes a `MasterLayout` as text and finds the index
when it runs: this is what compiled and exported graphs hold, for any length.
"""

from __future__ import annotations

import torch

from .._ops import add_op_namespace_prefix, ops
from ..index import BlockIndex
from ..index.tile_sizes import HOPPER_TILE, TILE
from ..index.tiles import Tiles
from ..master_layout import MasterLayout

LAYOUT_OPERATORS = ("layout_attention_forward", "layout_attention_backward", "layout_attention_bias_backward")


def attention_forward(index: BlockIndex | MasterLayout, *call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """output, lse and the saved statistics of rows: `block_attention_forward` without the arguments of the index."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_forward(*call, index.text)
    *tensors, scale, causal, dropout_p = call
    tiles = index.tiles("rows", _tile(index, call[0]))
    return ops.block_attention_forward(
        *tensors, *_lists(tiles), index.layout_heads, index.block, tiles.tile, scale, causal, dropout_p
    )


def attention_backward(index: BlockIndex | MasterLayout, *call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, by `block_attention_backward`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_backward(*call, index.text)
    *tensors, scale, causal, dropout_p, deterministic = call
    tile = _tile(index, tensors[2])
    lists = (*_lists(index.tiles("rows", tile)), *_lists(index.tiles("columns", tile)))
    return ops.block_attention_backward(
        *tensors, *lists, index.layout_heads, index.block, tile, scale, causal, dropout_p, deterministic
    )


def attention_bias_backward(index: BlockIndex | MasterLayout, *call) -> torch.Tensor:
    """The gradient of rpe, by `block_attention_bias_backward`."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_bias_backward(*call, index.text)
    *tensors, scale, causal, dropout_p, shape = call
    return ops.block_attention_bias_backward(
        *tensors, *_lists(index.row_tiles), index.layout_heads, index.block, TILE, scale, causal, dropout_p, shape
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, and of what is added to scores where it has not the inputs' own."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lists(tiles: Tiles) -> tuple[torch.Tensor, ...]:
    return tiles.lines, tiles.entries, tiles.units, tiles.cuts


def _tile(index: BlockIndex, query: torch.Tensor) -> int:
    """The height of the tiles whose kernels serve a call best: Hopper's own are for 16 bits and common head sizes."""
    serves = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 128
    return HOPPER_TILE if serves and index.has_tiles(HOPPER_TILE) else TILE


def _empty_as(x: torch.Tensor) -> torch.Tensor:
    """What a kernel returns beside x: heads inside tokens in memory where x has them so."""
    batch, heads, tokens, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
    return x.new_empty(x.shape)


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
_operators.define(f"layout_attention_bias_backward({_SAVED}, SymInt[] shape, str layout) -> Tensor")


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
    return attention_bias_backward(_index(text, given[2], given[-3]), *given)


def _index(text: str, query: torch.Tensor, causal: bool) -> BlockIndex:
    return MasterLayout.read(text).index(query.shape[2], query.device, causal)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_forward"))
@torch.library.register_fake(add_op_namespace_prefix("layout_attention_forward"))
def _(query, *_):
    shape, dtype = query.shape[:3], _wide(query.dtype)
    return _empty_as(query), query.new_empty(shape, dtype=dtype), query.new_empty((*shape, 2), dtype=dtype)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_backward"))
@torch.library.register_fake(add_op_namespace_prefix("layout_attention_backward"))
def _(grad_output, grad_lse, query, key, value, *_):
    return _empty_as(query), _empty_as(key), _empty_as(value)


@torch.library.register_fake(add_op_namespace_prefix("block_attention_bias_backward"))
def _(grad_output, grad_lse, query, *more):
    return query.new_empty(more[-1], dtype=_wide(query.dtype))


@torch.library.register_fake(add_op_namespace_prefix("layout_attention_bias_backward"))
def _(grad_output, grad_lse, query, *more):
    return query.new_empty(more[-2], dtype=_wide(query.dtype))
