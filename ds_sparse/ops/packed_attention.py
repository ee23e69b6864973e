"""Attention over documents packed in one row, of which none sees another: what `block_sparse_attention` does with
`cu_seqlens`, with a `PackedIndex`, and with nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..index import BlockIndex, PackedIndex, WindowIndex
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
from .sinks import check_sinks
from .window_attention import window_attention

DOCUMENT_LAYOUTS = ("own", "row")


class Packed(NamedTuple):
    """Operands of a packed row, (1, H, T, D), and how results go back to the form that was given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor | None
    as_given: Callable[[torch.Tensor], torch.Tensor]


def is_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None) -> bool:
    """Whether a call of attention is over packed documents, where its layout is no `PackedIndex`."""
    if cu_seqlens is not None:
        return True
    return getattr(query, "is_nested", False) and all(
        getattr(x, "layout", None) == torch.jagged for x in (query, key, value)
    )


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
    if document_layout not in DOCUMENT_LAYOUTS:
        raise ValueError(
            f"document_layout is {document_layout!r}; it has to be 'own', where each document has the layout from its "
            "own start, or 'row', where the row's layout ends at the borders of documents."
        )
    query, key, value, cu_seqlens, as_given = packed_operands(query, key, value, cu_seqlens)
    query, key, value = under_autocast(query, key, value)
    check_attention_operands(query, key, value)
    if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}; packed documents are one row, of which "
            "queries and keys are the same tokens: (1, H, T, D), or (T, H, D)."
        )
    check_dropout("dropout_p", dropout_p)
    check_inputs(sinks=sinks)
    check_sinks(sinks, query)
    if document_layout == "row":
        if return_lse or dropout_p:
            raise ValueError(
                "return_lse and dropout_p are for document_layout='own'; leave them out with document_layout='row'."
            )
        of_row = _row_index(layout, cu_seqlens, block, query, causal)
        return as_given(window_attention(query, key, value, of_row, scale=scale, sinks=sinks))
    index = _own_index(layout, cu_seqlens, block, query)
    check_heads(index.blocks, query.shape[1])
    back = index.aligned, index.tokens_of, index.exists[0]
    if sinks is None and is_read_in_place(index, query, dropout_p):
        query, key, value = distinct_when_traced(query, key, value)
        output, lse = attention_in_place(query, key, value, index, factor_of(scale, query.shape[-1]), causal)
    else:
        query, key, value = (_Moved.apply(x, index.tokens_of, index.aligned, None) for x in (query, key, value))
        output, lse = attend(
            query, key, value, index.causal_blocks(causal), key_padding_mask=index.exists, causal=causal,
            dropout_p=dropout_p, scale=scale, sinks=sinks, return_lse=True,
        )  # fmt: skip
        output = _Moved.apply(output, *back)
    return (as_given(output), as_given(_Moved.apply(lse, *back))) if return_lse else as_given(output)


def packed_operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> Packed:
    """The operands in the form of a row.

    Raises:
        TypeError: operands that are no tensors.
        ValueError: kinds or shapes that do not go together.
    """
    nested = [getattr(x, "is_nested", False) for x in (query, key, value)]
    if any(nested):
        return _from_nested(query, key, value, cu_seqlens, all(nested))
    check_inputs(query=query, key=key, value=value)
    if query.dim() != 3:
        return Packed(query, key, value, cu_seqlens, lambda x: x)
    if key.dim() != 3 or value.dim() != 3:
        raise ValueError(
            f"Shapes are query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; all have to "
            "be (T, heads, D), or all (1, heads, T, D)."
        )
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return Packed(query, key, value, cu_seqlens, lambda x: x[0].transpose(0, 1))


def _from_nested(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None, all_are: bool
) -> Packed:
    those: dict[str, Any] = {"query": query, "key": key, "value": value}  # types know no jagged tensors
    if cu_seqlens is not None or not all_are:
        raise ValueError(
            "Nested tensors know their documents: give query, key and value all nested, without cu_seqlens."
        )
    for name, x in those.items():
        if x.layout != torch.jagged or x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            raise ValueError(
                f"{name} is a nested tensor that is not jagged (B, H, tokens, D) without holes; make it by "
                "torch.nested.nested_tensor_from_jagged(values, offsets) of values (T, H, D), and .transpose(1, 2)."
            )
    offsets = those["query"].offsets()
    for name, x in those.items():
        if x.offsets() is not offsets and not torch.equal(x.offsets(), offsets):
            raise ValueError(f"{name} has documents of other lengths than query; give them the same offsets.")

    def as_given(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(x[0], offsets, jagged_dim=2)

    query, key, value = (x.values().unsqueeze(0) for x in those.values())
    return Packed(query, key, value, offsets, as_given)


def _own_index(
    layout: torch.Tensor | BlockIndex | PackedIndex,
    cu_seqlens: torch.Tensor | None,
    block: int | None,
    query: torch.Tensor,
) -> PackedIndex:
    """The index that is given, or that of the layout and the documents, after a check that it fits the query."""
    if not isinstance(layout, PackedIndex):
        assert cu_seqlens is not None, "or the row would not be packed"
        layout = packed_index_of(layout, cu_seqlens, block, query.device)
    elif cu_seqlens is not None or block not in (None, layout.block):
        raise ValueError(
            "A PackedIndex is given, and cu_seqlens or block besides; it was built with them, so leave them out."
        )
    tokens = query.shape[2]
    if layout.tokens != tokens:
        raise ValueError(
            f"The documents have {layout.tokens} tokens together, and query has {tokens}; the last number of "
            "cu_seqlens has to be the number of tokens."
        )
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
    index = row_index_of(layout, cu_seqlens, block, query.shape[2], causal, query.device)
    check_heads(index.blocks, query.shape[1])
    return index


class _Moved(Function):
    """The tokens of x (1, H, ...) that `numbers` names; its own go back by `inverse`. where: of those that the gradient
    is of, which exist; None: all of them."""

    @staticmethod
    def forward(
        x: torch.Tensor, numbers: torch.Tensor, inverse: torch.Tensor, where: torch.Tensor | None
    ) -> torch.Tensor:
        return x.index_select(2, numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, _, ctx.inverse, ctx.where = inputs

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad: torch.Tensor):
        grad = grad.index_select(2, ctx.inverse)
        if ctx.where is not None:
            grad = grad.masked_fill_(~ctx.where.view(-1, *[1] * (grad.dim() - 3)), 0)
        return grad, None, None, None
