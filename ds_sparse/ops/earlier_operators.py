"""Operators that only programs hold which earlier versions exported."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..index import BlockIndex
from .attention_function import attention_forward


def layout_distance_forward(
    index: BlockIndex, query, key, value, distances, key_bias, attn_mask, seed, scale, causal, dropout_p
) -> tuple[Tensor, ...]:
    """Attention of queries in the opposite order, T in whole blocks; distances (H or 1, T + S - 1) have causality, and
    of query i and key j, in these orders, the number i + j."""
    tokens, keys = query.shape[2], key.shape[2]
    most = max(tokens, keys)
    rpe = pad(distances, (most - tokens, most - keys))
    if attn_mask is not None and attn_mask.shape[2] > 1:
        attn_mask = attn_mask.flip(2)
    results = attention_forward(
        index, query.flip(2), key, value, rpe, key_bias, attn_mask, seed, scale, False, dropout_p
    )
    return tuple(x.flip(2) for x in results)
