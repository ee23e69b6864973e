"""Operators that only programs hold which earlier versions exported."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .._ops import add_op_namespace_prefix, ops
from ..index.master_layout import MasterLayout
from .attention_operators import attention_forward, fake_forward

EARLIER_OPERATORS = ("layout_distance_forward",)

_operators = torch.library.Library(ops.name, "FRAGMENT")
_operators.define(
    "layout_distance_forward(Tensor query, Tensor key, Tensor value, Tensor distances, Tensor? key_bias, "
    "Tensor? attn_mask, Tensor? dropout_seed, float scale, bool causal, float dropout_p, str layout) "
    "-> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_operators, "layout_distance_forward", "CompositeExplicitAutograd")
def _(query, key, value, distances, key_bias, attn_mask, seed, scale, causal, dropout_p, text):
    """Attention of queries in the opposite order, T in whole blocks; distances (H or 1, T + S - 1) have causality, and
    of query i and key j, in these orders, the number i + j."""
    tokens, keys = query.shape[2], key.shape[2]
    most = max(tokens, keys)
    rpe = pad(distances, (most - tokens, most - keys))
    if attn_mask is not None and attn_mask.shape[2] > 1:
        attn_mask = attn_mask.flip(2)
    index = MasterLayout.read(text).index(tokens, query.device, causal)
    results = attention_forward(
        index, query.flip(2), key, value, rpe, key_bias, attn_mask, seed, scale, False, dropout_p
    )
    return tuple(x.flip(2) for x in results)


torch.library.register_fake(add_op_namespace_prefix("layout_distance_forward"), fake_forward)
