"""Attention over documents packed in one row, of which none sees another: what `block_sparse_attention` does with
`cu_seqlens`, with a `PackedIndex`, and with nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..index import BlockIndex, PackedIndex, WindowIndex
from ..index.documents import check_document_layout
from ..index.lookup import packed_index_of, row_index_of
from ._autograd import Function, differentiable_once
from ._library import check_inputs, under_autocast
from .operands import (
    check_attention_operands,
    check_dropout,
    check_heads,
    distinct_when_traced,
    factor_of,
)
from .packed_in_place import attention_in_place, is_read_in_place
from .packed_operands import check_row, check_tokens, known_twice, packed_operands
from .sinks import check_sinks
from .window_attention import window_attention


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor | BlockIndex | PackedIndex,
    cu_seqlens: torch.Tensor | None,
    document_layout: str,
    block: int | None,
    attend: Callable[..., Any],
    *,
    causal: bool,
    return_lse: bool,
    dropout_p: float,
    scale: float | None,
    sinks: torch.Tensor | None,
    **others: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`block_sparse_attention` of packed documents.

    attend: attention on a layout, given (query, key, value, index) and the arguments by name.
    others: arguments that packed documents have not, by name; None each.

    Raises:
        TypeError, ValueError: what does not fit, in a sentence.
    """
    for name, x in others.items():
        if x is not None:
            raise ValueError(
                f"{name} is given for packed documents, and goes by places in a row; leave it out (padding too: packed "
                "documents have none), or call once for each document."
            )
    check_document_layout(document_layout)
    given = cu_seqlens
    query, key, value, cu_seqlens, as_given = packed_operands(query, key, value, cu_seqlens)
    query, key, value = under_autocast(query, key, value)
    check_attention_operands(query, key, value)
    check_row(query, key, value)
    check_dropout("dropout_p", dropout_p)
    check_inputs(sinks=sinks)
    check_sinks(sinks, query)
    if document_layout == "row":
        if return_lse or dropout_p:
            raise ValueError(
                "return_lse and dropout_p are for document_layout='own'; leave them out with document_layout='row'."
            )
        of_row = _row_index(layout, cu_seqlens, block, query, causal)
        check_heads(of_row.blocks, query, key)
        return as_given(window_attention(query, key, value, of_row, scale=scale, sinks=sinks))
    index = _own_index(layout, cu_seqlens, block, query, is_nested=cu_seqlens is not given)
    check_heads(index.blocks, query, key)
    exists = index.exists[0]
    back = index.aligned, index.tokens_of, None, exists
    factor = factor_of(scale, query.shape[-1])
    if sinks is None and is_read_in_place(index, query, factor, dropout_p):
        query, key, value = distinct_when_traced(query, key, value)
        output, lse = attention_in_place(query, key, value, index, factor, causal)
    else:
        query, key, value = (_Moved.apply(x, index.tokens_of, index.aligned, exists, None) for x in (query, key, value))
        output, lse = attend(
            query, key, value, index.causal_blocks(causal), key_padding_mask=index.exists, causal=causal,
            dropout_p=dropout_p, scale=scale, sinks=sinks, return_lse=True,
        )  # fmt: skip
        output = _Moved.apply(output, *back)
    return (as_given(output), as_given(_Moved.apply(lse, *back))) if return_lse else as_given(output)


def _own_index(
    layout: torch.Tensor | BlockIndex | PackedIndex,
    cu_seqlens: torch.Tensor | None,
    block: int | None,
    query: torch.Tensor,
    is_nested: bool,
) -> PackedIndex:
    """The index that is given, or that of the layout and the documents, after a check that it fits the query."""
    if not isinstance(layout, PackedIndex):
        assert cu_seqlens is not None, "or the row would not be packed"
        layout = packed_index_of(layout, cu_seqlens, block, query.device)
    elif is_nested:
        raise ValueError(known_twice("A PackedIndex"))
    elif cu_seqlens is not None:
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
    layout: torch.Tensor | BlockIndex | PackedIndex,
    cu_seqlens: torch.Tensor | None,
    block: int | None,
    query: torch.Tensor,
    causal: bool,
) -> WindowIndex:
    """The index of a row's layout, cut at the borders of documents."""
    if isinstance(layout, PackedIndex):
        raise ValueError("A PackedIndex is for document_layout='own'; give the row's layout and cu_seqlens.")
    assert cu_seqlens is not None, "or the row would not be packed"
    return row_index_of(layout, cu_seqlens, block, query.shape[2], causal, query.device)


def _moved(x: torch.Tensor, numbers: torch.Tensor, exists: torch.Tensor | None) -> torch.Tensor:
    x = x.index_select(2, numbers)
    return x if exists is None else x.masked_fill_(~exists.view(-1, *[1] * (x.dim() - 3)), 0)


class _Moved(Function):
    """The tokens of x (1, H, ...) that `numbers` names; their gradients go back by `inverse`. exists, existed: which of
    the result, and of x, there are, the others are zeros; None: all of them."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        numbers: torch.Tensor,
        inverse: torch.Tensor,
        exists: torch.Tensor | None,
        existed: torch.Tensor | None,
    ) -> torch.Tensor:
        return _moved(x, numbers, exists)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.inverse, _, ctx.existed = inputs

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad: torch.Tensor):
        return _moved(grad, ctx.inverse, ctx.existed), None, None, None, None
