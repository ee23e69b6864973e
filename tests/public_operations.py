"""Every public operation that computes with tensors, as a call and the shapes of its differentiable operands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from helpers import random, seeded

from ds_sparse import (
    BlockIndex,
    FixedSparsityConfig,
    MatMul,
    PackedIndex,
    Softmax,
    SparseSelfAttention,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    gather_attention,
    masked_attention,
    selected_attention,
    sparse_attn,
    sparse_matmul,
    sparse_matmul_vo,
    topk_attention,
    unwindow_matmul,
    window_attention,
    window_matmul,
    window_softmax,
)

BATCH, HEADS, TOKENS = 2, 2, 16
LAYOUT = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]])
SEEN = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=seeded(1)) < 0.6
PADDING = torch.rand(BATCH, TOKENS, generator=seeded(2)) < 0.8
CHOSEN = torch.randint(-1, 3, (BATCH, HEADS, TOKENS, 2), generator=seeded(4))
"""Blocks of 40 keys."""
CU_SEQLENS = torch.tensor([0, 5, TOKENS], dtype=torch.int32)

QUERY = (BATCH, HEADS, TOKENS, 8)
ROW = (1, *QUERY[1:])
BIAS = (BATCH, HEADS, TOKENS, TOKENS)
VALUES = (BATCH, int(LAYOUT.sum()), 8, 8)
BAND = (BATCH, HEADS, TOKENS, 7)


@dataclass(frozen=True)
class Operation:
    """A call of one operation.

    Attributes:
        public: the name that its errors give.
        call: of the differentiable operands; one tensor is the result.
        shapes: of these.
        cast: how many of them, the first ones, autocast casts.
        any_batch: whether nothing that the call holds is of so many sequences.
        is_prepared: whether a graph can hold the call: its index is built.
    """

    public: str
    call: Callable[..., torch.Tensor]
    shapes: list[tuple[int, ...]]
    cast: int = 3
    any_batch: bool = False
    is_prepared: bool = True


def of_blocks(device: str, masks: str, prepared: bool) -> dict[str, Operation]:
    # Moved layouts are new tensors: their indices are built while a transform is at work.
    layout: Any = BlockIndex.build(LAYOUT, 8).to(device) if prepared else LAYOUT.to(device)
    causal = layout.causal() if prepared else layout
    _ = layout.row_lengths if prepared else None  # which the gradient of distance_bias takes
    row = PackedIndex.build(LAYOUT, CU_SEQLENS, 8, device=device).prepared(causal=True) if prepared else layout
    padding, cu_seqlens = PADDING.to(masks), CU_SEQLENS.to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        structure = FixedSparsityConfig(HEADS, block=8, num_local_blocks=2, different_layout_per_head=True)
    module = SparseSelfAttention(structure, max_seq_length=3 * TOKENS)

    def attention(shapes: list[tuple[int, ...]], more: str = "rpe", layout=layout, any_batch=True, **options):
        def call(q, k, v, *last):
            return block_sparse_attention(q, k, v, layout, **options, **({more: last[0]} if last else {}))

        return Operation("block_sparse_attention", call, shapes, any_batch=any_batch)

    def with_lse(q, k, v):
        output, lse = block_sparse_attention(q, k, v, layout, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    def at_an_offset(q, k, v, bias, sinks):
        return block_sparse_attention(q, k, v, layout, block=8, query_offset=TOKENS - 3, rpe=bias, sinks=sinks)

    def packed(q, k, v):
        options = {} if prepared else {"cu_seqlens": cu_seqlens, "block": 8}
        return block_sparse_attention(q, k, v, row, causal=True, **options)

    def product(mode: str, shapes: list[tuple[int, ...]], **transposed: bool) -> Operation:
        built = MatMul(layout, 8, mode, **transposed) if prepared else None
        return Operation("MatMul", lambda a, b: (built or MatMul(layout, 8, mode, **transposed))(a, b), shapes)

    built = Softmax(layout, 8) if prepared else None

    def softmax(values, bias, mask):
        return (built or Softmax(layout, 8))(values, 0.3, rpe=bias, attn_mask=mask)

    operands, grouped = [QUERY] * 3, [(1, 2, TOKENS, 20), *[(1, 1, TOKENS, 20)] * 2]
    of_offset = [(BATCH, HEADS, 3, 8), QUERY, QUERY, (HEADS, 3, TOKENS), (HEADS,)]
    by_distance = [*operands, (HEADS, 2 * TOKENS - 1)]
    public = "block_sparse_attention"
    return {
        "attention": attention(operands, any_batch=False, key_padding_mask=padding),
        "attention by distance": attention(by_distance, "distance_bias", any_batch=False, key_padding_mask=padding),
        "attention, causal, with rpe": attention([*operands, BIAS], layout=causal, causal=True),
        "attention, shared rpe": attention([*operands, (1, 1, TOKENS, TOKENS)]),
        "attention, with sinks": attention([*operands, (HEADS,)], "sinks"),
        "attention, grouped heads of another size": attention(grouped, any_batch=False),
        "attention at an offset": Operation(public, at_an_offset, of_offset, is_prepared=False),
        "attention with lse": Operation(public, with_lse, operands, any_batch=True),
        "attention of packed documents": Operation(public, packed, [ROW] * 3),
        "attention of a module": Operation(
            public, lambda q, k, v, rpe: module.attend(q, k, v, rpe=rpe), [*operands, BIAS], any_batch=True
        ),
        "attention of a module by distance": Operation(
            public, lambda q, k, v, bias: module.attend(q, k, v, distance_bias=bias), by_distance, any_batch=True
        ),
        "sdd": product("sdd", [QUERY] * 2, trans_b=True),
        "dsd": product("dsd", [VALUES, QUERY]),
        "dds": product("dds", [QUERY, VALUES], trans_a=True),
        "softmax": Operation("Softmax", softmax, [VALUES, BIAS[1:], BIAS[2:]], cast=0),
    }


def of_windows(device: str, masks: str, prepared: bool) -> dict[str, Operation]:
    padding, several = PADDING.to(masks), [3, 1] if prepared else torch.tensor([3, 1])
    index = WindowIndex.build(TOKENS, [3, 2], True, [3], [1, 2], device=device)
    cu_seqlens: Any = CU_SEQLENS.to(device)
    row = WindowIndex.build(TOKENS, 3, device=device, cu_seqlens=cu_seqlens) if prepared else 3
    of_row = {} if prepared else {"cu_seqlens": cu_seqlens}
    of_offset = [(BATCH, HEADS, 3, 8), QUERY, QUERY]

    def attention(shapes: list[tuple[int, ...]], *numbers: Any, any_batch: bool = True, **options: Any) -> Operation:
        def call(q, k, v, sinks=None):
            return window_attention(q, k, v, *numbers, sinks=sinks, **options)

        return Operation("window_attention", call, shapes, any_batch=any_batch)

    return {
        "window_matmul": Operation("window_matmul", lambda a, b: window_matmul(a, b.mT, 3), [QUERY] * 2),
        "unwindow_matmul": Operation("unwindow_matmul", lambda p, v: unwindow_matmul(p, v, 3), [BAND, QUERY]),
        "window_softmax": Operation(
            "window_softmax", lambda s: window_softmax(s, several, key_padding_mask=padding), [BAND], cast=0
        ),
        "window_attention": attention([QUERY] * 3, 3, any_batch=False, key_padding_mask=padding),
        "window_attention, dilated": attention([*[QUERY] * 3, (HEADS,)], [3, 2], global_tokens=[5], dilation=[2, 1]),
        "window_attention at an offset": Operation(
            "window_attention", lambda q, k, v: window_attention(q, k, v, 5, query_offset=4), of_offset,
            is_prepared=False,
        ),
        "window_attention in an order": attention([QUERY] * 3, index),
        "window_attention of packed documents": attention([ROW] * 3, row, any_batch=False, **of_row),
    }  # fmt: skip


def of_pairs(device: str, masks: str, prepared: bool) -> dict[str, Operation]:
    def index(seen: torch.Tensor) -> TokenIndex:
        made = TokenIndex.from_mask(seen).to(device)
        return made.prepared() if prepared else made

    seen, shared, of_heads, of_batch = SEEN.to(masks), index(SEEN[0, 0]), index(SEEN[0]), index(SEEN[:, :1])
    every = index(SEEN)
    values, offsets = (shared, None) if prepared else shared.csr()
    backwards = shared if prepared else shared.pairs().flip(0)
    cu_seqlens = CU_SEQLENS.to(device)
    row = shared.packed(cu_seqlens).prepared() if prepared else shared
    of_row = {} if prepared else {"cu_seqlens": cu_seqlens}

    def joined(lists: object) -> torch.Tensor:
        return lists if isinstance(lists, torch.Tensor) else torch.cat([joined(x) for x in lists], -1)

    def with_lse(q, k, v):
        output, lse = sparse_attn(q, k, v, of_heads, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    def attention(function: Callable, *lists: Any, shapes=(QUERY,) * 3, any_batch=True, **options: Any) -> Operation:
        public = function.__name__
        return Operation(public, lambda q, k, v: function(q, k, v, *lists, **options), list(shapes), 3, any_batch)

    odd, wider, two = (BATCH, HEADS, TOKENS, 3), (BATCH, HEADS, TOKENS, 5), [QUERY] * 2
    return {
        "sparse_attn": attention(sparse_attn, values, offsets),
        "sparse_attn of odd sizes": attention(sparse_attn, shared, shapes=(odd, odd, wider)),
        "sparse_attn, a list a head, with lse": Operation("sparse_attn", with_lse, [QUERY] * 3, any_batch=True),
        "sparse_attn, a list a sequence": attention(sparse_attn, of_batch, any_batch=False),
        "sparse_attn, a list a sequence and head": attention(sparse_attn, every, any_batch=False),
        "sparse_attn of packed documents": attention(sparse_attn, row, shapes=(ROW,) * 3, any_batch=False, **of_row),
        "sparse_matmul": Operation(
            "sparse_matmul", lambda q, k: sparse_matmul(q, k, backwards), two, any_batch=True
        ),
        "sparse_matmul, lists": Operation("sparse_matmul", lambda q, k: joined(sparse_matmul(q, k, every)), two),
        "sparse_matmul_vo": Operation(
            "sparse_matmul", lambda q, k: sparse_matmul_vo(q, k, values, offsets), two, is_prepared=False
        ),
        "masked_attention": attention(masked_attention, seen, any_batch=False),
        "gather_attention": attention(gather_attention, values, offsets),
        "gather_attention, a list a head": attention(gather_attention, of_heads),
    }  # fmt: skip


def of_selections(device: str, masks: str, prepared: bool) -> dict[str, Operation]:
    chosen, padding = CHOSEN.to(masks), torch.rand(BATCH, 40, generator=seeded(3)).to(masks) < 0.8
    offsets, cu_seqlens = torch.tensor([24, 3], device=device), CU_SEQLENS.to(device)

    def attention(shapes: list[tuple[int, ...]], chosen: torch.Tensor, any_batch: bool = True, **options) -> Operation:
        def call(q, k, v, sinks=None):
            return selected_attention(q, k, v, chosen, 16, sinks=sinks, **options)

        return Operation("selected_attention", call, shapes, any_batch=any_batch)

    def with_lse(q, k, v):
        output, lse = selected_attention(q, k, v, chosen[:1, :1].clamp(min=0), 16, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    def on_lists(shapes: list[tuple[int, ...]], numbers: torch.Tensor, *granularity: int, **options) -> Operation:
        def call(q, k, v, sinks=None):
            output, lse = topk_attention(q, k, v, numbers, *granularity, sinks=sinks, return_lse=True, **options)
            return torch.cat([output, lse.sigmoid().to(output.dtype).unsqueeze(-1)], -1)

        return Operation("topk_attention", call, shapes, any_batch=len(numbers) == 1 and "query_offset" not in options)

    keys = (BATCH, 1, 40, 8)
    operands, odd = [QUERY, keys, keys], [(BATCH, 6, TOKENS, 20), (BATCH, 3, 40, 20), (BATCH, 3, 40, 20)]
    return {
        "selected_attention": attention([QUERY] * 3, chosen[:1] // 3, causal=True),
        "selected_attention, a choice a sequence and head": attention(
            operands, chosen, any_batch=False, key_padding_mask=padding
        ),
        "selected_attention at offsets, with sinks": attention(
            [*operands, (HEADS,)], chosen[:, :1], any_batch=False, causal=True, query_offset=offsets
        ),
        "selected_attention, grouped heads of another size": attention(odd, chosen[:1, :1]),
        "selected_attention with lse": Operation("selected_attention", with_lse, operands, any_batch=True),
        "selected_attention of packed documents": attention(
            [ROW] * 3, chosen[:1], any_batch=False, cu_seqlens=cu_seqlens
        ),
        "topk_attention": on_lists([QUERY, QUERY, (*QUERY[:3], 12)], chosen[:1] * 5, causal=True),
        "topk_attention, a list a sequence, of pairs of keys, with sinks": on_lists(
            [*operands, (HEADS,)], chosen[:, :1] * 7, 2, causal=True, query_offset=offsets
        ),
        "topk_attention of many heads": on_lists([(BATCH, 64, TOKENS, 12), *[(BATCH, 1, 40, 12)] * 2], chosen[:1, :1]),
        "topk_attention of packed documents": Operation(
            "topk_attention", lambda q, k, v: topk_attention(q, k, v, chosen[:1], 4, cu_seqlens=cu_seqlens), [ROW] * 3
        ),
    }


@cache
def operations(device: str, masks: str = "", prepared: bool = False) -> dict[str, Operation]:
    """masks: the device of masks, where it is another. prepared: with indices that are built, as graphs take them."""
    given = device, masks or device, prepared
    return of_blocks(*given) | of_windows(*given) | of_pairs(*given) | of_selections(*given)


NATIVE = [name for name in operations("cpu") if not name.startswith(("masked", "gather"))]
"""The names of those that are not made of PyTorch's."""


def inputs(device: str, shapes: list[tuple[int, ...]], *lead: int) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if device == "cpu" else torch.float32
    rng = seeded()
    return tuple(random(rng, *lead, *shape, dtype=dtype).to(device) for shape in shapes)


def few_queries(device: str, dtype: torch.dtype) -> Callable[[], None]:
    """Calls without gradients of queries at a position, which have an operator of their own."""
    index = BlockIndex.build(torch.ones(1, 4, 4, device=device).tril(), 16)
    query, cache = (x.to(dtype) for x in inputs(device, [(2, 4, 3, 24), (2, 2, 60, 24)]))
    more = {"key_padding_mask": torch.ones(2, 60, dtype=torch.bool, device=device), "sinks": query[0, :, 0, 0]}
    offsets = torch.tensor([20, 37], device=device)

    def call() -> None:
        with torch.no_grad():
            block_sparse_attention(query, cache, cache, index, query_offset=40, causal=True)
            block_sparse_attention(query, cache, cache, index, query_offset=offsets, **more)
            window_attention(query[:, :, :1], cache, cache, 9, query_offset=40)

    return call
