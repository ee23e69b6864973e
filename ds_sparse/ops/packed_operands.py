"""Operands of packed documents: one row, in each of the forms in which callers give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..index.packed import check_document_layout
from ._library import check_inputs, shapes_of

QUERY_KEY_VALUE = ("query", "key", "value")
"""How sentences call the operands, where the operation has no other names for them."""


class Packed(NamedTuple):
    """Operands of a packed row, (1, H, T, D), and how results go back to the form that was given."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor | None
    as_given: Callable[[torch.Tensor], torch.Tensor]
    is_nested: bool = False


def is_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    document_layout: str,
) -> bool:
    """Tells if a call of attention is over packed documents, where its layout is no `PackedIndex`.

    Raises:
        ValueError: it is not, and has a `document_layout`.
    """
    for x in (query, key, value):
        if getattr(x, "is_nested", False):
            return True
    if cu_seqlens is None and document_layout != "own":
        check_document_layout(document_layout)
        raise ValueError(
            f"document_layout is {document_layout!r}, and there are no packed documents; give cu_seqlens, or leave it "
            "out."
        )
    return cu_seqlens is not None


def is_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, has_documents: bool) -> bool:
    """Tells if operands are a packed row in another form than (B, H, T, D): nested, or (T, H, D) where something else
    knows the documents."""
    if _are_jagged(query, key, value):
        return True
    plain = [x for x in (query, key, value) if isinstance(x, torch.Tensor) and not x.is_nested]
    return has_documents and any(x.dim() == 3 for x in plain)


def _are_jagged(*operands: torch.Tensor) -> bool:
    first = operands[0]
    return getattr(first, "is_nested", False) and all(getattr(x, "layout", None) == torch.jagged for x in operands)


def packed_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    names: tuple[str, str, str] = QUERY_KEY_VALUE,
) -> Packed:
    """The operands in the form of a row.

    Raises:
        TypeError: operands that are no tensors.
        ValueError: kinds or shapes that do not go together.
    """
    those: dict[str, Any] = dict(zip(names, (query, key, value)))  # types know no jagged tensors
    nested = [getattr(x, "is_nested", False) for x in those.values()]
    if any(nested):
        return _from_nested(those, cu_seqlens, all(nested))
    check_inputs(**those)
    if query.dim() == 3 and (key.dim() != 3 or value.dim() != 3):
        raise ValueError(f"Shapes are {shapes_of(**those)}; all have to be (T, heads, D), or all (1, heads, T, D).")
    return row_of(query, key, value, cu_seqlens)


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """A result as it is given where operands are in the form of the operation itself."""
    return x


def row_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Packed:
    """The operands (T, H, D), or (1, H, T, D), as a row, without a check."""
    if query.dim() != 3:
        return Packed(query, key, value, cu_seqlens, unchanged)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return Packed(query, key, value, cu_seqlens, lambda x: x[0].transpose(0, 1))


def check_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, names: tuple[str, str, str] = QUERY_KEY_VALUE
) -> None:
    """Raises ValueError unless `packed_operands` are one row, of which queries and keys are the same tokens."""
    if any(x.dim() != 4 for x in (query, key, value)) or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"Shapes are {shapes_of(**dict(zip(names, (query, key, value))))}; packed documents are one row, of which "
            "queries and keys are the same tokens: (1, H, T, D), or (T, H, D)."
        )


def refuse_by_place(**is_given: bool) -> None:
    """Raises ValueError for the first option, by name, that is given and that packed documents have not."""
    for name, given in is_given.items():
        if given:
            raise ValueError(
                f"{name} is given for packed documents, and goes by places in a row; leave it out (padding too: packed "
                "documents have none), or call once for each document."
            )


def known_twice(index: str) -> str:
    """The sentence for an index of documents, or of a row, beside nested operands."""
    return (
        f"{index} is given for nested tensors, which know their documents themselves; give what it was built from, or "
        "the index with one row, x.values().unsqueeze(0) of each nested x, (1, H, T, D)."
    )


def rows_as_one(x: torch.Tensor) -> torch.Tensor:
    """(B, H, T, D) as the one row (1, H, B * T, D); nothing is copied where heads lie within tokens, or B is 1."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def one_as_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`rows_as_one` backwards."""
    return x[0].transpose(0, 1).unflatten(0, (rows, -1)).transpose(1, 2)


def check_tokens(of_documents: int, query: torch.Tensor) -> None:
    """Raises ValueError unless the documents have together as many tokens as the query, (1, H, T, D)."""
    tokens = query.shape[2]
    if of_documents != tokens:
        raise ValueError(
            f"The documents have {of_documents} tokens together, and query has {tokens}; the last number of "
            "cu_seqlens has to be the number of tokens."
            + (" Operands are (T, heads, D) or (1, heads, T, D)." if query.shape[1] == of_documents else "")
        )


def _from_nested(those: dict[str, Any], cu_seqlens: torch.Tensor | None, all_are: bool) -> Packed:
    first, second, third = those
    if cu_seqlens is not None or not all_are:
        raise ValueError(
            f"Nested tensors know their documents: give {first}, {second} and {third} all nested, without cu_seqlens."
        )
    for name, x in those.items():
        if x.layout != torch.jagged or x.dim() != 4 or x._ragged_idx != 2 or x.lengths() is not None:
            raise ValueError(
                f"{name} is a nested tensor that is not jagged (B, H, tokens, D) without holes; make it by "
                "torch.nested.nested_tensor(documents, layout=torch.jagged) of documents (tokens, H, D), or by "
                "torch.nested.nested_tensor_from_jagged(values, offsets) of values (T, H, D), and .transpose(1, 2)."
            )
    offsets = those[first].offsets()
    for name, x in those.items():
        if x.offsets() is not offsets and not torch.equal(x.offsets(), offsets):
            raise ValueError(f"{name} has documents of other lengths than {first}; give them the same offsets.")

    def as_given(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(x[0], offsets, jagged_dim=2)

    query, key, value = (x.values().unsqueeze(0) for x in those.values())
    return Packed(query, key, value, offsets, as_given, True)
