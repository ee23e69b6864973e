"""Every public operation that computes with tensors, as a call and the shapes of its differentiable operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from helpers import random, seeded

from ds_sparse import (
    MatMul,
    Softmax,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    gather_attention,
    masked_attention,
    sparse_attn,
    sparse_matmul,
    sparse_matmul_vo,
    unwindow_matmul,
    window_attention,
    window_matmul,
    window_softmax,
)

BATCH, HEADS, TOKENS = 2, 2, 16
LAYOUT = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]])
SEEN = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=seeded(1)) < 0.6
PADDING = torch.rand(BATCH, TOKENS, generator=seeded(2)) < 0.8

QUERY = (BATCH, HEADS, TOKENS, 8)
BIAS = (BATCH, HEADS, TOKENS, TOKENS)
VALUES = (BATCH, int(LAYOUT.sum()), 8, 8)
BAND = (BATCH, HEADS, TOKENS, 7)

Operation = tuple[Callable, list[tuple[int, ...]]]


def of_blocks(device: str) -> dict[str, Operation]:
    # Moved layouts are new tensors: their indices are built while a transform is at work.
    layout, padding = LAYOUT.to(device), PADDING.to(device)

    def attention(**options) -> Callable:
        return lambda q, k, v, *rpe: block_sparse_attention(q, k, v, layout, rpe=rpe[0] if rpe else None, **options)

    def by_distance(q, k, v, bias):
        return block_sparse_attention(q, k, v, layout, distance_bias=bias, key_padding_mask=padding)

    def with_lse(q, k, v):
        output, lse = block_sparse_attention(q, k, v, layout, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    def with_sinks(q, k, v, sinks):
        return block_sparse_attention(q, k, v, layout, sinks=sinks)

    def at_an_offset(q, k, v, bias, sinks):
        return block_sparse_attention(q, k, v, layout, block=8, query_offset=TOKENS - 3, rpe=bias, sinks=sinks)

    def softmax(values, bias, mask):
        return Softmax(layout, 8)(values, 0.3, rpe=bias, attn_mask=mask)

    grouped = [(1, 2, TOKENS, 20), *[(1, 1, TOKENS, 20)] * 2]
    return {
        "attention": (attention(key_padding_mask=padding), [QUERY] * 3),
        "attention by distance": (by_distance, [*[QUERY] * 3, (HEADS, 2 * TOKENS - 1)]),
        "attention, causal, with rpe": (attention(causal=True), [*[QUERY] * 3, BIAS]),
        "attention, shared rpe": (attention(), [*[QUERY] * 3, (1, 1, TOKENS, TOKENS)]),
        "attention, with sinks": (with_sinks, [*[QUERY] * 3, (HEADS,)]),
        "attention, grouped heads of another size": (attention(), grouped),
        "attention at an offset": (at_an_offset, [(BATCH, HEADS, 3, 8), QUERY, QUERY, (HEADS, 3, TOKENS), (HEADS,)]),
        "attention with lse": (with_lse, [QUERY] * 3),
        "sdd": (lambda a, b: MatMul(layout, 8, "sdd", trans_b=True)(a, b), [QUERY] * 2),
        "dsd": (lambda p, v: MatMul(layout, 8, "dsd")(p, v), [VALUES, QUERY]),
        "dds": (lambda x, p: MatMul(layout, 8, "dds", trans_a=True)(x, p), [QUERY, VALUES]),
        "softmax": (softmax, [VALUES, BIAS[1:], BIAS[2:]]),
    }


def of_windows(device: str) -> dict[str, Operation]:
    padding, several = PADDING.to(device), torch.tensor([3, 1])
    index = WindowIndex.build(TOKENS, [3, 2], True, [3], [1, 2], device=device)
    return {
        "window_matmul": (lambda a, b: window_matmul(a, b.mT, 3), [QUERY] * 2),
        "unwindow_matmul": (lambda p, v: unwindow_matmul(p, v, 3), [BAND, QUERY]),
        "window_softmax": (lambda s: window_softmax(s, several, key_padding_mask=padding), [BAND]),
        "window_attention": (lambda q, k, v: window_attention(q, k, v, 3, key_padding_mask=padding), [QUERY] * 3),
        "window_attention at an offset": (
            lambda q, k, v: window_attention(q, k, v, 5, query_offset=4),
            [(BATCH, HEADS, 3, 8), QUERY, QUERY],
        ),
        "window_attention in an order": (lambda q, k, v: window_attention(q, k, v, index), [QUERY] * 3),
    }


def of_pairs(device: str) -> dict[str, Operation]:
    def index(seen: torch.Tensor) -> TokenIndex:
        return TokenIndex.from_mask(seen).to(device)

    seen, shared, of_heads, of_batch = SEEN.to(device), index(SEEN[0, 0]), index(SEEN[0]), index(SEEN[:, :1])
    every = index(SEEN)
    values, offsets = shared.csr()
    backwards = shared.pairs().flip(0)

    def joined(lists: object) -> torch.Tensor:
        return lists if isinstance(lists, torch.Tensor) else torch.cat([joined(x) for x in lists], -1)

    def with_lse(q, k, v):
        output, lse = sparse_attn(q, k, v, of_heads, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    odd, wider = (BATCH, HEADS, TOKENS, 3), (BATCH, HEADS, TOKENS, 5)
    return {
        "sparse_attn": (lambda q, k, v: sparse_attn(q, k, v, values, offsets), [QUERY] * 3),
        "sparse_attn of odd sizes": (lambda q, k, v: sparse_attn(q, k, v, shared), [odd, odd, wider]),
        "sparse_attn, a list a head, with lse": (with_lse, [QUERY] * 3),
        "sparse_attn, a list a sequence": (lambda q, k, v: sparse_attn(q, k, v, of_batch), [QUERY] * 3),
        "sparse_attn, a list a sequence and head": (lambda q, k, v: sparse_attn(q, k, v, every), [QUERY] * 3),
        "sparse_matmul": (lambda q, k: sparse_matmul(q, k, backwards), [QUERY] * 2),
        "sparse_matmul, lists": (lambda q, k: joined(sparse_matmul(q, k, every)), [QUERY] * 2),
        "sparse_matmul_vo": (lambda q, k: sparse_matmul_vo(q, k, values, offsets), [QUERY] * 2),
        "masked_attention": (lambda q, k, v: masked_attention(q, k, v, seen), [QUERY] * 3),
        "gather_attention": (lambda q, k, v: gather_attention(q, k, v, values, offsets), [QUERY] * 3),
        "gather_attention, a list a head": (lambda q, k, v: gather_attention(q, k, v, of_heads), [QUERY] * 3),
    }


@cache
def operations(device: str) -> dict[str, Operation]:
    return of_blocks(device) | of_windows(device) | of_pairs(device)


NATIVE = [name for name in operations("cpu") if not name.startswith(("masked", "gather"))]
"""The names of those that are not made of PyTorch's."""


def inputs(device: str, shapes: list[tuple[int, ...]], *lead: int) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if device == "cpu" else torch.float32
    rng = seeded()
    return tuple(random(rng, *lead, *shape, dtype=dtype).to(device) for shape in shapes)
