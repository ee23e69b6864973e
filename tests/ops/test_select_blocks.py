"""The blocks that tokens take: those of plain Python, over documents, padding and positions."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import seeded
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import reference, select_blocks, selected_attention
from ds_sparse.index.kernels import SELECTION_OPERATORS

OPERATORS = SELECTION_OPERATORS


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = seeded()
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def sets_of(chosen: torch.Tensor) -> list[set[int]]:
    return [set(row.tolist()) - {-1} for row in chosen.flatten(0, -2)]


@pytest.mark.parametrize("case", range(24))
def test_random_calls_take_those_of_plain_python(device: str, case: int):
    draw = random.Random(case)
    key_heads, together = draw.choice([1, 2]), draw.choice([1, 3])
    tokens, keys = draw.choice([(1, 50), (37, 37), (20, 70), (33, 16)])
    options: dict[str, Any] = {
        "score": draw.choice(["mean", "max"]), "by_group": draw.random() < 0.5, "first": draw.choice([0, 1, 2]),
        "local": draw.choice([0, 1, 2]), "causal": draw.random() < 0.5,
        "query_offset": draw.choice([0, max(0, keys - tokens)]),
    }  # fmt: skip
    query, key = operands((2, key_heads * together, tokens, 8), (2, key_heads, keys, 8))
    count = draw.choice([5, 6, 9])
    mask = torch.rand(2, keys, generator=seeded()) < 0.6 if draw.random() < 0.4 else None
    wanted = reference.select_blocks(query, key, 16, count, key_padding_mask=mask, **options)
    mask = None if mask is None else mask.to(device)
    found = select_blocks(query.to(device), key.to(device), 16, count, key_padding_mask=mask, **options)
    assert found.dtype == torch.int32 and found.shape == wanted.shape
    assert sets_of(found.cpu()) == sets_of(wanted)
    assert all(len(row) == len(set(row) - {-1}) + row.count(-1) for row in found.flatten(0, -2).tolist())


@pytest.mark.parametrize("score", ["mean", "max"])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_are_calls_of_their_own(device: str, score: str, causal: bool):
    query, key = operands((90, 4, 8), (90, 2, 8))
    edges = [0, 20, 20, 57, 90]
    options: dict[str, Any] = {"score": score, "causal": causal, "by_group": True, "first": 1}
    found = select_blocks(
        query.to(device), key.to(device), 16, 2, cu_seqlens=torch.tensor(edges, device=device), **options
    )
    for begin, end in pairwise(edges):
        q, k = (x[begin:end].transpose(0, 1)[None] for x in (query, key))
        if end > begin:
            wanted = reference.select_blocks(q, k, 16, 2, **options)[0].transpose(0, 1)
            assert sets_of(found[begin:end].cpu()) == sets_of(wanted)


def test_an_offset_for_each_sequence(device: str):
    query, key = (x.to(device) for x in operands((2, 2, 5, 8), (2, 2, 80, 8)))
    offsets = torch.tensor([10, 60], device=device)
    found = select_blocks(query, key, 16, 3, causal=True, query_offset=offsets)
    for i in range(2):
        one = select_blocks(query[i : i + 1], key[i : i + 1], 16, 3, causal=True, query_offset=int(offsets[i]))
        assert torch.equal(found[i : i + 1], one)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_taken_scores_highest_in_each_dtype(device: str, dtype: torch.dtype):
    query, key = (x.to(device) for x in operands((1, 4, 64, 16), (1, 4, 512, 16), dtype=dtype))
    found = select_blocks(query, key, 32, 4, local=0)
    means = key.double().unflatten(2, (16, 32)).mean(3)
    scores = query.double() @ means.mT
    least = scores.gather(-1, found.long()).amin(-1)
    others = scores.scatter(-1, found.long(), -torch.inf).amax(-1)
    assert (others - least).max() < 0.05


def test_what_nobody_keeps_does_not_count(device: str):
    query, key = (x.to(device) for x in operands((1, 2, 64, 8), (1, 2, 64, 8), dtype=torch.float32))
    keep = torch.ones(1, 64, dtype=torch.bool, device=device)
    keep[0, 10:20] = keep[0, 32:48] = False
    spoiled = key.masked_fill(~keep[:, None, :, None], torch.nan)
    for score in ("mean", "max"):
        found = select_blocks(query, spoiled, 16, 4, score=score, key_padding_mask=keep)
        other = key.where(keep[:, None, :, None], 3)
        assert torch.equal(found, select_blocks(query, other, 16, 4, score=score, key_padding_mask=keep))
        assert not (found == 2).any() and (found == -1).sum() == found.numel() // 4


def test_autocast_leaves_the_scores_as_they_are(device: str):
    query, key = (x.to(device) for x in operands((1, 4, 200, 16), (1, 4, 200, 16), dtype=torch.float32))
    expected = select_blocks(query, key, 16, 3, causal=True)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(select_blocks(query, key, 16, 3, causal=True), expected)


def test_an_empty_batch(device: str):
    query, key = (x.to(device) for x in operands((0, 4, 20, 8), (0, 2, 20, 8)))
    assert select_blocks(query, key, 16, 3, by_group=True).shape == (0, 2, 20, 3)


def test_memory_is_bounded(device: str):
    """No matrix of all tokens by all keys."""
    query, key = (x.to(device) for x in operands((1, 8, 4096, 16), (1, 8, 4096, 16), dtype=torch.float32))
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else [result]:
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return result

    with Sizes():
        select_blocks(query, key, 64, 4, score="max", causal=True)
    assert largest <= 1 << 26 < 8 * 4096 * 4096


def test_choosing_and_attention_are_one_graph(device: str):
    query, key, value = (x.to(device) for x in operands((1, 4, 96, 16), *[(1, 2, 96, 16)] * 2, dtype=torch.float32))
    query.requires_grad_()

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        chosen = select_blocks(query, key, 16, 3, by_group=True, causal=True)
        return selected_attention(query, key, value, chosen, 16, causal=True)

    result, expected = (
        torch.compile(step, fullgraph=True, backend="aot_eager")(query, key, value),
        step(query, key, value),
    )
    torch.testing.assert_close(result, expected)
    grads = [torch.autograd.grad(x.sum(), query)[0] for x in (result, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"block": 24}, "block is 24; select_blocks takes 16, 32"),
        ({"score": "sum"}, "score is 'sum'; it has to be mean or max."),
        ({"count": 0}, "count is 0; it has to be an integer of 1 or more."),
        ({"local": True}, "local is True"),
        ({"first": 1, "local": 2}, "count is 2, and 4 blocks are forced by first and local"),
        ({"block": 16.0}, "block is 16.0; select_blocks takes"),
        ({"key": torch.zeros(1, 2, 8, 4).half()}, "key is torch.float16 and query torch.float32"),
        ({"key": torch.zeros(1, 2, 0, 4)}, "query has 8 tokens, and key 0; both need one or more."),
        ({"key_padding_mask": [[True] * 8]}, "key_padding_mask is a list"),
        (
            {"query": torch.zeros(2, 4, 8, 4), "key": torch.zeros(2, 2, 8, 4), "cu_seqlens": torch.tensor([0, 8])},
            "one row",
        ),
        ({"key": torch.zeros(1, 3, 8, 4)}, "query has 4 heads, and key 3"),
        ({"key": torch.zeros(1, 2, 8, 5)}, "they have to be (B, H, T, D)"),
        ({"key_padding_mask": torch.zeros(1, 8)}, "takes a bool one"),
        ({"key_padding_mask": torch.zeros(1, 9, dtype=torch.bool)}, "it has to be (1 or 1, 8)"),
        ({"query_offset": -1}, "query_offset is -1"),
        ({"cu_seqlens": torch.tensor([0, 8]), "query_offset": 1}, "leave them out"),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:20],
)
def test_errors(changes: dict[str, Any], sentence: str):
    given: dict[str, Any] = {"query": torch.zeros(1, 4, 8, 4), "key": torch.zeros(1, 2, 8, 4), "block": 16, "count": 2}
    with pytest.raises((TypeError, ValueError)) as caught:
        select_blocks(**given | changes)
    assert sentence in str(caught.value)
