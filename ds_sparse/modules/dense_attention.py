"""dense_attention: PyTorch's own, for layers that stay dense, called as `StructuredAttention` is."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from ..index.packed import Documents
from ..ops._library import check_softcap
from ..ops.operands import as_matrix, capped, wide_dtype

_UNREAD = (
    "A dense layer computes packed documents one by one, and while a CUDA graph is captured nobody can read where they "
    "begin; capture a model of which all layers are sparse."
)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    rpe: torch.Tensor | None = None,
    distance_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(scale * query @ key^T + rpe) @ value over all keys that the masks keep; operands and options are those of
    `StructuredAttention`, with an integer as `query_offset`. A distance_bias becomes a matrix of tokens by tokens, and
    with a softcap all scores are stored.

    Raises:
        ValueError: cu_seqlens with a mask, a bias or a query_offset, or for another number of tokens; distance_bias
            with a query_offset.
    """
    softcap = check_softcap(softcap)
    if distance_bias is not None and query_offset is not None:
        raise ValueError("distance_bias and query_offset are both given, which no model asks of a layer that is dense.")
    if cu_seqlens is not None:
        if any(given is not None for given in (rpe, distance_bias, key_padding_mask, attn_mask, query_offset)):
            raise ValueError(
                "a mask, rpe, distance_bias or query_offset is given for packed documents, and goes by places in a "
                "row; leave it out."
            )
        row = Documents.read(cu_seqlens, _UNREAD).check_fills(query.shape[2])
        lengths = [n for n in row.lengths if n]
        # One call a document: a mask of all would be tokens by tokens.
        documents = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
        options: dict[str, Any] = {
            "scale": scale, "causal": causal, "sinks": sinks, "dropout_p": dropout_p, "softcap": softcap,
        }  # fmt: skip
        return torch.cat([dense_attention(*operands, **options) for operands in documents], 2)
    mask = attn_mask
    if key_padding_mask is not None:
        mask = _both(mask, key_padding_mask[:, None, None, :], query.dtype)
    if rpe is not None:
        mask = _both(mask, rpe, query.dtype)
    if distance_bias is not None:
        mask = _both(mask, as_matrix(distance_bias, query.shape[2], key.shape[2])[None], query.dtype)
    alone = causal and mask is None and sinks is None and not query_offset and not softcap
    if causal and not alone and (query_offset or 0) < key.shape[2] - 1:  # else the first query sees all
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = _both(mask, seen.tril(query_offset or 0), query.dtype)
    if sinks is not None:
        mask = _with_sinks(mask, sinks, query, key)
        key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
    if softcap:  # a zero key's score is zero, capped too
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        wide = wide_dtype(query.dtype)
        scores = query.to(wide) @ key.to(wide).mT * (query.shape[3] ** -0.5 if scale is None else scale)
        scores = capped(scores, softcap) if mask is None else capped(scores, softcap) + _added(mask, wide)
        nothing_left = (scores == float("-inf")).all(-1, keepdim=True)
        probs = scores.masked_fill(nothing_left, 0).softmax(-1).masked_fill(nothing_left, 0)
        return dropout(probs.to(query.dtype), dropout_p) @ value
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal=alone, scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip


def _with_sinks(mask: torch.Tensor | None, sinks: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias of scores with one key more, whose bias is zero, as its value is."""
    batch, heads, tokens, _ = query.shape
    shape = batch, heads, tokens, key.shape[2]
    added = query.new_zeros(shape) if mask is None else _added(mask, query.dtype).expand(shape)
    return torch.cat([added, sinks.to(query.dtype)[:, None, None].expand(*shape[:3], 1)], -1)


def _both(mask: torch.Tensor | None, given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask is None:
        return given
    if mask.dtype == given.dtype == torch.bool:
        return mask & given
    return _added(mask, dtype) + _added(given, dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.to(dtype)
