"""A graph of torch.compile serves any length: no operation makes one of its own for each."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import leaf, random, seeded
from torch._dynamo.testing import CompileCounterWithBackend

from ds_sparse import (
    BlockIndex,
    MatMul,
    PackedIndex,
    Softmax,
    WindowIndex,
    block_sparse_attention,
    select_blocks,
    select_blocks_by_compression,
    selected_attention,
    window_attention,
)
from ds_sparse.index import kernels

OPERATORS = kernels.OPERATORS + kernels.INDEX_OPERATORS

LENGTHS = (121, 70, 90, 64, 49, 128, 200, 257, 96, 150)
BATCHES = tuple(range(11, 21))
"""More than torch.compile makes graphs for, before it gives up. Sizes that are equal in the first call it takes to be
always so: no index here has 11 of anything, on any device."""

MORE_KEYS = 37
CAUSAL: dict[str, Any] = {"causal": True}
GROUPS: dict[str, Any] = {"groups": 2, "local": 1, **CAUSAL}
COMPRESSION: dict[str, Any] = {"length": 16, "stride": 8, "first": 1, "local": 1, **CAUSAL}

Given = dict[str, torch.Tensor]


def inputs(tokens: int, device: str) -> Given:
    """Operands, and what else calls take, each of these calls some of it."""
    rng, blocks, keys = seeded(tokens), -(-tokens // 16), tokens + tokens // 3 + MORE_KEYS
    borders = [0, tokens // 5, tokens // 2, tokens]
    edges = torch.tensor([0, *(max(0, (end - first - 16) // 8 + 1) for first, end in pairwise(borders))])
    given = {
        "query": random(rng, 2, 4, tokens, 16, dtype=torch.float32),
        "key": random(rng, 2, 2, tokens, 16, dtype=torch.float32),
        "value": random(rng, 2, 2, tokens, 16, dtype=torch.float32),
        "cache": random(rng, 2, 2, keys, 16, dtype=torch.float32),
        "chosen": torch.randint(-1, blocks, (2, 2, tokens, 3), generator=rng),
        "blocks": torch.randint(-1, blocks, (2, 2, blocks, 2), generator=rng),
        "layout": torch.rand(4, blocks, blocks, generator=rng) < 0.5,
        "keep": torch.rand(2, tokens, generator=rng) < 0.8,
        "cu_seqlens": torch.tensor(borders, dtype=torch.int32),
        "edges": edges.cumsum(0),
        "compressed": random(rng, 1, 2, int(edges.sum()), 16, dtype=torch.float32),
        "offsets": torch.tensor([keys - tokens, 3]),
    }
    return {name: x.to(device) for name, x in given.items()}


def three(x: Given) -> tuple[torch.Tensor, ...]:
    return x["query"], x["key"], x["value"]


def row(x: Given) -> tuple[torch.Tensor, ...]:
    return x["query"][:1], x["key"][:1], x["value"][:1]


def cached(x: Given) -> tuple[torch.Tensor, ...]:
    return x["query"], x["cache"], x["cache"] * 2


def ahead(x: Given) -> int:
    """The position of the first query, where it is the last that have no keys behind them."""
    return x["cache"].shape[2] - x["query"].shape[2]


def compressed(key: torch.Tensor) -> torch.Tensor:
    return key.unfold(2, 16, 8).mean(-1)


SELECTED: dict[str, Callable[[Given], Any]] = {
    "causal": lambda x: selected_attention(*three(x), x["chosen"], 16, causal=True),
    "with lse": lambda x: selected_attention(*three(x), x["chosen"], 16, return_lse=True),
    "padding": lambda x: selected_attention(*three(x), x["chosen"], 16, causal=True, key_padding_mask=x["keep"]),
    "cached keys": lambda x: selected_attention(*cached(x), x["chosen"], 16, causal=True, query_offset=ahead(x)),
    "an offset a sequence": lambda x: selected_attention(
        *cached(x), x["chosen"], 16, causal=True, query_offset=x["offsets"]
    ),
    "documents": lambda x: selected_attention(*row(x), x["chosen"][:1], 16, cu_seqlens=x["cu_seqlens"]),
    "blocks chosen in the graph": lambda x: selected_attention(
        *three(x), select_blocks(x["query"], x["key"], 16, 4, **GROUPS), 16, causal=True
    ),
}
CHOICES: dict[str, Callable[[Given], Any]] = {
    "compression": lambda x: select_blocks_by_compression(x["query"], compressed(x["key"]), 16, 4, **COMPRESSION),
    "compression, cached keys": lambda x: select_blocks_by_compression(
        x["query"], compressed(x["cache"]), 16, 4, query_offset=ahead(x), **COMPRESSION
    ),
    "compression, padding": lambda x: select_blocks_by_compression(
        x["query"], compressed(x["key"]), 16, 4, key_padding_mask=x["keep"], **COMPRESSION
    ),
    "compression, documents": lambda x: select_blocks_by_compression(
        x["query"][:1], x["compressed"], 16, 4, cu_seqlens=x["cu_seqlens"], compressed_cu_seqlens=x["edges"],
        **COMPRESSION,
    ),
}  # fmt: skip
for _score in ("mean", "max"):
    _options: dict[str, Any] = {"score": _score, **GROUPS}
    CHOICES |= {
        _score: lambda x, o=_options: select_blocks(x["query"], x["key"], 16, 4, **o),
        f"{_score}, blocks of queries": lambda x, o=_options: select_blocks(
            x["query"], x["key"], 16, 4, query_block=16, **o
        ),
        f"{_score}, cached keys": lambda x, o=_options: select_blocks(
            x["query"], x["cache"], 16, 4, query_offset=ahead(x), **o
        ),
        f"{_score}, an offset a sequence": lambda x, o=_options: select_blocks(
            x["query"], x["cache"], 16, 4, query_offset=x["offsets"], **o
        ),
        f"{_score}, padding": lambda x, o=_options: select_blocks(
            x["query"], x["key"], 16, 4, key_padding_mask=x["keep"], **o
        ),
        f"{_score}, documents": lambda x, o=_options: select_blocks(
            x["query"][:1], x["key"][:1], 16, 4, cu_seqlens=x["cu_seqlens"], **o
        ),
    }


def in_blocks(build: Callable[[Given], BlockIndex], **options: Any) -> Callable[[Given], Any]:
    return lambda x: block_sparse_attention(*three(x), build(x), **options)


def of_documents(device: str) -> dict[str, Callable[[Given], Any]]:
    index = BlockIndex.build(torch.rand(4, 24, 24, generator=seeded()) < 0.6, 16).to(device)
    return {
        "an index": lambda x: block_sparse_attention(*row(x), index, cu_seqlens=x["cu_seqlens"], causal=True),
        "a packed index with lse": lambda x: block_sparse_attention(
            *row(x), PackedIndex.build(index, x["cu_seqlens"], tokens=x["query"].shape[2]), return_lse=True
        ),
        "the layout of the row": lambda x: block_sparse_attention(
            *row(x), index, cu_seqlens=x["cu_seqlens"], document_layout="row"
        ),
        "a window": lambda x: window_attention(*row(x), 16, cu_seqlens=x["cu_seqlens"]),
        "a window of more than some rows": lambda x: window_attention(
            *row(x), WindowIndex.build(x["query"].shape[2], 100, block=16, device=device, cu_seqlens=x["cu_seqlens"])
        ),
        "a window a head": lambda x: window_attention(*row(x), [3, 9, 9, 9], True, cu_seqlens=x["cu_seqlens"]),
    }


BLOCKS: dict[str, Callable[[Given], Any]] = {
    "from_blocks": in_blocks(lambda x: BlockIndex.from_blocks(x["blocks"], 16)),
    "from_blocks, causal": in_blocks(lambda x: BlockIndex.from_blocks(x["blocks"], 16).causal(), causal=True),
    "from_blocks of select_blocks": in_blocks(
        lambda x: BlockIndex.from_blocks(select_blocks(x["query"], x["key"], 16, 4, query_block=16, **GROUPS), 16)
    ),
    "build": in_blocks(lambda x: BlockIndex.build(x["layout"], 16)),
    "build with capacity": in_blocks(lambda x: BlockIndex.build(x["layout"], 16, capacity=2000), return_lse=True),
}


def check(call: Callable[[Given], Any], given: Callable[[int], Given], lengths: tuple[int, ...], graphs: int) -> None:
    """Results and gradients of one compiled function are those of eager, of all lengths in so many graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for length in lengths:
        results, grads = [], []
        for function in (call, compiled):
            mine = {name: leaf(x, x.device) if x.is_floating_point() else x for name, x in given(length).items()}
            result = function(mine)
            results.append(result if isinstance(result, tuple) else (result,))
            differentiable = [x for x in results[-1] if x.requires_grad]
            leaves = [x for x in mine.values() if x.requires_grad]
            loss = sum(x.masked_fill(x.isinf(), 0).sin().sum() for x in differentiable)
            grads.append(torch.autograd.grad(loss, leaves, allow_unused=True) if differentiable else ())
        torch.testing.assert_close(*results)
        for x, y in zip(*grads, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y)
    assert counter.frame_count <= graphs


