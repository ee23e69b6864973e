"""dense_attention: PyTorch's own, for layers that stay dense, called as `StructuredAttention` is."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = False,
    query_offset: int | None = None,
) -> torch.Tensor:
    """softmax(scale * query @ key^T + rpe) @ value over all keys that the masks keep; arguments are those of
    `StructuredAttention`."""
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    earlier = _earlier(query, key, query_offset or 0) if causal else None
    mask = None
    for given in (key_padding_mask, attn_mask, earlier, rpe):
        mask = given if mask is None else _both(mask, given, query.dtype)
    if sinks is not None:
        key, value, mask = _with_sinks(query, key, value, mask, sinks)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )


def _earlier(query: torch.Tensor, key: torch.Tensor, offset: int) -> torch.Tensor:
    """bool (T, S): the keys up to each query, of which the first is at place `offset` among them."""
    place = torch.arange(key.shape[2], device=query.device)
    return place <= place[: query.shape[2], None] + offset


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and mask with one key more, of zeros: its score is the sink, and its value is nothing."""
    shape = (len(query), query.shape[1], query.shape[2])
    added = query.new_zeros(1) if mask is None else _added(mask, query.dtype)
    score = sinks.to(query.dtype)[:, None, None].expand(*shape, 1)
    key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
    return key, value, torch.cat([added.expand(*shape, key.shape[2] - 1), score], -1)


def _both(mask: torch.Tensor, given: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if given is None:
        return mask
    if mask.dtype == given.dtype == torch.bool:
        return mask & given
    return _added(mask, dtype) + _added(given, dtype)


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
    return mask.to(dtype)
