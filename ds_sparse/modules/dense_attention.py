"""dense_attention: PyTorch's own, for layers that stay dense, called as `StructuredAttention` is."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


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
) -> torch.Tensor:
    """softmax(scale * query @ key^T + rpe) @ value over all keys that the masks keep; operands and masks are those of
    `StructuredAttention`."""
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    mask = None
    for given in (key_padding_mask, attn_mask, rpe):
        mask = given if mask is None else _both(mask, given, query.dtype)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
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