@pytest.mark.parametrize("name", SELECTED)
def test_selected_attention_is_one_graph(device: str, name: str):
    check(SELECTED[name], lambda tokens: inputs(tokens, device), LENGTHS, 1)


@pytest.mark.parametrize("name", CHOICES)
def test_choosing_blocks_is_one_graph(device: str, name: str):
    check(CHOICES[name], lambda tokens: inputs(tokens, device), LENGTHS, 1)


@pytest.mark.parametrize("name", BLOCKS)
def test_an_index_that_is_built_in_the_graph(device: str, name: str):
    """torch.compile takes dropout_p, a float, for a symbol first, and begins once more."""
    check(BLOCKS[name], lambda tokens: inputs(tokens, device), LENGTHS, 2)


@pytest.mark.parametrize("name", of_documents("cpu"))
def test_packed_documents(device: str, name: str):
    check(of_documents(device)[name], lambda tokens: inputs(tokens, device), LENGTHS, 2)


def of_batch(batch: int, device: str) -> Given:
    rng, shapes = seeded(batch), {"query": (4, 96, 16), "key": (2, 96, 16), "value": (2, 96, 16)}
    given = {name: random(rng, batch, *shape, dtype=torch.float32) for name, shape in shapes.items()}
    given["blocks"] = torch.randint(-1, 6, (batch, 2, 6, 2), generator=rng)
    return {name: x.to(device) for name, x in given.items()}


def test_layouts_of_any_number_of_sequences(device: str):
    """Of an index that is built in the graph; one from outside is of so many."""
    check(BLOCKS["from_blocks"], lambda batch: of_batch(batch, device), BATCHES, 2)
    layouts = torch.rand(BATCHES[0], 4, 6, 6, generator=seeded()) < 0.5
    index = BlockIndex.build(layouts, 16).to(device)
    check(in_blocks(lambda _: index), lambda batch: of_batch(batch, device), BATCHES[:1], 2)


def test_kept_indices_serve_any_batch(device: str):
    layout = BlockIndex.build(torch.rand(4, 6, 6, generator=seeded()) < 0.5, 16).to(device)
    sdd, dsd = MatMul(layout, 16, "sdd", trans_b=True), MatMul(layout, 16, "dsd")
    softmax, window = Softmax(layout, 16), WindowIndex.build(96, 5, device=device)

    def step(x: Given) -> tuple[torch.Tensor, ...]:
        query = x["query"]
        return dsd(softmax(sdd(query, query), scale=0.25), query), window_attention(*three(x), window)

    for call in (step, in_blocks(lambda _: layout)):
        check(call, lambda batch: of_batch(batch, device), BATCHES, 2)
