"""Attention over token pairs in tiles, on a Hopper GPU: `sparse_attn` for lists that `TokenTiles` can hold."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..index.token_tiles import TokenTiles
from ._autograd import Function, differentiable_once
from .attention_operators import fake_forward
from .operands import empty_as, lists_of_tiles, readable


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, tiles: TokenTiles, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse, as of `sparse_attn`."""
    depth = q.shape[-1]
    output, lse, _ = _TiledAttention.apply(readable(q), readable(k), readable(v), tiles, scale)
    return output[..., :depth] if depth % 8 else output, lse


class _TiledAttention(Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, tiles: TokenTiles, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        return ops.token_tiles_forward(q, k, v, *lists_of_tiles(tiles.rows), tiles.row_pairs, tiles.layout_heads, scale)

    @staticmethod
    def setup_context(ctx, inputs, results):
        q, k, v, ctx.tiles, ctx.scale = inputs
        output, _, rows = results
        ctx.mark_non_differentiable(rows)
        ctx.save_for_backward(q, k, v, output, rows)
        ctx.set_materialize_grads(False)

    @staticmethod
    @differentiable_once("sparse_attn")
    def backward(ctx, grad_output: Tensor | None, grad_lse: Tensor | None, _):
        q, k, v, output, rows = ctx.saved_tensors
        tiles = ctx.tiles
        grad_output = torch.zeros_like(output) if grad_output is None else readable(grad_output)
        grads = ops.token_tiles_backward(
            grad_output, None if grad_lse is None else grad_lse.contiguous(), q, k, v, output, rows,
            *lists_of_tiles(tiles.rows), tiles.row_pairs, *lists_of_tiles(tiles.columns), tiles.column_pairs,
            tiles.layout_heads, ctx.scale, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return *grads, None, None


torch.library.register_fake(add_op_namespace_prefix("token_tiles_forward"), fake_forward)


@torch.library.register_fake(add_op_namespace_prefix("token_tiles_backward"))
def _(
    grad_output, grad_lse, query, key, value, output, rows, row_lines, row_entries, row_units, row_cuts, row_pairs,
    column_lines, column_entries, column_units, column_cuts, column_pairs, layout_heads, scale, deterministic,
):  # fmt: skip
    return empty_as(query), empty_as(key), empty_as(value)
