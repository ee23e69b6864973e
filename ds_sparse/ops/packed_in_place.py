"""Attention over packed documents where they lie, on a Hopper GPU: elsewhere `packed_attention` makes copies of its
operands in which each document begins with a whole block."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..index import PackedIndex
from ..index.block import SIDES
from ._autograd import Function, differentiable_once
from .attention_operators import implementation_for
from .operands import empty_as, lists_of_tiles, readable, wide_dtype

LEAST_SCALE = 1e-6
"""The kernels scale differences of scores in the exponent, which a factor that is not well above 0 does not allow."""


def is_read_in_place(index: PackedIndex, query: Tensor, scale: float, dropout_p: float) -> bool:
    """Whether there is a kernel that reads these documents, (1, H, T, D), where they lie."""
    return scale > LEAST_SCALE and dropout_p == 0 and implementation_for(index.blocks, query).name == "hopper"


def attention_in_place(
    query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output (1, H, T, D), and lse (1, H, N * block) by aligned numbers, as of `block_sparse_attention`."""
    depth = query.shape[-1]
    output, lse, _ = _PackedAttention.apply(readable(query), readable(key), readable(value), index, scale, causal)
    return output[..., :depth] if depth % 8 else output, lse


class _PackedAttention(Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks = index.causal_blocks(causal)
        tile = implementation_for(blocks, query).tile(blocks.block)
        return ops.packed_attention_forward(
            query, key, value, index.spans, index.tile_spans("rows", tile, causal),
            *lists_of_tiles(blocks.tiles("rows", tile)), blocks.layout_heads, blocks.block, scale, causal,
        )  # fmt: skip

    @staticmethod
    def setup_context(ctx, inputs, results):
        query, key, value, ctx.index, ctx.scale, ctx.causal = inputs
        output, _, rows = results
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(query, key, value, output, rows)
        ctx.set_materialize_grads(False)

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None, _):
        query, key, value, output, rows = ctx.saved_tensors
        index, blocks = ctx.index, ctx.index.causal_blocks(ctx.causal)
        grad_output = torch.zeros_like(output) if grad_output is None else readable(grad_output)
        tile = implementation_for(blocks, query, "hopper").tile(blocks.block)
        grads = ops.packed_attention_backward(
            grad_output, None if grad_lse is None else grad_lse.contiguous(), query, key, value, output, rows,
            index.spans, *(index.tile_spans(side, tile, ctx.causal) for side in SIDES),
            *(x for side in SIDES for x in lists_of_tiles(blocks.tiles(side, tile))),
            blocks.layout_heads, blocks.block, ctx.scale, ctx.causal, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return *grads, None, None, None


@torch.library.register_fake(add_op_namespace_prefix("packed_attention_forward"))
def _(
    query, key, value, spans, row_spans, row_lines, row_entries, row_units, row_cuts, layout_heads, block, scale, causal
):  # fmt: skip
    shape, wide = (1, query.shape[1], spans.shape[0] * block), wide_dtype(query.dtype)
    return empty_as(query), query.new_empty(shape, dtype=wide), query.new_empty((*shape, 2), dtype=wide)


@torch.library.register_fake(add_op_namespace_prefix("packed_attention_backward"))
def _(
    grad_output, grad_lse, query, key, value, output, rows, spans, row_spans, column_spans, row_lines, row_entries,
    row_units, row_cuts, column_lines, column_entries, column_units, column_cuts, layout_heads, block, scale, causal,
    deterministic,
):  # fmt: skip
    return empty_as(query), empty_as(key), empty_as(value)
