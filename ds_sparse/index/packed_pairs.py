"""Token pairs of documents packed in one row, of which none sees another: made of the pairs of one document, or of
those of the row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .cache import Refusal
from .documents import Documents, check_document_layout


def pairs_of_documents(
    rows: Tensor, columns: Tensor, lists: int, size: tuple[int, int], documents: Documents, document_layout: str
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The pairs of all documents, of those of one document ("own") or of the row ("row"). Waits for the device once,
    however many documents there are.

    Args:
        rows, columns: int64 (N) and int32 (N). Of each pair p * queries + i, and j; ascending, as in a `TokenIndex`.
        lists: how many there are.
        size: queries and keys.

    Returns:
        row_offsets, columns and ends, as of a `TokenIndex`.

    Raises:
        ValueError: pairs for fewer tokens than the longest document, or the row, has; too many pairs.
    """
    _check_size("The pairs are", size, documents, document_layout)
    queries, keys = size
    first, end = documents.of_tokens(columns.device).unbind(1)
    tokens = torch.arange(documents.tokens, device=columns.device)
    if document_layout == "own":
        line, lowest, bound, added = tokens - first, torch.zeros_like(first), end - first, first
    else:
        line, lowest, bound, added = tokens, first, end, torch.zeros_like(first)
    # Keys ascend within a row: those of a document stand beside each other.
    places = rows * keys + columns
    begins = (torch.arange(lists, device=columns.device)[:, None] * queries + line) * keys
    start, stop = (torch.searchsorted(places, begins + x).flatten() for x in (lowest, bound))
    counts = stop - start
    offsets = pad(counts.cumsum(0), (1, 0))
    ends = tuple(offsets[documents.tokens :: documents.tokens].tolist())
    if ends[-1] >= 2**31:
        raise ValueError(f"The documents have {ends[-1]} pairs together; the index holds fewer than 2**31.")
    to_source, to_column = (
        x.repeat_interleave(counts, output_size=ends[-1]) for x in (start - offsets[:-1], added.repeat(lists))
    )
    source = to_source + torch.arange(ends[-1], device=columns.device)
    return offsets.int(), (columns[source] + to_column).int(), ends


def mask_of_documents(mask: Tensor, cu_seqlens: Tensor, document_layout: str, tokens: int) -> Tensor:
    """A row's mask, (..., T, T), in which no document sees another. Waits for the device of `cu_seqlens`.

    Args:
        mask: of one document ("own") or of the row ("row"), bool, or added, which has a gradient; (..., L, L) with L
            tokens or more than the longest document, or the row, has. A size of 1 stands for all.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to `tokens`.
        tokens: T, of the row.

    Raises:
        TypeError, ValueError: arguments of other types or values; a mask that is too small.
        RuntimeError: under torch.compile; in the capture of a CUDA graph.
    """
    check_document_layout(document_layout)
    instead = "give the mask of the whole row, without cu_seqlens."
    Refusal("The mask of packed documents cannot be made", instead, instead).check(mask.device)
    documents = Documents.read(cu_seqlens).check_fills(tokens)
    mask = mask.reshape((1,) * (2 - mask.dim()) + mask.shape)
    sizes = [x if x > 1 else documents.tokens for x in mask.shape[-2:]]
    _check_size("The mask is", (sizes[0], sizes[1]), documents, document_layout)
    first, _ = documents.of_tokens(mask.device).unbind(1)
    place = torch.arange(documents.tokens, device=mask.device)
    place = place - first if document_layout == "own" else place
    for dim in (-2, -1):
        if mask.shape[dim] > 1:
            mask = mask.index_select(dim, place)
    apart = first[:, None] != first
    return mask.masked_fill(apart, False if mask.dtype == torch.bool else float("-inf"))


def _check_size(what: str, size: tuple[int, int], documents: Documents, document_layout: str) -> None:
    """Raises ValueError unless there are as many queries and keys as documents need, or more."""
    of, wanted = "the longest document", max(documents.lengths)
    if document_layout == "row":
        of, wanted = "the row", documents.tokens
    if min(size) < wanted:
        raise ValueError(
            f"{what} for {size[0]} query and {size[1]} key tokens, and {of} has {wanted}; it takes as many of both, "
            "or more."
        )
