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
    query_offset: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """softmax(scale * query @ key^T + rpe) @ value over all keys that the masks keep; operands and masks are those of
    `StructuredAttention`."""
    tokens, keys, offset = query.shape[2], key.shape[2], query_offset or 0
    is_causal = causal and offset == 0 and sinks is key_padding_mask is attn_mask is rpe is None and tokens == keys
    if causal and not is_causal and offset < keys - 1:
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(offset)
        attn_mask = seen if attn_mask is None else _both(attn_mask, seen, query.dtype)
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    mask = None
    for given in (key_padding_mask, attn_mask, rpe):
        mask = given if mask is None else _both(mask, given, query.dtype)
    if sinks is not None:
        # A key of zeros with a value of zeros, whose score is the sink.
        key, value = (pad(x, (0, 0, 0, 1)) for x in (key, value))
        mask = torch.zeros(1, 1, 1, keys, dtype=query.dtype, device=query.device) if mask is None else mask
        mask = _added(mask, query.dtype)[(None,) * (4 - mask.dim())]
        sinks = sinks.to(query.dtype)[:, None, None].expand(len(mask), -1, mask.shape[2], 1)
        mask = torch.cat([mask.expand(-1, sinks.shape[1], -1, -1), sinks], -1)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )


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
