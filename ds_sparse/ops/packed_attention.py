"""Attention over documents packed in one row, of which none sees another: what `block_sparse_attention` does with
`cu_seqlens`, with a `PackedIndex`, and with nested tensors.

On a Hopper GPU kernels read documents where they lie. Elsewhere operands are copied, so that each document begins with
a whole block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import choose, readable
from ..index import BlockIndex, PackedIndex, WindowIndex
from ..index.lookup import index_of_documents, is_built_anew, kept_of_documents
from ..index.tiles import SIDES
from .attention_function import attend, attention_function, remembered_walk
from .call import AttentionCall
from .moved import moving_function
from .operands import call_on, check_heads, distinct_when_traced, lists_of_tiles
from .packed_operands import Packed, check_row, check_tokens, known_twice, row_of
from .remembered import Known, Walk
from .window_attention import attend_in_window, fitting_window, remembered_window


def packed_attention(
    call: AttentionCall,
    row: Packed,
    layout: Tensor | BlockIndex | PackedIndex,
    document_layout: str,
    block: int | None,
    return_lse: bool,
) -> tuple[Tensor | tuple[Tensor, Tensor], PackedIndex | WindowIndex]:
    """`block_sparse_attention` of packed documents, of a checked call of a row, and the index that it found.

    Raises:
        TypeError, ValueError: what does not fit, in a sentence.
    """
    query, key = call.query, call.key
    check_row(query, key, call.value)
    index: PackedIndex | WindowIndex
    if document_layout == "row":
        if return_lse or call.dropout_p:
            raise ValueError(
                "return_lse and dropout_p are for document_layout='own'; leave them out with document_layout='row'."
            )
        index = _row_index(layout, row.cu_seqlens, block, query, call.causal)
        check_heads(index.blocks, query, key)
        index = fitting_window(index, query)
    else:
        index = _own_index(layout, row, block, query)
        check_heads(index, query, key)
    return attend_documents(call, row.as_given, index, return_lse), index


def attend_documents(
    call: AttentionCall,
    as_given: Callable[[Tensor], Tensor],
    index: PackedIndex | WindowIndex,
    return_lse: bool,
    walk: Walk | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a checked call on an index that fits it. walk: that of a call which is remembered."""
    if isinstance(index, WindowIndex):
        return as_given(attend_in_window(call, index, walk))
    in_place = _is_read_in_place(index, call) if walk is None else walk.function is _PackedAttention
    if in_place:
        output, lse = _attend_in_place(call, index, walk)
    else:
        exists = index.exists[0]
        to = index.tokens_of, index.aligned, exists, None
        query, key, value = (_Moved.apply(x, *to) for x in call[:3])
        moved = call._replace(query=query, key=key, value=value, key_padding_mask=index.exists)
        output, lse = attend(moved, index.causal_blocks(call.causal), walk)
        output = _Moved.apply(output, index.aligned, index.tokens_of, None, exists)
    if not return_lse:
        return as_given(output)
    return as_given(output), as_given(_Moved.apply(lse, index.aligned, index.tokens_of, None, index.exists[0]))


