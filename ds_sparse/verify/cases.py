"""A case of each kernel variant: operands with fixed numbers, the call, and its meaning in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..index import BlockIndex, PackedIndex, TokenIndex, WindowIndex
from ..layout import to_token_mask
from ..ops import (
    MatMul,
    Softmax,
    block_sparse_attention,
    selected_attention,
    sparse_attn,
    sparse_matmul,
    window_matmul,
    window_softmax,
)
from ..ops import unwindow_matmul as ours_of_bands
from ..ops.window_attention import window_attention
from .variants import Variant

Results = tuple[Tensor, ...]
Function = Callable[..., Results]

WINDOW = 64
"""Tokens on each side of a band."""


class Case(NamedTuple):
    """call: the operation, of the operands in their order. meaning: the same at the precision of what it is given."""

    operands: dict[str, Tensor]
    call: Function
    meaning: Function


class Setting(NamedTuple):
    """Sizes and numbers that the cases of a variant are made of.

    Attributes:
        batch, heads, tokens: B, H and T.
        live: the layout, bool (H, R, C).
        drawn: random numbers of a shape, in the variant's dtype.
    """

    variant: Variant
    batch: int
    heads: int
    tokens: int
    live: Tensor
    drawn: Callable[..., Tensor]

    @property
    def block(self) -> int:
        return self.variant.block

    @property
    def causal(self) -> bool:
        """Half of the variants are causal."""
        return (self.block.bit_length() + self.variant.head_dim // 8) % 2 == 0

    def vectors(self, *names: str) -> dict[str, Tensor]:
        """Operands (B, H, T, D) of these names."""
        shape = (self.batch, self.heads, self.tokens, self.variant.head_dim)
        return {name: self.drawn(*shape) for name in names}

    def attended(self) -> dict[str, Tensor]:
        return self.vectors("query", "key", "value")

    def values(self) -> Tensor:
        """(B, V, b, b), of live blocks."""
        return self.drawn(self.batch, int(self.live.sum()), self.block, self.block)

    def bands(self) -> Tensor:
        return self.drawn(self.batch, self.heads, self.tokens, 2 * WINDOW + 1)


def case_of(variant: Variant, device: torch.device, seed: int) -> Case:
    """The case of a variant; another seed has other numbers and another layout."""
    rng = torch.Generator().manual_seed(seed)
    batch, heads, tokens = _sizes(variant, device)
    blocks = -(-tokens // variant.block)
    live = torch.rand(heads, blocks, blocks, generator=rng) < min(0.4, 24 / blocks)
    live[:, 0] = live[:, :, 0] = True
    # Tiles without a step wait for nothing but their own copies.
    live[-1, blocks // 2 :] = live[-1, :, blocks // 2 :] = False

    # A GPU's numbers by the GPU: one thread of a CPU takes longer for them than all kernels.
    numbers = torch.Generator(device).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device=device).to(variant.dtype)

    return CASES[variant.operation](Setting(variant, batch, heads, tokens, live.to(device), drawn))


def _sizes(variant: Variant, device: torch.device) -> tuple[int, int, int]:
    """Sequences, heads and tokens: more tiles of 128 tokens than a GPU has multiprocessors, in short sequences, as
    their meaning takes tokens by tokens; or as little as has parts for several threads."""
    if variant.operation == "selected_attention":  # two of the largest blocks, of which one is short
        return (4, 8, 1088) if device.type == "cuda" else (1, 2, variant.block + 64)
    if device.type == "cuda":
        return (1, 32, 1024) if variant.operation == "packed attention" else (4, 8, 1024)
    return 1, 2, max(2 * variant.block, 64)


def _block_attention(s: Setting) -> Case:
    """Half of the head sizes with a bias, whose gradient has a kernel of its own."""
    index, operands = BlockIndex.build(s.live, s.block), s.attended()
    if s.variant.head_dim % 16:
        operands["rpe"] = s.drawn(1, s.heads, s.tokens, s.tokens)

    def call(query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None) -> Results:
        return block_sparse_attention(query, key, value, index, rpe=rpe, causal=s.causal, return_lse=True)

    def meaning(query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None) -> Results:
        return _attention(query, key, value, s.live, s.block, rpe=rpe, causal=s.causal)

    return Case(operands, call, meaning)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, live: Tensor, block: int, rpe: Tensor | None = None, causal: bool = False
) -> Results:
    results = reference.attention(query, key, value, live, block, rpe=rpe, causal=causal, return_lse=True)
    assert isinstance(results, tuple)
    return results


def _packed_attention(s: Setting) -> Case:
    """Three documents, of which the last block of two is short."""
    ends = [0, s.tokens // 3 - 3, s.tokens // 2 + 5, s.tokens]
    index = PackedIndex.build(s.live, torch.tensor(ends), s.block)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Results:
        return (block_sparse_attention(query, key, value, index, causal=s.causal),)

    def meaning(query: Tensor, key: Tensor, value: Tensor) -> Results:
        places = [slice(begin, end) for begin, end in pairwise(ends)]
        documents = [(query[:, :, at], key[:, :, at], value[:, :, at]) for at in places]
        outputs = [_attention(q, k, v, s.live, s.block, causal=s.causal)[0] for q, k, v in documents]
        return (torch.cat(outputs, 2),)

    return Case(s.attended(), call, meaning)


def _window_attention(s: Setting) -> Case:
    windows, global_tokens = (2 * s.block + 5,), (0, 7)
    index = WindowIndex.build(
        s.tokens, windows[0], causal=s.causal, global_tokens=list(global_tokens), block=s.block, device=s.live.device
    )
    return Case(
        s.attended(),
        lambda q, k, v: (window_attention(q, k, v, index),),
        lambda q, k, v: (reference.window_attention(q, k, v, windows, s.causal, global_tokens=global_tokens),),
    )


def _selected_attention(s: Setting) -> Case:
    """Two query heads share a key head, and choose together where the case is causal. Half of the head sizes with
    sinks. On the CPU the last queries alone, as their meaning takes tokens by tokens."""
    key_heads, blocks = s.heads // 2, -(-s.tokens // s.block)
    queries = s.tokens if s.live.is_cuda else min(s.tokens, 128)
    shapes = {"query": (s.heads, queries), "key": (key_heads, s.tokens), "value": (key_heads, s.tokens)}
    operands = {name: s.drawn(s.batch, *shape, s.variant.head_dim) for name, shape in shapes.items()}
    if s.variant.head_dim % 16:
        operands["sinks"] = s.drawn(s.heads)
    places = s.drawn(s.batch, key_heads if s.causal else s.heads, queries, min(blocks, 6)).float().sigmoid()
    chosen = (places * (blocks + 1)).long().clamp(max=blocks) - 1  # -1 is none
    options: dict[str, Any] = {"causal": s.causal, "query_offset": s.tokens - queries, "return_lse": True}

    def by(function: Callable[..., Any]) -> Function:
        return lambda query, key, value, sinks=None: function(
            query, key, value, chosen, s.block, sinks=sinks, **options
        )

    return Case(operands, by(selected_attention), by(reference.selected_attention))


def _pair_attention(s: Setting) -> Case:
    index = TokenIndex.from_blocks(BlockIndex.build(s.live, s.block), s.tokens, s.tokens)
    return Case(
        s.attended(),
        lambda q, k, v: sparse_attn(q, k, v, index, return_lse=True),
        lambda q, k, v: _attention(q, k, v, s.live, s.block),
    )


def _pair_scores(s: Setting) -> Case:
    pairs = to_token_mask(s.live[:1], s.block)[0].nonzero()
    return Case(
        s.vectors("q", "k"),
        lambda q, k: (sparse_matmul(q, k, pairs),),
        lambda q, k: ((q @ k.mT)[..., pairs[:, 0], pairs[:, 1]],),
    )


def _sdd(s: Setting) -> Case:
    operation = MatMul(s.live, s.block, "sdd", trans_b=True)
    return Case(
        s.vectors("a", "b"),
        lambda a, b: (operation(a, b),),
        lambda a, b: (reference.matmul(a, b, s.live, s.block, "sdd", False, True),),
    )


def _dsd(s: Setting) -> Case:
    operation = MatMul(s.live, s.block, "dsd")
    return Case(
        {"a": s.values(), **s.vectors("b")},
        lambda a, b: (operation(a, b),),
        lambda a, b: (reference.matmul(a, b, s.live, s.block, "dsd", False, False),),
    )


def _softmax(s: Setting) -> Case:
    operation = Softmax(s.live, s.block)
    return Case(
        {"x": s.values(), "rpe": s.drawn(1, 1, s.tokens, s.tokens)},
        lambda x, rpe: (operation(x, rpe=rpe),),
        lambda x, rpe: (reference.softmax(x, s.live, s.block, s.heads, rpe=rpe),),
    )


def _window_matmul(s: Setting) -> Case:
    return Case(
        s.vectors("a", "b"),
        lambda a, b: (window_matmul(a, b.mT, WINDOW),),
        lambda a, b: (reference.window_matmul(a, b.mT, WINDOW),),
    )


def _unwindow_matmul(s: Setting) -> Case:
    return Case(
        {"p": s.bands(), **s.vectors("v")},
        lambda p, v: (ours_of_bands(p, v, WINDOW),),
        lambda p, v: (reference.unwindow_matmul(p, v, WINDOW),),
    )


def _window_softmax(s: Setting) -> Case:
    return Case(
        {"scores": s.bands()},
        lambda scores: (window_softmax(scores, WINDOW, causal=s.causal),),
        lambda scores: (reference.window_softmax(scores, (WINDOW,), causal=s.causal),),
    )


CASES: dict[str, Callable[[Setting], Case]] = {
    "block_sparse_attention": _block_attention,
    "packed attention": _packed_attention,
    "window_attention": _window_attention,
    "selected_attention": _selected_attention,
    "sparse_attn": _pair_attention,
    "sparse_matmul": _pair_scores,
    "sdd": _sdd,
    "dsd": _dsd,
    "Softmax": _softmax,
    "window_matmul": _window_matmul,
    "unwindow_matmul": _unwindow_matmul,
    "window_softmax": _window_softmax,
}
