"""select_blocks and select_blocks_by_compression beside their statements, and what they promise of memory, graphs and
transforms."""

from __future__ import annotations

import math
import random as python_random
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import captured, nothing_waits, random, seeded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ds_sparse import (
    BlockIndex,
    block_sparse_attention,
    reference,
    select_blocks,
    select_blocks_by_compression,
    selected_attention,
)

OPERATORS = ("index_documents",)  # what a GPU alone has besides, tests/ops/test_library.py asks for

MODULE = import_module("ds_sparse.ops.block_selection")


def operands(
    tokens: int, keys: int, heads: int = 4, key_heads: int = 2, batch: int = 2, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    shapes = (batch, heads, tokens, 8), (batch, key_heads, keys, 8)
    return [random(seeded(i), *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def moved(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


def on(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {name: moved(x, device) for name, x in options.items()}


def hold(device: str, query: torch.Tensor, key: torch.Tensor, block: int, k: int, **options: Any) -> torch.Tensor:
    """Compares with the statement, and returns what is chosen."""
    found = select_blocks(query.to(device), key.to(device), block, k, **on(device, options))
    expected = reference.select_blocks(query.double(), key.double(), block, k, **options)
    assert found.dtype == torch.int32 and found.device.type == device
    assert torch.equal(found.cpu(), expected), options
    return expected


def hold_compressed(
    device: str, query: torch.Tensor, compressed: torch.Tensor, block: int, k: int, **options: Any
) -> torch.Tensor:
    found = select_blocks_by_compression(query.to(device), compressed.to(device), block, k, **on(device, options))
    expected = reference.select_blocks_by_compression(query.double(), compressed.double(), block, k, **options)
    assert torch.equal(found.cpu(), expected), options
    return expected


def choice(seed: int) -> tuple[python_random.Random, dict[str, Any], int]:
    """Numbers for a random call: some options, and the least k."""
    draw = python_random.Random(seed)
    causal, first, local = draw.random() < 0.6, draw.choice([0, 0, 1, 2]), draw.choice([0, 1, 2])
    forced = first + ((local if causal else 2 * local - 1) if local else 0)
    return draw, {"causal": causal, "first": first, "local": local}, forced


@pytest.mark.parametrize("score", ["mean", "max"])
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(device: str, seed: int, score: str):
    """Lengths, short last blocks, groups, padding and positions; fewer blocks than k."""
    draw, options, forced = choice(seed)
    key_heads, batch, keys = draw.choice([1, 2]), draw.choice([1, 2]), draw.randint(1, 60)
    heads = key_heads * draw.choice([1, 2, 3])
    query, key = operands(draw.randint(1, 40), keys, heads, key_heads, batch, torch.float32)
    offsets = torch.tensor([draw.randint(0, 30) for _ in range(batch)])
    options["query_offset"] = draw.choice([0, draw.randint(0, 30), offsets, offsets.int()])
    options["groups"] = draw.choice([None, 1, key_heads, heads])
    if draw.random() < 0.5:
        kept = torch.rand(draw.choice([1, batch]), keys, generator=seeded(seed)) < draw.choice([0.9, 0.5, 0.1])
        options["key_padding_mask"] = kept
    hold(
        device, query, key, draw.choice([4, 8, 16, 5]), max(1, forced) + draw.choice([0, 1, 6]), score=score, **options
    )


@pytest.mark.parametrize("score", ["mean", "max"])
@pytest.mark.parametrize("query_block", [2, 8, 16, 48])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_queries(device: str, causal: bool, query_block: int, score: str):
    query, key = operands(53, 101)
    for offset, local in ((0, 0), (48, 1), (48, 2)):
        options = {"score": score, "causal": causal, "local": local, "query_block": query_block, "first": 1}
        chosen = hold(device, query, key, 8, 12, query_offset=offset, groups=2, **options)
        assert chosen.shape == (2, 2, -(-53 // query_block), 12)


@pytest.mark.parametrize("seed", range(40))
def test_random_calls_by_compression(device: str, seed: int):
    draw, options, forced = choice(seed)
    stride, key_heads, batch = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2])
    length, block, offset = stride * draw.choice([1, 2, 3]), stride * draw.choice([1, 2, 4]), draw.choice([0, 7, 20])
    heads, tokens = key_heads * draw.choice([1, 2]), draw.randint(length, 45)
    keys = tokens + offset
    query, compressed = operands(tokens, (keys - length) // stride + 1, heads, key_heads, batch)
    if draw.random() < 0.5:
        kept = torch.rand(draw.choice([1, batch]), keys, generator=seeded(seed)) < 0.9
        options["key_padding_mask"] = kept
    if draw.random() < 0.3:
        options["query_offset"] = torch.tensor([offset] * batch)
    else:
        options["query_offset"] = offset
    options |= {"length": length, "stride": stride, "keys": keys, "groups": draw.choice([None, 1, heads])}
    options["scale"] = draw.choice([None, 0.1, -0.3])  # larger ones leave shares that fp32 cannot tell apart
    hold_compressed(device, query, compressed, block, max(1, forced) + draw.choice([0, 1, 4]), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [3, 40])
def test_compressed_keys_that_reach_beyond_the_keys_are_none(device: str, tokens: int, causal: bool):
    """More of them than whole ones, as of a row that was padded; a mask that keeps all says no other."""
    query, compressed = operands(tokens, 12)
    options: dict[str, Any] = {"length": 8, "stride": 4, "keys": 22, "causal": causal, "query_offset": 7}
    chosen = hold_compressed(device, query, compressed, 8, 3, **options)
    options["key_padding_mask"] = torch.ones(1, 22, dtype=torch.bool)
    assert torch.equal(hold_compressed(device, query, compressed, 8, 3, **options), chosen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("score", ["mean", "max"])
def test_dtypes(device: str, score: str, dtype: torch.dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for CPUs")
    query, key = operands(40, 40, dtype=dtype)
    hold(device, query, key, 8, 3, score=score, causal=True, local=1)
    hold_compressed(device, query, key[:, :, :9], 8, 3, length=8, stride=4, keys=40, causal=True, local=1)


@pytest.mark.parametrize("score", ["mean", "max"])
def test_of_equal_scores_the_lower_block_comes_first(device: str, score: str):
    query, key = torch.ones(1, 1, 48, 1), torch.ones(1, 1, 48, 1)
    chosen = hold(device, query, key, 8, 4, score=score)
    assert torch.equal(chosen, torch.arange(4, dtype=torch.int32).expand(1, 1, 48, 4))
    key[:, :, 16:24], key[:, :, 40:] = 2, 2
    assert hold(device, query, key, 8, 4, score=score)[0, 0, 0].tolist() == [2, 5, 0, 1]
    chosen = hold(device, query, key, 8, 4, score=score, first=1, local=2, causal=True)
    assert chosen[0, 0, -1].tolist() == [0, 4, 5, 2]  # the forced first, by number
    assert chosen[0, 0, 10].tolist() == [0, 1, -1, -1]
    zeros = torch.zeros(1, 1, 48, 1)
    zeros[:, :, 8:16] = -0.0
    assert hold(device, query, zeros, 8, 6, score=score)[0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_scores_of_every_size_are_ordered(device: str):
    """Down to -inf, which is a score; NaN counts as infinity."""
    of_blocks = [1e-40, -1e-40, 3e38, -3e38, math.inf, -math.inf, 0.0, 1.0]
    query, key = torch.ones(1, 1, 1, 1, device=device), torch.tensor(of_blocks, device=device).reshape(1, 1, -1, 1)
    for score in ("mean", "max"):
        assert select_blocks(query, key, 1, 8, score=score).flatten().tolist() == [4, 2, 7, 0, 6, 1, 3, 5]
    key[:, :, 6] = math.nan
    assert select_blocks(query, key, 1, 3, score="max", first=1).flatten().tolist() == [0, 4, 6]


@pytest.mark.parametrize("borders", [[0, 40], [0, 1, 17, 17, 40], [0, 16, 32, 40], [0, 0, 39, 40]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("score", ["mean", "max"])
def test_packed_documents(device: str, score: str, causal: bool, borders: list[int]):
    """As separate calls, in both forms."""
    query, key = (x[0].transpose(0, 1) for x in operands(40, 40))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    options = {"score": score, "causal": causal, "first": 1, "local": 1, "cu_seqlens": cu_seqlens, "groups": 2}
    expected = hold(device, query, key, 8, 3, **options)
    assert expected.shape == (40, 2, 3)
    row = (x.transpose(0, 1)[None].to(device) for x in (query, key))
    found = select_blocks(*row, 8, 3, **on(device, options))
    assert torch.equal(found.cpu(), expected.transpose(0, 1)[None])


@pytest.mark.parametrize(("causal", "of_last"), [(False, 0), (True, 0), (True, 1)])
def test_packed_documents_by_compression(device: str, causal: bool, of_last: int):
    """of_last: documents may have a compressed key of what is left at their end, which no causal query sees."""
    borders, length, stride = [0, 3, 20, 20, 48, 61], 8, 4
    counts = [max(0, (end - begin - length) // stride + 1 + of_last) for begin, end in pairwise(borders)]
    edges = [sum(counts[:n]) for n in range(len(borders))]
    query, compressed = operands(borders[-1], edges[-1], batch=1)
    options: dict[str, Any] = {"length": length, "stride": stride, "causal": causal, "first": 1, "local": 1}
    found = select_blocks_by_compression(
        query[0].transpose(0, 1).to(device), compressed[0].transpose(0, 1).to(device), 8, 3,
        cu_seqlens=torch.tensor(borders, device=device), compressed_cu_seqlens=torch.tensor(edges, device=device),
        **options,
    )  # fmt: skip
    for (begin, end), (a, b) in zip(pairwise(borders), pairwise(edges), strict=True):
        if begin < end:
            of_one = query[:, :, begin:end].double(), compressed[:, :, a:b].double()
            expected = reference.select_blocks_by_compression(*of_one, 8, 3, keys=end - begin, **options)
            assert torch.equal(found[begin:end].cpu(), expected[0].transpose(0, 1))


@pytest.mark.parametrize("score", ["mean", "max"])
def test_dead_keys_may_hold_anything(device: str, score: str):
    query, key = (x.to(device) for x in operands(40, 56))
    keep = torch.rand(2, 56, generator=seeded(3)) < 0.7
    keep[:, 24:32] = False
    keep = keep.to(device)
    options: dict[str, Any] = {"score": score, "key_padding_mask": keep, "causal": True, "query_offset": 16}
    expected = select_blocks(query, key, 8, 8, local=1, **options)
    assert not (expected == 3).any()
    poisoned = key.masked_fill(~keep[:, None, :, None], math.nan)
    assert torch.equal(select_blocks(query, poisoned, 8, 8, local=1, **options), expected)
    early = select_blocks(query[:, :, :8], key, 8, 8, local=1, **options)
    poisoned[:, :, 24:] = math.inf  # ahead of these
    assert torch.equal(select_blocks(query[:, :, :8], poisoned, 8, 8, local=1, **options), early)
    options["key_padding_mask"] = torch.zeros_like(keep, dtype=torch.float32).masked_fill(~keep, -math.inf)
    assert torch.equal(select_blocks(query, key, 8, 8, local=1, **options), expected)


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sums of their products are exact in any order, and many are equal."""
    return torch.randint(-2, 3, shape, generator=seeded(seed)).to(dtype)


def hold_on_gpu(device: str, call: Any, operands: list[torch.Tensor], options: dict[str, Any]) -> None:
    """A GPU chooses what a CPU chooses, of which tests compare with the statement."""
    if device == "cpu":
        pytest.skip("the expected result")
    found = call(*(x.to(device) for x in operands), **on(device, options))
    assert torch.equal(found.cpu(), call(*operands, **options)), options


@pytest.mark.parametrize("score", ["mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_a_gpu_chooses_what_a_cpu_does(device: str, seed: int, dtype: torch.dtype, score: str):
    """Head sizes, blocks, groups, padding, positions and lengths of some tiles; NaN and infinities among the keys."""
    draw, options, forced = choice(seed)
    key_heads, batch, keys = draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([1, 70, 700, 1300])
    depth, block = draw.choice([8, 40, 64, 72, 128, 256]), draw.choice([8, 16, 24, 64, 72, 512])
    heads, tokens = key_heads * draw.choice([1, 2, 4]), draw.choice([1, 100, 129, 300])
    query = integers(seed, batch, heads, tokens, depth, dtype=dtype)
    key = integers(seed + 1, batch, keys, key_heads, depth, dtype=dtype).transpose(1, 2)
    if draw.random() < 0.3:
        key[:, :, draw.randrange(keys), 0] = draw.choice([math.nan, math.inf])
    offsets = torch.tensor([draw.randint(0, keys) for _ in range(batch)])
    options["query_block"] = draw.choice([1, 1, 1, block, block // 4])
    options["query_offset"] = 0
    if options["query_block"] == 1:
        options["query_offset"] = draw.choice([0, draw.randint(0, keys), offsets])
    if draw.random() < 0.5:
        kept = torch.rand(draw.choice([1, batch]), keys, generator=seeded(seed)) < draw.choice([0.9, 0.1])
        options["key_padding_mask"] = kept
    options |= {"groups": draw.choice([None, 1, heads]), "score": score}
    k = max(1, forced) + draw.choice([0, 2, 15, 30, 100])
    hold_on_gpu(device, lambda q, key, **o: select_blocks(q, key, block, k, **o), [query, key], options)


@pytest.mark.parametrize("score", ["mean", "max"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [8, 64])
def test_a_gpu_chooses_in_packed_documents_what_a_cpu_does(device: str, block: int, causal: bool, score: str):
    operands = [integers(n, 1, heads, 700, 72, dtype=torch.bfloat16) for n, heads in enumerate((4, 2))]
    cu_seqlens = torch.tensor([0, 3, 3, 200, 264, 700])
    options = {"score": score, "causal": causal, "first": 1, "local": 1, "cu_seqlens": cu_seqlens, "groups": 2}
    hold_on_gpu(device, lambda q, k, **o: select_blocks(q, k, block, 6, **o), operands, options)


@pytest.mark.parametrize("columns", [1, 32, 33, 100, 129, 400, 513, 1025, 2049, 4097, 9000])
@pytest.mark.parametrize("k", [1, 16, 17, 64, 300, 5000])
def test_any_number_of_blocks_is_chosen_of_any(device: str, columns: int, k: int):
    """Scores of every size, many of them equal."""
    key = integers(columns, 1, 1, columns, 1)
    key[:, :, ::7] *= 1e-40
    key[:, :, 1::11] *= -0.0
    key[:, :, 2::13] = math.inf
    key[:, :, 3::17] = math.nan
    for n, query in enumerate((torch.ones(1, 2, 3, 1), -torch.ones(1, 2, 3, 1))):
        options = {"score": "max", "causal": bool(n), "query_offset": columns - 3 if n and columns > 3 else 0}
        hold_on_gpu(device, lambda q, key, **o: select_blocks(q, key, 1, k, **o), [query, key], options)


@pytest.mark.parametrize("align", [0, 1])
def test_operands_may_lie_anyhow(device: str, align: int):
    """Tokens that do not begin at multiples of 16 bytes are copied, and of a row of heads each is read where it is."""
    query, key = (integers(n, 2, 130, 2, 41, dtype=torch.float16).to(device)[..., align : align + 40] for n in (1, 2))
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    for score in ("mean", "max"):
        options: dict[str, Any] = {"score": score, "causal": True, "local": 1}
        expected = select_blocks(query.contiguous(), key.contiguous(), 16, 4, **options)
        assert torch.equal(select_blocks(query, key, 16, 4, **options), expected)


def test_a_query_chooses_the_same_while_decoding(device: str):
    """What is behind a query decides: all at once, in pieces, and one by one."""
    query, key = (x.to(device) for x in operands(45, 45))
    compressed = key[:, :, : (45 - 8) // 4 + 1].clone()
    whole = {score: select_blocks(query, key, 8, 3, score=score, causal=True, local=1) for score in ("mean", "max")}
    by_compression = select_blocks_by_compression(query, compressed, 8, 3, length=8, stride=4, causal=True, local=1)
    for begin, end in ((0, 45), (44, 45), (13, 14), (16, 31)):
        of_keys = key[:, :, :end]
        for score, expected in whole.items():
            found = select_blocks(
                query[:, :, begin:end], of_keys, 8, 3, score=score, causal=True, local=1, query_offset=begin
            )
            assert torch.equal(found, expected[:, :, begin:end])
        found = select_blocks_by_compression(
            query[:, :, begin:end], compressed, 8, 3, length=8, stride=4, causal=True, local=1, query_offset=begin
        )
        assert torch.equal(found, by_compression[:, :, begin:end])


def test_what_is_chosen_goes_to_attention(device: str):
    query, key = (x.to(device) for x in operands(64, 64))
    chosen = select_blocks(query, key, 16, 2, groups=2, causal=True, local=1)
    assert selected_attention(query, key, key, chosen, 16, causal=True).isfinite().all()
    rows = select_blocks(query, key, 16, 2, score="max", groups=2, query_block=16, local=1)
    index = BlockIndex.from_blocks(rows, 16)
    each = selected_attention(query, key, key, rows.repeat_interleave(16, 2), 16)
    torch.testing.assert_close(block_sparse_attention(query, key, key, index), each)


class Sizes(TorchDispatchMode):
    """The largest results of operators, in numbers and in bytes."""

    numbers = nbytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for x in results if isinstance(results, tuple | list) else [results]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return results


@pytest.mark.parametrize("kind", ["mean", "max", "compression"])
@pytest.mark.parametrize("query_block", [1, 16])
def test_memory_is_linear_in_tokens(device: str, kind: str, query_block: int, monkeypatch: pytest.MonkeyPatch):
    """No tensor is larger than the scores that are held at a time, or than query and key."""
    if kind == "compression" and query_block > 1:
        pytest.skip("there each token chooses")
    tokens, most = 4096, 2**17
    monkeypatch.setattr(MODULE, "MOST_SCORES", most)
    query, key = (x.to(device) for x in operands(tokens, tokens, 2, 1, 1))
    monkeypatch.setattr(MODULE, "ops", PlainOperators)
    with Sizes() as sizes:
        if kind == "compression":
            chosen = select_blocks_by_compression(query, key[:, :, ::4], 16, 4, length=4, stride=4, causal=True)
        else:
            chosen = select_blocks(query, key, 16, 4, score=kind, causal=True, query_block=query_block)
    assert chosen.shape[2] == tokens // query_block
    linear = query.numel()
    assert linear <= most
    assert 0 < sizes.numbers <= most and sizes.nbytes <= 8 * most
    assert most < tokens * tokens // 8


@pytest.mark.parametrize("keys", [61, 64, 100])
def test_rows_of_products_with_compressed_keys_are_whole_16_bytes(keys: int, monkeypatch: pytest.MonkeyPatch):
    """A GPU's matrix products are slow where they are not."""
    monkeypatch.setattr(MODULE, "ops", PlainOperators)
    widths = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            if operator is torch.ops.aten.bmm.default:
                widths.append(result.shape[-1])
            return result

    query, key = operands(keys, keys)
    compressed = key[:, :, : (keys - 8) // 4 + 1]
    with Products():
        select_blocks_by_compression(query, compressed, 16, 3, length=8, stride=4, causal=True)
    assert widths and not any(width % 8 for width in widths)


@pytest.mark.parametrize("most", [500, 3000, 20000])
def test_fewer_queries_of_more_keys_are_scored_at_a_time(most: int, monkeypatch: pytest.MonkeyPatch):
    """Early causal queries see few compressed keys: as many numbers are those of more queries."""
    monkeypatch.setattr(MODULE, "MOST_SCORES", most)
    monkeypatch.setattr(MODULE, "ops", PlainOperators)
    rows = []
    best = MODULE.Chooser._best
    monkeypatch.setattr(MODULE.Chooser, "_best", lambda *x: rows.append(x[4] - x[3]) or best(*x))
    query, key = operands(512, 512, 2, 1, 1)
    select_blocks_by_compression(query, key[:, :, ::4], 16, 4, length=4, stride=4, causal=True)
    assert sum(rows) == 512
    at_least = max(1, most // (2 * 128))
    assert rows[0] > at_least and all(x >= at_least for x in rows[:-1])


class PlainOperators:
    """The operators of the module as what they run, into which modes can look."""

    @staticmethod
    def _called(name: str, *call: Any) -> torch.Tensor:
        operators = import_module("ds_sparse.ops.operators")
        names = [x.name for x in getattr(operators.ops, name).default._schema.arguments]
        return operators.OPERATORS[name].run(operators.Arguments(**dict(zip(names, call))))

    @classmethod
    def select_blocks(cls, *call: Any) -> torch.Tensor:
        return cls._called("select_blocks", *call)

    @classmethod
    def select_blocks_by_compression(cls, *call: Any) -> torch.Tensor:
        return cls._called("select_blocks_by_compression", *call)

    @staticmethod
    def block_maxima(*call: Any) -> torch.Tensor:
        return torch.ops.ds_sparse.block_maxima(*call)

    @staticmethod
    def choose_blocks(*call: Any) -> torch.Tensor:
        return torch.ops.ds_sparse.choose_blocks(*call)


@pytest.mark.parametrize("kind", ["mean", "max", "compression"])
def test_few_queries_at_a_time_choose_the_same(device: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    query, key = (x.to(device) for x in operands(61, 61))
    keep = torch.rand(2, 61, generator=seeded()).to(device) < 0.8

    def choose() -> list[torch.Tensor]:
        options: dict[str, Any] = {"causal": True, "local": 1, "key_padding_mask": keep}
        if kind == "compression":
            return [select_blocks_by_compression(query, key[:, :, :14], 8, 4, length=8, stride=4, **options)]
        return [select_blocks(query, key, 8, 4, score=kind, query_block=n, **options) for n in (1, 4, 16)]

    expected = choose()
    for most in (1, 1000, 5000):
        monkeypatch.setattr(MODULE, "MOST_SCORES", most)
        assert all(map(torch.equal, choose(), expected))


def calls(device: str) -> dict[str, Any]:
    """Calls of query and key (2, H, 40, 8)."""
    keep, offsets = torch.rand(2, 40, generator=seeded()).to(device) < 0.8, torch.tensor([3, 0], device=device)
    borders, edges = torch.tensor([0, 17, 40], device=device), torch.tensor([0, 3, 8], device=device)
    return {
        "mean": lambda q, k: select_blocks(q, k, 8, 3, causal=True, local=1, key_padding_mask=keep),
        "max": lambda q, k: select_blocks(q, k, 8, 3, score="max", causal=True, query_offset=offsets, groups=2),
        "blocks": lambda q, k: select_blocks(q, k, 8, 3, score="max", query_block=16, local=1),
        "compression": lambda q, k: select_blocks_by_compression(
            q, k[:, :, :9], 8, 3, length=8, stride=4, causal=True, local=1, key_padding_mask=keep
        ),
        "documents": lambda q, k: select_blocks(q[:1], k[:1], 8, 3, causal=True, cu_seqlens=borders),
        "documents by compression": lambda q, k: select_blocks_by_compression(
            q[:1], k[:1, :, :8], 8, 3, length=8, stride=4, cu_seqlens=borders, compressed_cu_seqlens=edges
        ),
    }


CALLS = list(calls("cpu"))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiles_into_one_graph(device: str, name: str, dynamic: bool | None):
    torch._dynamo.reset()
    query, key = (x.to(device).requires_grad_() for x in operands(40, 40))
    call = calls(device)[name]
    compiled = torch.compile(lambda q, k: call(q * 2, k), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(query, key), call(query * 2, key))


@pytest.mark.parametrize("name", CALLS)
def test_a_cuda_graph_chooses_anew(device: str, name: str):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    query, key = (x.to(device) for x in operands(40, 40))
    call = calls(device)[name]
    with nothing_waits():
        call(query, key)
    graph, chosen = captured(lambda: call(query, key))
    query.copy_(-query)
    graph.replay()
    assert torch.equal(chosen, call(query, key))


@pytest.mark.parametrize("name", CALLS)
def test_it_has_no_gradient_and_transforms_see_through(device: str, name: str):
    query, key = (x.to(device) for x in operands(40, 40))
    call = calls(device)[name]
    expected = call(query, key)
    found = call(query.clone().requires_grad_(), key.clone().requires_grad_())
    assert torch.equal(found, expected) and not found.requires_grad
    seen = []

    def loss(q: torch.Tensor) -> torch.Tensor:
        seen.append(call(q, key))
        return q.sum()

    grad(loss)(query)
    assert torch.equal(seen[0], expected)
    samples = torch.stack([query, -query])
    found = vmap(call, in_dims=(0, None))(samples, key)
    assert torch.equal(found, torch.stack([expected, call(-query, key)]))


@pytest.mark.parametrize("name", [name for name in CALLS if "documents" not in name])
def test_operators_pass_the_checks_of_pytorch(name: str):
    given: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "ds_sparse":
                given.append((operator, args))
            return operator(*args, **(kwargs or {}))

    with Recorder():
        calls("cpu")[name](*operands(40, 40))
    assert len(given) == 1
    torch.library.opcheck(*given[0])


def test_tensors_without_values_give_the_shape():
    query, key = operands(40, 40)
    for name in ("mean", "blocks", "compression"):
        expected = calls("cpu")[name](query, key)
        found = calls("meta")[name](query.to("meta", torch.bfloat16), key.to("meta", torch.bfloat16))
        assert (found.device.type, found.shape, found.dtype) == ("meta", expected.shape, torch.int32)
    with FakeTensorMode():
        chosen = select_blocks(torch.empty(1, 4, 100, 8), torch.empty(1, 2, 200, 8), 16, 5, groups=2, query_block=8)
    assert chosen.shape == (1, 2, 13, 5)


def test_autocast_casts_the_operands_and_no_sum(device: str):
    query, key = (x.to(device) for x in operands(40, 64))
    for score in ("mean", "max"):
        expected = select_blocks(query.bfloat16(), key.bfloat16(), 8, 3, score=score)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert torch.equal(select_blocks(query, key, 8, 3, score=score), expected)


def test_flops_are_those_of_products():
    query, key = operands(40, 64)
    for score, count in (("mean", 8), ("max", 64)):
        with FlopCounterMode(display=False) as counter:
            select_blocks(query, key, 8, 3, score=score)
        assert counter.get_total_flops() == 2 * 2 * 4 * 40 * 8 * count


def test_empty_batches(device: str):
    query, key = (x[:0].to(device) for x in operands(40, 64))
    assert select_blocks(query, key, 8, 3).shape == (0, 4, 40, 3)
    assert select_blocks(query, key, 8, 3, score="max", groups=2).shape == (0, 2, 40, 3)


REFUSED = {
    "score is 'sum'; it has to be 'mean' or 'max'": {"score": "sum"},
    r"k is 2, and first=1 and local=2 choose 3 blocks; give k=3 or more": {
        "k": 2, "first": 1, "local": 2, "causal": True
    },
    r"k is 2, and first=1 and local=2 choose 4 blocks": {"k": 2, "first": 1, "local": 2},
    "k is 0; it has to be an integer of 1 or more": {"k": 0},
    "block is True; it has to be an integer": {"block": True},
    "block is '8'; it has to be an integer": {"block": "8"},
    r"local is -1; it has to be an integer of 0 or more": {"local": -1},
    r"groups is 3; it has to be a divisor of query's 4 heads": {"groups": 3},
    r"query_block is 12 and block 8; one has to be a multiple of the other": {"query_block": 12},
    r"query_offset is 5; a block of 8 queries begins at a multiple of that": {"query_block": 8, "query_offset": 5},
    r"query_offset is -1; it is the position of the first query": {"query_offset": -1},
    r"key_padding_mask has shape \(2, 3\)": {"key_padding_mask": torch.ones(2, 3, dtype=torch.bool)},
    r"query_offset is given for packed documents": {"cu_seqlens": torch.tensor([0, 40]), "query_offset": 3},
    r"query_block is 8; of packed documents each token chooses": {
        "cu_seqlens": torch.tensor([0, 40]), "query_block": 8
    },
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused(sentence: str):
    options = {"block": 8, "k": 4} | REFUSED[sentence]
    with pytest.raises(ValueError, match=sentence):
        select_blocks(*operands(40, 40), **options)


def test_operands_that_do_not_fit_are_refused():
    query, key = operands(40, 40)
    with pytest.raises(TypeError, match="key is a list; it has to be a tensor"):
        select_blocks(query, [1], 8, 2)
    with pytest.raises(ValueError, match=r"key is torch.float64 and query torch.float32; give all the same dtype"):
        select_blocks(query, key.double(), 8, 2)
    with pytest.raises(ValueError, match=r"Shapes are query .*, key .*; they have to be \(batch, heads, tokens"):
        select_blocks(query, key[..., :4], 8, 2)
    with pytest.raises(ValueError, match=r"query has 4 heads and key 3; they have to be a multiple of key's"):
        select_blocks(query, torch.randn(2, 3, 40, 8), 8, 2)
    with pytest.raises(TypeError, match="query_offset is None; it has to be an integer"):
        select_blocks(query, key, 8, 2, query_block=8, query_offset=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block is 24; of packed documents it has to be a power of two"):
        select_blocks(query[:1], key[:1], 24, 2, cu_seqlens=torch.tensor([0, 40]))
    with pytest.raises(ValueError, match=r"The documents of cu_seqlens end at 39, and query has 40"):
        select_blocks(query[:1], key[:1], 8, 2, cu_seqlens=torch.tensor([0, 39]))


def test_compression_that_does_not_fit_is_refused():
    query, key = operands(40, 9)
    with pytest.raises(ValueError, match=r"stride is 3, length 8 and block 8; both have to be multiples of the stride"):
        select_blocks_by_compression(query, key, 8, 2, length=8, stride=3)
    with pytest.raises(ValueError, match="block is None; it has to be an integer"):
        select_blocks_by_compression(query, key, None, 2, length=8, stride=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query is a list; it has to be a tensor"):
        select_blocks_by_compression([1], key, 8, 2, length=8, stride=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="query_offset is None; it has to be an integer"):
        select_blocks_by_compression(query, key, 8, 2, length=8, stride=4, query_offset=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cu_seqlens and compressed_cu_seqlens; give both, or neither"):
        select_blocks_by_compression(query[:1], key[:1], 8, 2, length=8, stride=4, cu_seqlens=torch.tensor([0, 40]))
    borders = {"cu_seqlens": torch.tensor([0, 40]), "compressed_cu_seqlens": torch.tensor([0, 9])}
    with pytest.raises(ValueError, match=r"packed documents are one row"):
        select_blocks_by_compression(query, key, 8, 2, length=8, stride=4, **borders)
    with pytest.raises(ValueError, match=r"query_offset is a tensor, and keys is not given"):
        select_blocks_by_compression(query, key, 8, 2, length=8, stride=4, query_offset=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"cu_seqlens has 2 numbers and compressed_cu_seqlens 3; give as many"):
        select_blocks_by_compression(
            query[:1], key[:1], 8, 2, length=8, stride=4, cu_seqlens=torch.tensor([0, 40]),
            compressed_cu_seqlens=torch.tensor([0, 4, 9]),
        )  # fmt: skip