def documents_again(
    call: AttentionCall,
    known: Known,
    layout: Tensor | BlockIndex | PackedIndex,
    cu_seqlens: Tensor | None,
    document_layout: str,
    block: int | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Runs a call that is like one which has been checked, on the index that is given or kept; None where the index is
    another than that one's."""
    query: Tensor = call.query
    index: Any = layout
    if not isinstance(index, PackedIndex):
        assert cu_seqlens is not None, "or the call would not be packed"
        if is_built_anew(cu_seqlens):
            return None
        tokens = query.shape[0 if query.dim() == 3 else 2]
        causal = call.causal if document_layout == "row" else None
        index = kept_of_documents(index, cu_seqlens, block, tokens, causal, query.device)
    walk = None if index is None else known.walks.get(index)
    if walk is None:
        return None
    row = row_of(query, call.key, call.value, cu_seqlens)
    call = call if row.query is query else call._replace(query=row.query, key=row.key, value=row.value)
    return attend_documents(call, row.as_given, index, return_lse, walk)


def remembered_documents(call: AttentionCall, index: PackedIndex | WindowIndex) -> Walk:
    """The walk of calls like this one, which has been checked."""
    if isinstance(index, WindowIndex):
        return remembered_window(call, index)
    if _is_read_in_place(index, call):
        return _walk_in_place(index, call.query, call.causal).of_calls_like(_PackedAttention, call[:3])
    return remembered_walk(call, index.causal_blocks(call.causal))._replace(in_place=False)


def _own_index(layout: Tensor | BlockIndex | PackedIndex, row: Packed, block: int | None, query: Tensor) -> PackedIndex:
    """The index that is given, or that of the layout and the documents, after a check that it fits the query."""
    index: PackedIndex
    if not isinstance(layout, PackedIndex):
        assert row.cu_seqlens is not None, "or the row would not be packed"
        index = index_of_documents(layout, row.cu_seqlens, block, query.shape[2], None, query.device)
    elif row.is_nested:
        raise ValueError(known_twice("A PackedIndex"))
    elif row.cu_seqlens is not None:
        raise ValueError("A PackedIndex is given, and cu_seqlens besides; it was built with them, so leave them out.")
    elif block not in (None, layout.block):
        raise ValueError(f"A PackedIndex of blocks of {layout.block} is given, and block={block}; leave block out.")
    else:
        index = layout
    check_tokens(index.tokens, query)
    if index.device != query.device:
        raise ValueError(
            f"The PackedIndex is on {index.device} and query on {query.device}; pass index.to({str(query.device)!r})."
        )
    return index.ready()


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
    return index_of_documents(layout, cu_seqlens, block, query.shape[2], causal, query.device)


LEAST_SCALE = 1e-6
"""The kernels scale differences of scores in the exponent, which a factor that is not well above 0 does not allow."""


def _is_read_in_place(index: PackedIndex, call: AttentionCall) -> bool:
    """True where a kernel reads these documents, (1, H, T, D), where they lie."""
    if call.sinks is not None or call.scale <= LEAST_SCALE or call.dropout_p > 0 or call.softcap:
        return False
    return choose("block_sparse_attention", call_on(index, call.query)).name == "hopper"


def _attend_in_place(call: AttentionCall, index: PackedIndex, walk: Walk | None) -> tuple[Tensor, Tensor]:
    """Output (1, H, T, D), and lse (1, H, N * block) by aligned numbers, as of `block_sparse_attention`."""
    query, key, value, depth = *call[:3], call.query.shape[-1]
    if walk is None:
        query, key, value = distinct_when_traced(query, key, value)
    if walk is None or not walk.in_place:
        query, key, value = readable(query), readable(key), readable(value)
    apply = _PackedAttention.apply if walk is None else walk.apply
    output, lse, _ = apply(query, key, value, *[None] * 5, index, walk, (call.scale, call.causal))
    return output[..., :depth] if depth % 8 else output, lse


def _walk_in_place(index: PackedIndex, query: Tensor, causal: bool) -> Walk:
    tile = choose("block_sparse_attention", call_on(index, query), "hopper").tile(index.block)
    lists = [lists_of_tiles(index.tiles(side, tile, causal)) for side in SIDES]
    spans = [index.tile_spans(side, tile, causal) for side in SIDES]
    sizes = index.layout_heads, index.block
    rows = index.spans, spans[0], *lists[0], *sizes
    return Walk(rows, (index.spans, *spans, *lists[0], *lists[1], *sizes))


def _run(index, walk, numbers, query, key, value, *_):
    scale, causal = numbers
    if walk is None:
        tile = choose("block_sparse_attention", call_on(index, query)).tile(index.block)
        lists = lists_of_tiles(index.tiles("rows", tile, causal))
        rows = index.spans, index.tile_spans("rows", tile, causal), *lists, index.layout_heads, index.block
    else:
        index.ready()
        rows = walk.rows
    return ops.packed_attention_forward.default(query, key, value, *rows, scale, causal, True, not index.bounded)


def _gradients(index, walk, numbers, wanted, forced, *saved):
    index.ready()
    walk = _walk_in_place(index, saved[2], numbers[1]) if walk is None else walk
    ends = torch.are_deterministic_algorithms_enabled(), True, not index.bounded
    return *ops.packed_attention_backward.default(*saved[:7], *walk.both, *numbers, *ends), None


_PackedAttention = attention_function("_PackedAttention", "block_sparse_attention", _run, _gradients)
_Moved = moving_function("_Moved", "block_sparse_attention")
