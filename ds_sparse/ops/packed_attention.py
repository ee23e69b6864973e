"""Attention over documents packed in one row, of which none sees another: what `block_sparse_attention` does with
`cu_seqlens`, with a `PackedIndex`, and with nested tensors.

On a Hopper GPU kernels read documents where they lie. Elsewhere operands are copied, so that each document begins with
a whole block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import choose, readable
from ..index import BlockIndex, PackedIndex, WindowIndex
from ..index.lookup import packed_index_of, row_index_of
from ..index.tiles import SIDES
from ._autograd import Function, differentiable_once
from .attention_function import attend, attention_function
from .call import AttentionCall
from .operands import call_on, check_heads, distinct_when_traced, lists_of_tiles
from .packed_operands import Packed, check_row, check_tokens, known_twice
from .window_attention import attend_in_window, fitting_window


def packed_attention(
    call: AttentionCall,
    row: Packed,
    layout: Tensor | BlockIndex | PackedIndex,
    document_layout: str,
    block: int | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_sparse_attention` of packed documents, of a checked call of a row.

    Raises:
        TypeError, ValueError: what does not fit, in a sentence.
    """
    query, key, value, causal, as_given = call.query, call.key, call.value, call.causal, row.as_given
    check_row(query, key, value)
    if document_layout == "row":
        if return_lse or call.dropout_p:
            raise ValueError(
                "return_lse and dropout_p are for document_layout='own'; leave them out with document_layout='row'."
            )
        of_row = _row_index(layout, row.cu_seqlens, block, query, causal)
        check_heads(of_row.blocks, query, key)
        return as_given(attend_in_window(call, fitting_window(of_row, query)))
    index = _own_index(layout, row, block, query)
    check_heads(index, query, key)
    if call.sinks is None and is_read_in_place(index, query, call.scale, call.dropout_p):
        query, key, value = distinct_when_traced(query, key, value)
        output, lse = attention_in_place(query, key, value, index, call.scale, causal)
    else:
        there = index.tokens_of, index.aligned, index.exists[0], None
        query, key, value = (_Moved.apply(x, *there) for x in (query, key, value))
        call = call._replace(query=query, key=key, value=value, key_padding_mask=index.exists)
        output, lse = attend(call, index.causal_blocks(causal))
        output = _back(output, index)
    return (as_given(output), as_given(_back(lse, index))) if return_lse else as_given(output)


def _back(x: Tensor, index: PackedIndex) -> Tensor:
    """Results by aligned numbers, (1, H, N * block, ...), as those of the row."""
    return _Moved.apply(x, index.aligned, index.tokens_of, None, index.exists[0])


def goes_by_places(name: str) -> str:
    """The sentence for an option that packed documents have not."""
    return (
        f"{name} is given for packed documents, and goes by places in a row; leave it out (padding too: packed "
        "documents have none), or call once for each document."
    )


def _own_index(layout: Tensor | BlockIndex | PackedIndex, row: Packed, block: int | None, query: Tensor) -> PackedIndex:
    """The index that is given, or that of the layout and the documents, after a check that it fits the query."""
    if not isinstance(layout, PackedIndex):
        assert row.cu_seqlens is not None, "or the row would not be packed"
        layout = packed_index_of(layout, row.cu_seqlens, block, query.device)
    elif row.is_nested:
        raise ValueError(known_twice("A PackedIndex"))
    elif row.cu_seqlens is not None:
        raise ValueError("A PackedIndex is given, and cu_seqlens besides; it was built with them, so leave them out.")
    elif block not in (None, layout.block):
        raise ValueError(f"A PackedIndex of blocks of {layout.block} is given, and block={block}; leave block out.")
    check_tokens(layout.tokens, query)
    if layout.device != query.device:
        raise ValueError(
            f"The PackedIndex is on {layout.device} and query on {query.device}; pass index.to({str(query.device)!r})."
        )
    return layout.ready()


def _row_index(
    layout: Tensor | BlockIndex | PackedIndex,
    cu_seqlens: Tensor | None,
    block: int | None,
    query: Tensor,
    causal: bool,
) -> WindowIndex:
    """The index of a row's layout, cut at the borders of documents."""
    if isinstance(layout, PackedIndex):
        raise ValueError("A PackedIndex is for document_layout='own'; give the row's layout and cu_seqlens.")
    assert cu_seqlens is not None, "or the row would not be packed"
    return row_index_of(layout, cu_seqlens, block, query.shape[2], causal, query.device)


def _moved(x: Tensor, numbers: Tensor, exists: Tensor | None) -> Tensor:
    x = x.index_select(2, numbers)
    # Not in place: torch.compile of PyTorch 2.11 loses what a backward writes into a tensor of its own.
    return x if exists is None else x.where(exists.view(-1, *[1] * (x.dim() - 3)), 0)


class _Moved(Function):
    """The tokens of x (1, H, ...) that `numbers` names; their gradients go back by `inverse`. exists, existed: which of
    the result, and of x, there are, the others are zeros; None: all of them."""

    @staticmethod
    def forward(
        x: Tensor,
        numbers: Tensor,
        inverse: Tensor,
        exists: Tensor | None,
        existed: Tensor | None,
    ) -> Tensor:
        return _moved(x, numbers, exists)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.inverse, _, ctx.existed = inputs

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad: Tensor):
        return _moved(grad, ctx.inverse, ctx.existed), None, None, None, None


LEAST_SCALE = 1e-6
"""The kernels scale differences of scores in the exponent, which a factor that is not well above 0 does not allow."""


def is_read_in_place(index: PackedIndex, query: Tensor, scale: float, dropout_p: float) -> bool:
    """True where a kernel reads these documents, (1, H, T, D), where they lie."""
    if scale <= LEAST_SCALE or dropout_p > 0:
        return False
    return choose("block_sparse_attention", call_on(index, query)).name == "hopper"


def attention_in_place(
    query: Tensor, key: Tensor, value: Tensor, index: PackedIndex, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output (1, H, T, D), and lse (1, H, N * block) by aligned numbers, as of `block_sparse_attention`."""
    depth = query.shape[-1]
    output, lse, _ = _PackedAttention.apply(
        readable(query), readable(key), readable(value), *[None] * 5, index, (scale, causal)
    )
    return output[..., :depth] if depth % 8 else output, lse


def _run(index, query, key, value, bias, key_bias, attn_mask, seed, scale, causal):
    tile = choose("block_sparse_attention", call_on(index, query)).tile(index.block)
    return ops.packed_attention_forward(
        query, key, value, index.spans, index.tile_spans("rows", tile, causal),
        *lists_of_tiles(index.tiles("rows", tile, causal)), index.layout_heads, index.block, scale, causal, True,
    )  # fmt: skip


def _gradients(index, *call, wanted, forced):
    *saved, _, _, _, _, scale, causal = call
    tile = choose("block_sparse_attention", call_on(index, saved[2]), "hopper").tile(index.block)
    grads = ops.packed_attention_backward(
        *saved, index.spans, *(index.tile_spans(side, tile, causal) for side in SIDES),
        *(x for side in SIDES for x in lists_of_tiles(index.tiles(side, tile, causal))),
        index.layout_heads, index.block, scale, causal, torch.are_deterministic_algorithms_enabled(), True,
    )  # fmt: skip
    return *grads, None


_PackedAttention = attention_function("_PackedAttention", "block_sparse_attention", _run, _gradients)
