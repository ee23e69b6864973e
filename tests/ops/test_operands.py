"""What operations say of operands that do not fit, where what was meant can be seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_sparse import (
    BlockIndex,
    FixedSparsityConfig,
    SparseSelfAttention,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    explain,
    gather_attention,
    masked_attention,
    sparse_attn,
    window_attention,
)

BATCH, TOKENS, HEADS, SIZE, BLOCK = 2, 64, 4, 24, 16
LAYOUT = torch.ones(TOKENS // BLOCK, TOKENS // BLOCK, dtype=torch.bool)
MASK = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
MODULE = SparseSelfAttention(FixedSparsityConfig(HEADS, BLOCK), max_seq_length=TOKENS)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: block_sparse_attention(q, k, v, LAYOUT),
        lambda q, k, v: block_sparse_attention(q, k, v, LAYOUT, block=BLOCK),
        lambda q, k, v: block_sparse_attention(q, k, v, BlockIndex.build(LAYOUT, BLOCK)),
        lambda q, k, v: block_sparse_attention(q, k[:, :, :2], v[:, :, :2], LAYOUT),
        lambda q, k, v: block_sparse_attention(q, k, v, torch.ones(HEADS, 1, 1), block=128),
        lambda q, k, v: block_sparse_attention(q[:, -1:], k, v, LAYOUT, block=BLOCK, query_offset=TOKENS - 1),
        lambda q, k, v: explain(q, k, v, LAYOUT),
        lambda q, k, v: window_attention(q, k, v, WindowIndex.build(TOKENS, 8)),
        lambda q, k, v: sparse_attn(q, k, v, TokenIndex.from_mask(MASK)),
        lambda q, k, v: gather_attention(q, k, v, TokenIndex.from_mask(MASK)),
        lambda q, k, v: masked_attention(q, k, v, MASK),
        MODULE,
        MODULE.attend,
    ],
)
def test_tokens_before_heads_are_recognised(attend: Callable):
    q, k, v = torch.zeros(3, BATCH, TOKENS, HEADS, SIZE)
    with pytest.raises(ValueError, match=r"where tokens come before heads, as FlashAttention .*transpose\(1, 2\)"):
        attend(q, k, v)


def test_a_layout_that_fits_neither_way_is_not_taken_for_it():
    q, k, v = torch.zeros(3, BATCH, HEADS, TOKENS, SIZE)
    with pytest.raises(ValueError, match=r"or crop it\.$"):
        block_sparse_attention(q, k, v, LAYOUT[:3, :3])
    with pytest.raises(ValueError, match=r"a multiple of key's\.$"):
        block_sparse_attention(q[:, :1], k, v, LAYOUT)


def test_a_value_of_another_size_has_two_ways_out():
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, SIZE)
    expected = sparse_attn(q, k, v[..., :16], TokenIndex.from_mask(MASK))
    with pytest.raises(
        ValueError, match=r"pad\(value, \(0, 8\)\), and take result\[\.\.\., :16\]; or call sparse_attn"
    ):
        block_sparse_attention(q, k, v[..., :16], LAYOUT)
    padded = torch.nn.functional.pad(v[..., :16], (0, 8))
    torch.testing.assert_close(block_sparse_attention(q, k, padded, LAYOUT)[..., :16], expected)
    with pytest.raises(ValueError, match=r"padded alike, by \(0, 8\), and scale=16\*\*-0\.5; or call sparse_attn"):
        block_sparse_attention(q[..., :16], k[..., :16], v, LAYOUT)


def test_a_layout_for_key_heads_is_repeated_where_queries_have_an_offset():
    q, k, v = torch.zeros(BATCH, 4, TOKENS, SIZE), *torch.zeros(2, BATCH, 2, TOKENS, SIZE)
    layout, more = LAYOUT.expand(2, -1, -1), {"block": TOKENS // LAYOUT.shape[-1], "query_offset": 0}
    with pytest.raises(ValueError, match=r"such as layout.repeat_interleave\(2, 0\), or one"):
        block_sparse_attention(q, k, v, layout, **more)
    block_sparse_attention(q, k, v, layout.repeat_interleave(2, 0), **more)
    block_sparse_attention(q, k, v, layout)
