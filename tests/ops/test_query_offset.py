"""Queries that begin at a later position: more of them than in the fuzz, the whole sequence in pieces, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fuzz.blocks import attention_case
from fuzz.compare import hold
from helpers import CountedOperators, captured, leaf, nothing_waits, random, seeded
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import ds_sparse
from ds_sparse import BlockIndex, block_sparse_attention, reference, window_attention
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.index.parts import parts_of
from ds_sparse.ops import query_offset
from ds_sparse.ops.call import AttentionCall

OPERATORS = ("block_attention_forward", "window_attention_forward", "decode_attention_forward")

BLOCK = 8
FEW_QUERIES = 16
"""So many have no kernel, but PyTorch's products."""


def operands(tokens: int, keys: int, batch: int = 1, head_dim: int = 16, dtype: torch.dtype = torch.float32):
    sizes = {"query": tokens, "key": keys, "value": keys}
    return {name: random(seeded(n), batch, 2, n, head_dim, dtype=dtype) for name, n in sizes.items()}


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("tokens", [1, 5, 40, 90, 130])
def test_blocks_and_numbers_of_queries(device: str, block: int, tokens: int):
    live = (torch.rand(2, 6, 6, generator=seeded(tokens)) < 0.4) | torch.eye(6, dtype=torch.bool)
    keys = min(6 * block, 400)
    for offset in {0, max(keys - tokens, 0)} if tokens <= keys else ():
        case = attention_case(operands(tokens, keys), live, block, device, causal=True, offset=offset)
        hold(case, device)


@pytest.mark.parametrize("offset", [0, 17, 63, [17, 95, 17], [40, 3, 64], [50, 50, 50]], ids=str)
@pytest.mark.parametrize(("key_heads", "layout_heads"), [(4, 1), (4, 4), (2, 1), (2, 4), (1, 1), (1, 4)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_new_token_without_gradients(
    device: str, causal: bool, key_heads: int, layout_heads: int, offset: int | list[int]
):
    live = torch.rand(layout_heads, 6, 6, generator=seeded(key_heads)) < 0.5
    live[0, 1] = False
    shapes = {"query": (3, 4, 1, 32), "key": (3, key_heads, 90, 32), "value": (3, key_heads, 90, 32)}
    tensors = {name: random(seeded(i), *shape, dtype=torch.float32) for i, (name, shape) in enumerate(shapes.items())}
    at = offset if isinstance(offset, int) else torch.tensor(offset)
    padding = torch.rand(3, 90, generator=seeded(6)) < 0.7
    padding[:, 16:32] = False  # a row that has nothing else is empty
    sinks = {"sinks": random(seeded(5), 4, dtype=torch.float32)}
    for more in ({}, sinks, {"key_padding_mask": padding}, sinks | {"key_padding_mask": padding[:1]}):
        hold(attention_case(tensors | more, live, 16, device, causal=causal, offset=at, wanted=()), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("depth", [8, 20, 32, 64, 128])
def test_a_new_token_of_any_dtype_and_head_size(device: str, depth: int, dtype: torch.dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for the CPU")
    tensors = operands(1, 80, batch=2, head_dim=depth, dtype=dtype)
    live = torch.rand(2, 6, 6, generator=seeded(1)) < 0.5
    for offset in (79, torch.tensor([79, 41])):
        hold(attention_case(tensors, live, 16, device, causal=True, offset=offset, wanted=()), device)


@pytest.mark.parametrize("seed", range(16))
def test_few_queries_on_random_layouts(device: str, seed: int):
    rng = np.random.default_rng(seed)
    block, rows, batch = int(rng.choice([8, 16, 64])), int(rng.integers(1, 70)), int(rng.integers(1, 4))
    key_heads, group, tokens = int(rng.choice([1, 2, 3])), int(rng.choice([1, 2, 5])), int(rng.integers(1, 9))
    heads, depth = key_heads * group, int(rng.choice([8, 24, 64, 100, 128, 256]))
    dtype = [torch.float32, torch.bfloat16, torch.float16][int(rng.integers(3))]
    rows = max(rows, -(-tokens // block))
    keys = int(rng.integers(1, rows * block + 1))
    live = torch.rand(int(rng.choice([1, heads])), rows, rows, generator=seeded(seed)) < rng.random()
    shapes = {"query": (batch, heads, tokens, depth)} | dict.fromkeys(("key", "value"), (batch, key_heads, keys, depth))
    tensors = {name: random(seeded(i), *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    if rng.random() < 0.5:
        tensors["key_padding_mask"] = torch.rand(int(rng.choice([1, batch])), keys, generator=seeded(9)) < 0.7
    if rng.random() < 0.5:
        tensors["sinks"] = random(seeded(8), heads, dtype=dtype)
    offsets = rng.integers(0, rows * block - tokens + 1, batch).tolist()
    causal = bool(rng.random() < 0.7)
    for offset in (offsets[0], torch.tensor(offsets, dtype=torch.int32)):
        hold(attention_case(tensors, live, block, device, causal=causal, offset=offset, wanted=()), device)


def given_in(kind: str, x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a cache that has room for more, NaN, or with heads inside of tokens, or tokens apart."""
    batch, heads, tokens, depth = x.shape
    if kind == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "apart":
        room = x.new_full((batch, heads, tokens, depth + 3), math.nan)
        room[..., 1 : depth + 1] = x
        return room[..., 1 : depth + 1]
    room = x.new_full((batch, heads, tokens + 24, depth), math.nan)
    part = {"front": slice(0, tokens), "behind": slice(8, 8 + tokens), "end": slice(24, 24 + tokens)}[kind]
    room[:, :, part] = x
    return room[:, :, part]


@pytest.mark.parametrize("kind", ["front", "behind", "end", "heads inside", "apart"])
@pytest.mark.parametrize(("batch", "key_heads"), [(1, 1), (1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("layout_heads", [1, 2])
def test_a_cache_may_be_a_part_of_a_larger_one(device: str, layout_heads: int, batch: int, key_heads: int, kind: str):
    layout = torch.rand(layout_heads, 8, 8, generator=seeded(2)) < 0.6
    query, key, value = (
        random(seeded(i), batch, h, n, 32) for i, (h, n) in enumerate([(2, 1)] + [(key_heads, 70)] * 2)
    )
    query, key, value = (x.to(device, torch.float32) for x in (query, key, value))
    options = {"block": 16, "query_offset": 69, "causal": True, "return_lse": True}
    expected = block_sparse_attention(query, key, value, layout, **options)
    found = block_sparse_attention(query, given_in(kind, key), given_in(kind, value), layout, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tokens", [1, FEW_QUERIES])
def test_few_queries_gather_nothing(monkeypatch, tokens: int):
    monkeypatch.delattr(query_offset, "_gathered")
    layout = BlockIndex.build(torch.ones(8, 8), 16)
    query, cache = random(seeded(), 2, 4, tokens, 16).float(), random(seeded(1), 2, 2, 128, 16).float()
    for key, at in ((cache, 112), (cache[:, :, :81], 65), (cache, torch.tensor([3, 90]))):
        block_sparse_attention(query, key, key, layout, query_offset=at, causal=True)
        block_sparse_attention(query, key, key, layout, query_offset=at, key_padding_mask=torch.ones(2, 1).bool())
    with torch.no_grad():
        block_sparse_attention(query.requires_grad_(), key, key, layout, query_offset=at, causal=True)


@pytest.mark.parametrize("layout_heads", [1, 4])
def test_a_step_is_one_operator(layout_heads: int):
    layout = BlockIndex.build(torch.ones(layout_heads, 8, 8), 16)
    query, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 128, 16)
    for offset in range(64, 80):
        with CountedOperators() as operators:
            block_sparse_attention(query, cache, cache, layout, query_offset=offset, causal=True)
        assert operators.number == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", ["BlockIndex", "MasterLayout", "tensor"])
def test_nothing_waits_for_the_device_while_decoding(device: str, kind: str, biased: bool, tokens: int):
    if device != "cuda":
        pytest.skip("the CPU waits for nothing")
    live = (torch.rand(4, 64, 64, generator=seeded()) < 0.2).to(device)
    layout = {"tensor": live, "BlockIndex": BlockIndex.build(live, 16), "MasterLayout": MasterLayout(live.cpu(), 16)}
    query, cache = torch.randn(2, 4, tokens, 64, device=device), torch.randn(2, 2, 1024, 64, device=device)
    more = {"attn_mask": torch.ones(tokens, 1024, dtype=torch.bool, device=device)} if biased else {}
    at = torch.tensor([700, 900], device=device)

    def step(i: int) -> None:
        for where in (700 + i, at):
            block_sparse_attention(
                query, cache, cache, layout[kind], block=16, query_offset=where, causal=True, return_lse=True, **more
            )
        for windows in (64, [8, 8, 16, 16]):
            window_attention(query, cache, cache, windows, query_offset=700 + i, causal=True)
        at.add_(1)

    step(0)
    with nothing_waits():
        for i in range(1, 40):
            step(i)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("biased", [False, True])
def test_a_cuda_graph_decodes_at_positions_that_change(device: str, biased: bool, tokens: int):
    if device != "cuda":
        pytest.skip("a CUDA graph is of a GPU")
    layout = BlockIndex.build((torch.rand(4, 64, 64, generator=seeded()) < 0.3).to(device), 16)
    query, cache = torch.randn(2, 4, tokens, 64, device=device), torch.randn(2, 2, 1024, 64, device=device)
    at, more = torch.tensor([700, 900], device=device), {}
    if biased:
        more["key_padding_mask"] = torch.rand(2, 1024, device=device) < 0.8

    def step() -> torch.Tensor:
        return block_sparse_attention(query, cache, cache, layout, query_offset=at, causal=True, **more)

    graph, output = captured(step)
    for _ in range(3):
        at.add_(37)
        graph.replay()
        torch.testing.assert_close(output, step())


def test_a_call_with_a_position_on_another_device_is_not_remembered():
    layout, query = BlockIndex.build(torch.ones(4, 4), 8), zeros(2, 1, 1, 8)
    call = AttentionCall(query, query, query, 1.0, False)
    assert query_offset.signature_at(call, 31, layout, None) is not None
    assert query_offset.signature_at(call, torch.zeros(2, dtype=torch.int64, device="meta"), layout, None) is None


@pytest.mark.gpu
def test_queries_on_the_cpu_wait_for_positions_on_a_gpu(device: str):
    if device != "cuda":
        pytest.skip("the CPU waits for nothing")
    layout = BlockIndex.build(torch.rand(2, 8, 8, generator=seeded()) < 0.6, 16)
    query, cache = random(seeded(1), 2, 2, 1, 16).float(), random(seeded(2), 2, 2, 128, 16).float()
    at, late = torch.tensor([5, 90]), torch.zeros(2, dtype=torch.int64, device=device)
    expected = block_sparse_attention(query, cache, cache, layout, query_offset=at, causal=True)
    for _ in range(3):
        torch.cuda._sleep(100_000_000)
        late.copy_(at)
        found = block_sparse_attention(query, cache, cache, layout, query_offset=late, causal=True)
        assert torch.equal(found, expected)
        late.zero_()


def test_many_causal_queries_with_floats_of_keys_and_of_distances(device: str):
    live = torch.rand(2, 8, 8, generator=seeded(3)) < 0.6
    for mask, more in (((1, 96), {}), ((2, 2, 40, 96), {}), ((1, 96), {"distance_bias": random(seeded(4), 2, 255)})):
        more = {name: x.float() for name, x in ({"attn_mask": random(seeded(5), *mask)} | more).items()}
        tensors = operands(40, 96, batch=2) | more
        hold(attention_case(tensors, live, 16, device, causal=True, offset=53), device)


def test_what_is_the_same_for_all_queries_stays_so_and_blocks_ahead_are_left_out(monkeypatch):
    query, key, value = (torch.zeros(1, 2, n, 8) for n in (40, 96, 96))
    attend, calls = query_offset.attend, []

    def noted(call, index):
        calls.append((call, index))
        return attend(call, index)

    monkeypatch.setattr(query_offset, "attend", noted)
    options = {"attn_mask": torch.zeros(1, 96), "causal": True, "scale": 1.0}
    block_sparse_attention(query, key, value, torch.ones(2, 8, 8), block=16, query_offset=53, **options)
    ((call, index),) = calls
    assert call.rpe.shape == (1, 96) and call.attn_mask.dtype == torch.bool
    first = 53 // 16
    assert torch.equal(index.layout()[0].bool(), torch.ones(3, 6, dtype=torch.bool).tril(first))


def test_a_sequence_in_pieces_is_the_sequence(device: str):
    structure = ds_sparse.BSLongformerSparsityConfig(num_heads=2, block=16, causal=True)
    layout = structure.make_layout(512)
    query, key, value = (x.to(device, torch.float32) for x in random(seeded(), 3, 2, 2, 200, 16))
    whole = block_sparse_attention(query, key, value, layout[:, :13, :13], block=16, causal=True)
    at, pieces = 0, []
    for length in (70, 1, 1, 30, 16, 17, 64, 1):
        end = at + length
        pieces.append(
            block_sparse_attention(
                query[:, :, at:end], key[:, :, :end], value[:, :, :end], layout, block=16, query_offset=at, causal=True
            )
        )
        at = end
    torch.testing.assert_close(torch.cat(pieces, 2), whole)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("kind", ["tensor", "BlockIndex", "MasterLayout"])
def test_new_tokens_read_the_keys_of_their_block_row_alone(device: str, kind: str, tokens: int):
    live = torch.zeros(64, 64, dtype=torch.bool)
    live[40, [0, 3, 40]] = True
    layout = {"tensor": live, "BlockIndex": BlockIndex.build(live, 16), "MasterLayout": MasterLayout(live[None], 16)}
    query = torch.randn(1, 2, tokens, 8, device=device)
    key, value = torch.full((2, 1, 2, 655, 8), math.nan, device=device)
    for block in (0, 3, 40):
        for x in (key, value):
            tokens = x[:, :, block * 16 : block * 16 + 16]
            tokens.copy_(torch.randn_like(tokens))
    output = block_sparse_attention(query, key, value, layout[kind], block=16, query_offset=40 * 16 + 5, causal=True)
    assert torch.isfinite(output).all()


def test_a_position_outside_of_the_layout(device: str):
    """On a GPU, where nobody looks at it, it gives NaN, and others what they should."""
    bits = BlockIndex.build(torch.ones(4, 4, device=device), 16).bits
    query, cache = torch.randn(3, 2, 1, 16, device=device), torch.randn(3, 2, 60, 16, device=device)
    decode = torch.ops.ds_sparse.decode_attention_forward

    def at(*offsets: int) -> tuple[torch.Tensor, ...]:
        given = torch.tensor(offsets, device=device)
        return decode(query, cache, cache, bits, 16, given, 0, True, None, None, 0.25)

    if device == "cpu":
        for outside in (64, -1):
            with pytest.raises(RuntimeError, match=f"offsets has {outside}, and bits has rows for 64 tokens"):
                at(3, outside, 59)
        return
    for outside in (64, 1 << 40, -1):
        for found, right in zip(at(3, outside, 59), at(3, 3, 59), strict=True):
            assert found[1].isnan().all() and torch.equal(found[::2], right[::2])


@pytest.mark.parametrize(
    ("place", "given", "sentence"),
    [
        (1, torch.zeros(1, 3, 60, 16), "key has 3 heads, and query 4; they have to be a multiple"),
        (1, torch.zeros(1, 2, 60, 8), "key has size 8 in dimension 3; it has to be 16"),
        (2, torch.zeros(1, 2, 61, 16), "value has size 61 in dimension 2; it has to be 60"),
        (2, torch.zeros(1, 2, 60, 16).half(), "value has to have the dtype of the other operand"),
        (1, torch.zeros(1, 2, 16, 60).mT, "key has to have the numbers of a token adjacent in memory"),
        (3, torch.zeros(3, 4, 4).byte(), "bits has 3 heads, and query 4"),
        (3, torch.zeros(1, 4, 3).byte(), "bits has to have whole words of 32 bits"),
        (3, torch.zeros(1, 0, 4).byte(), "bits has to have one row at least, and a block for each of the 60 keys"),
        (5, torch.zeros(2).int(), "offsets has to have one number, or one a sequence"),
        (5, torch.zeros(1), "offsets has to be int32 or int64"),
        (6, 64, "the last query is at 64, and bits has rows for 64 tokens"),
        (6, -1, "offset has to be 0 or more and below 2.*31, got -1"),
        (8, torch.ones(1, 59).bool(), "keep has size 59 in dimension 1; it has to be 60"),
        (8, torch.ones(1, 60), "keep has to be bool"),
        (9, torch.zeros(4).double(), "sinks has to be fp32, or fp64 for fp64"),
    ],
)
def test_what_the_operator_refuses(place: int, given: object, sentence: str):
    call = [torch.zeros(1, 4, 1, 16), *[torch.zeros(1, 2, 60, 16)] * 2, torch.zeros(1, 4, 4).byte(), 16]
    call += [None, 63, True, None, None, 1.0]
    torch.ops.ds_sparse.decode_attention_forward(*call)
    call[place] = given
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.ds_sparse.decode_attention_forward(*call)


def test_a_position_of_a_call_that_is_remembered_is_checked(device: str):
    index = BlockIndex.build(torch.ones(4, 4, device=device), 16)
    query, cache = torch.randn(1, 2, 2, 8, device=device), torch.randn(1, 2, 60, 8, device=device)
    for _ in range(2):
        block_sparse_attention(query, cache, cache, index, query_offset=62)
    for offset, sentence in ((63, "the last query is at 64"), (-1, "query_offset is -1")):
        with pytest.raises(ValueError, match=sentence):
            block_sparse_attention(query, cache, cache, index, query_offset=offset)


def test_padding_may_be_nan_while_decoding(device: str):
    layout, padding = torch.ones(4, 4, dtype=torch.bool), torch.ones(1, 30, dtype=torch.bool, device=device)
    padding[:, :3] = False
    query, key, value = (torch.randn(1, 2, n, 8, device=device) for n in (1, 30, 30))
    options = {"block": 8, "query_offset": 29, "causal": True, "key_padding_mask": padding}
    expected = block_sparse_attention(query, key, value, layout, **options)
    key[:, :, :3] = value[:, :, :3] = math.nan
    assert torch.equal(block_sparse_attention(query, key, value, layout, **options), expected)


@pytest.mark.parametrize("tokens", [1, 5])
def test_padding_in_a_window_may_be_nan_while_decoding(device: str, tokens: int):
    padding = torch.ones(1, 30, dtype=torch.bool, device=device)
    padding[:, :26] = False
    query, key, value = (torch.randn(1, 2, n, 8, device=device) for n in (tokens, 30, 30))
    options = {"causal": True, "key_padding_mask": padding, "query_offset": 30 - tokens}
    expected = window_attention(query, key, value, 8, **options)
    key[:, :, :26] = value[:, :, :26] = math.nan
    assert torch.equal(window_attention(query, key, value, 8, **options), expected)


@pytest.mark.parametrize("tokens", [2, FEW_QUERIES + 1])
def test_dropout_leaves_the_mean(device: str, tokens: int):
    layout = torch.ones(8, 8, dtype=torch.bool)
    query, key = (torch.randn(1, 4, n, 8, device=device) for n in (tokens, 64))
    value = torch.ones(1, 4, 64, 8, device=device)
    options = {"block": 8, "query_offset": 64 - tokens, "causal": True, "dropout_p": 0.5}
    outputs = torch.stack([block_sparse_attention(query, key, value, layout, **options) for _ in range(300)])
    assert outputs.std() > 0.05 and abs(outputs.mean().item() - 1) < 0.05


def test_under_autocast_statistics_stay_wide(device: str):
    layout = torch.ones(8, 8, dtype=torch.bool)
    query, key, value = (torch.randn(1, 2, n, 16, device=device) for n in (1, 64, 64))
    options = {"block": 8, "query_offset": 63, "return_lse": True}
    with torch.autocast(device, torch.bfloat16):
        output, lse = block_sparse_attention(query, key, value, layout, **options)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    halves = [x.bfloat16() for x in (query, key, value)]
    assert torch.equal(block_sparse_attention(*halves, layout, **options)[1], lse)


@pytest.mark.parametrize("tokens", [5, FEW_QUERIES + 4])
@pytest.mark.parametrize("name", ["rpe", "distance_bias", "sinks"])
def test_gradients_of_what_sequences_share_are_rounded_once(device: str, name: str, tokens: int):
    """Also where a sequence is a call of its own, or two."""
    shapes = {"rpe": (tokens, 64), "distance_bias": (1, 127), "sinks": (2,)}
    query, key, value = (random(seeded(i), 4, 2, n, 16) for i, n in enumerate((tokens, 64, 64)))
    inputs = [x.to(device, torch.bfloat16) for x in (query, key, value)]
    weights = random(seeded(4), 4, 2, tokens, 16).to(device, torch.bfloat16)
    shared, found = random(seeded(3), *shapes[name]).to(device, torch.bfloat16), []
    for offsets in (torch.tensor([9, 20, 41, 33]), 20):
        for x in (shared, shared.float()):
            given = x.detach().requires_grad_()
            output = block_sparse_attention(
                *inputs, torch.ones(8, 8), block=8, query_offset=offsets, causal=True, **{name: given}
            )
            found.append(torch.autograd.grad(output, given, weights)[0])
    torch.testing.assert_close(found[0], found[1].bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(found[2], found[3].bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("where", [30, 3], ids=["ahead", "past"])
def test_a_small_share_of_a_row_made_of_two_parts_is_kept(device: str, where: int):
    query, key, value = torch.zeros(1, 1, 20, 8), torch.zeros(1, 1, 35, 8), torch.zeros(1, 1, 35, 8)
    query[..., 0] = 1
    key[..., 0] = -17.7
    key[:, :, 33 - where, 0] = 0  # of nearly all of the probability
    value[:, :, where, 0] = 1e8
    value[:, :, where, 1], value[:, :, 33 - where, 1] = 3, 1
    options = {"block": 8, "query_offset": 15, "causal": True, "scale": 1.0}
    ours = [leaf(x, device) for x in (query, key, value)]
    exact = [leaf(x.double(), "cpu") for x in (query, key, value)]
    output = block_sparse_attention(*ours, torch.ones(5, 5), **options)[0, 0, -1]
    expected = reference.attention(*exact, torch.ones(5, 5), **options)[0, 0, -1]
    torch.testing.assert_close(output[:2].cpu().double(), expected[:2], rtol=1e-5, atol=0)
    found, wanted = (torch.autograd.grad(x[1], given[1])[0] for x, given in ((output, ours), (expected, exact)))
    torch.testing.assert_close(found.cpu().double()[0, 0, where], wanted[0, 0, where], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask", "rpe", "distance_bias"])
@pytest.mark.parametrize("offset", [21, [3, 21]], ids=str)
def test_rows_of_lowest_biases_weigh_all_keys_alike(device: str, offset: int | list[int], name: str):
    """Of what kernels make of the past and of what begins with the queries, lse is the same -1e30."""
    shapes = {"key_padding_mask": (2, 43), "attn_mask": (1, 1), "rpe": (2, 1, 1, 1), "distance_bias": (1, 2 * 48 - 1)}
    bias = torch.full(shapes[name], torch.finfo(torch.float32).min)
    operands = [random(seeded(i), 2, 2, n, 8, dtype=torch.float32).to(device) for i, n in enumerate((22, 43, 43))]
    query, key, value = (x.requires_grad_() for x in operands)
    output = block_sparse_attention(
        query, key, value, torch.ones(6, 6), block=BLOCK, causal=True, **{name: bias.to(device)},
        query_offset=offset if isinstance(offset, int) else torch.tensor(offset, device=device),
    )  # fmt: skip
    first = torch.tensor([offset, offset] if isinstance(offset, int) else offset)
    seen = torch.arange(43) <= (first[:, None] + torch.arange(22)).unsqueeze(-1)
    probs = (seen / seen.sum(-1, keepdim=True)).to(device).unsqueeze(1)
    torch.testing.assert_close(output, probs @ value)
    grad = torch.autograd.grad(output.sum(), value)[0]
    torch.testing.assert_close(grad, probs.sum(2).unsqueeze(-1).expand_as(grad), rtol=1e-4, atol=1e-5)


def test_the_gradient_of_lse_of_a_row_of_lowest_biases(device: str):
    """Beside -1e30 the log of a sum is lost, and its gradient is not."""
    query, key, value = (random(seeded(i), 1, 1, n, 8).to(device, torch.float32) for i, n in enumerate((4, 16, 16)))
    rpe = torch.full((4, 16), -1e38, device=device, requires_grad=True)
    _, lse = block_sparse_attention(
        query, key, value, torch.ones(2, 2), block=8, query_offset=12, rpe=rpe, return_lse=True
    )
    (found,) = torch.autograd.grad(lse.sum(), rpe)
    torch.testing.assert_close(found, torch.full_like(found, 1 / 16))


def test_gradients_of_a_key_that_few_queries_of_several_heads_see_are_rounded_once(device: str):
    layout = torch.rand(4, 8, 8, generator=seeded()) < 0.7
    query, key, value = (random(seeded(i), 1, n, t, 16) for i, (n, t) in enumerate(((4, 3), (1, 64), (1, 64))))
    query, *given = (leaf(x.bfloat16(), device) for x in (query, key, value))
    weights = random(seeded(4), 1, 4, 3, 16).to(device, torch.bfloat16)
    options = {"layout": layout, "block": 8, "query_offset": 50, "causal": True}
    found = torch.autograd.grad(block_sparse_attention(query, *given, **options), given, weights)
    wide = [x.detach().float().requires_grad_() for x in given]
    output = block_sparse_attention(query.float(), *(x.repeat_interleave(4, 1) for x in wide), **options)
    expected = torch.autograd.grad(output, wide, weights.float())
    torch.testing.assert_close(found, tuple(x.bfloat16() for x in expected), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [3, FEW_QUERIES + 4])
def test_an_integer_of_numpy_is_an_offset(tokens: int):
    query, key = (random(seeded(), 1, 2, n, 8) for n in (tokens, 40))
    for attend in (
        lambda offset: block_sparse_attention(query, key, key, torch.ones(8, 8), block=8, query_offset=offset),
        lambda offset: window_attention(query, key, key, 4, query_offset=offset),
    ):
        assert attend(np.int64(9)).equal(attend(9))


def test_a_changed_layout_is_seen(device: str):
    layout = torch.ones(4, 4, dtype=torch.bool)
    query, key, value = (torch.randn(1, 1, n, 8, device=device) for n in (1, 32, 32))
    before = block_sparse_attention(query, key, value, layout, block=8, query_offset=31)
    layout[3, 0] = False
    after = block_sparse_attention(query, key, value, layout, block=8, query_offset=31)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (2, 4, 4), (1, 1, 4, 4)], ids=str)
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_change_of_any_row_is_seen_where_the_row_is_read(
    device: str, is_contiguous: bool, shape: tuple[int, ...], dtype: torch.dtype
):
    layout = torch.ones(shape, dtype=dtype, device=device)
    layout = layout if is_contiguous else torch.stack([layout, layout], -1)[..., 0]
    query, key, value = (torch.randn(2, 2, n, 16, device=device) for n in (32, 32, 32))

    def attend(given: torch.Tensor) -> list[torch.Tensor]:
        more = {"layout": given, "block": 8, "causal": True}
        one = [block_sparse_attention(query[:, :, :1], key, value, query_offset=at, **more) for at in (31, 0, 9, 20)]
        of_each = [torch.tensor(at, device=device) for at in ([3, 30], [8, 15])]
        one += [block_sparse_attention(query[:, :, :1], key, value, query_offset=at, **more) for at in of_each]
        return [*one, *(block_sparse_attention(query[:, :, :n], key, value, query_offset=6, **more) for n in (3, 20))]

    attend(layout)
    for row in (1, 3, 2, 0):
        layout[..., row, row // 2] = 0
        torch.testing.assert_close(attend(layout), attend(layout.clone()), rtol=0, atol=0)


def test_what_is_gathered_is_listed_once_for_the_layers_of_a_step(device: str):
    index = BlockIndex.build(torch.ones(4, 4, dtype=torch.bool), 8).to(device)
    query, key, value = (torch.randn(1, 1, n, 16, device=device) for n in (1, 32, 32))
    for offset in (24, 25, 25, 31):
        keys = (x[:, :, : offset + 1] for x in (key, value))
        mask = torch.ones(1, offset + 1, dtype=torch.bool, device=device)
        block_sparse_attention(query, *keys, index, query_offset=offset, causal=True, attn_mask=mask)
    assert sorted(key[0] for key, _ in parts_of(index)._kept.items()) == ["layout", "seen", "seen", "seen", "table"]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("offset", [0, 3, 20, 49])
@pytest.mark.parametrize("causal", [True, False])
def test_a_new_token_in_a_window_without_gradients(device: str, causal: bool, offset: int, key_heads: int):
    sizes = (4, 1), (key_heads, 50), (key_heads, 50)
    given = [random(seeded(i), 2, heads, n, 16).float().to(device) for i, (heads, n) in enumerate(sizes)]
    sinks = random(seeded(3), 4).float().to(device)
    for window, more in ((7, {}), (0, {}), (90, {"sinks": sinks})):
        options = {"causal": causal, "query_offset": offset, **more}
        away = torch.arange(50) - offset
        seen = (away.abs() <= window) & ((away <= 0) | (not causal))
        probs = (given[0].double() @ given[1].double().repeat_interleave(4 // key_heads, 1).mT / 4).cpu()
        probs = probs.masked_fill(~seen, -math.inf)
        if more:
            probs = torch.cat([probs, sinks.cpu().double()[:, None, None].expand(2, -1, 1, 1)], -1)
        probs = probs.softmax(-1)[..., :50]
        expected = probs @ given[2].cpu().double().repeat_interleave(4 // key_heads, 1)
        torch.testing.assert_close(
            window_attention(*given, window, **options).cpu().double(), expected, rtol=1e-5, atol=1e-6
        )


def test_keys_before_a_window_are_not_read(device: str):
    query, key, value = (torch.randn(1, 2, n, 8, device=device) for n in (1, 50, 50))
    key[:, :, :45] = value[:, :, :45] = math.nan
    assert torch.isfinite(window_attention(query, key, value, 4, causal=True, query_offset=49)).all()


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"query_offset": 17}, ValueError, "query_offset is 17, for 4 queries among 20 keys; .* that of keys at most"),
        ({"query_offset": torch.tensor([1, 2])}, TypeError, "it has to be an integer, the same for all sequences"),
        ({"dilation": 2}, ValueError, "global_tokens, a dilation or cu_seqlens, which are for whole"),
        ({"cu_seqlens": torch.tensor([0, 9, 20])}, ValueError, "or cu_seqlens, which are for whole sequences"),
        ({"query_offset": None}, ValueError, "query has 4 tokens and key 20; .* Give query_offset where"),
    ],
)
def test_arguments_of_windows_that_do_not_fit(change: dict, error: type[Exception], sentence: str):
    given = {"query": zeros(2, 2, 4, 8), "key": zeros(2, 2, 20, 8), "value": zeros(2, 2, 20, 8), "window_size": 3}
    with pytest.raises(error, match=sentence):
        window_attention(**{**given, "query_offset": 16, **change})


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"query_offset": -1}, ValueError, "query_offset is -1; it is the position of the first query, 0 or more"),
        ({"query_offset": 1.0}, TypeError, "query_offset is 1.0; it has to be an integer"),
        ({"query_offset": True}, TypeError, "query_offset is True"),
        ({"query_offset": torch.ones(2)}, TypeError, "query_offset is a tensor of torch.float32; .* int32 or int64"),
        ({"query_offset": torch.ones(3).long()}, ValueError, r"has shape \(3,\); .* or \(2,\), one a sequence"),
        ({"query_offset": torch.ones(2).long().to("meta")}, ValueError, "query_offset is on the meta device"),
        ({"block": None}, ValueError, "query_offset is given and block is not; .* give its block"),
        ({"query_offset": 62}, ValueError, "covers 64 query and 64 key tokens, the last query is at 65 .* are 20 keys"),
        ({"key": zeros(2, 2, 65, 8), "value": zeros(2, 2, 65, 8)}, ValueError, "and there are 65 keys; build it for"),
        ({"layout": BlockIndex.build(torch.ones(4, 4), 16), "block": 8}, ValueError, "block is 8, .* blocks of 16"),
        ({"layout": torch.ones(3, 8, 8).bool()}, ValueError, "query has 2 heads and the layout 3"),
        ({"layout": torch.ones(2, 1, 8, 8).bool()}, ValueError, "one for each of 2. Call once for each sequence, with"),
        ({"sinks": zeros(3)}, ValueError, r"sinks has shape \(3,\)"),
    ],
)
def test_arguments_that_do_not_fit(change: dict, error: type[Exception], sentence: str):
    given = {"query": zeros(2, 2, 4, 8), "key": zeros(2, 2, 20, 8), "value": zeros(2, 2, 20, 8), "block": 8}
    given |= {"layout": torch.ones(8, 8).bool(), "query_offset": 16}
    with pytest.raises(error, match=sentence):
        block_sparse_attention(**{**given, **change})


def given_tokens(tokens: int, **kind) -> dict:
    query, key, value = (torch.zeros(2, 4, n, 8, **kind).requires_grad_() for n in (tokens, 40, 40))
    padding, rpe = torch.ones(2, 40, dtype=torch.bool, **kind), torch.zeros(tokens, 40, **kind)
    return {"query": query, "key": key, "value": value, "key_padding_mask": padding, "rpe": rpe}


@pytest.mark.parametrize("tokens", [3, FEW_QUERIES + 4])
def test_fake_tensors_give_shapes_and_leave_nothing_fake_in_the_index(tokens: int):
    index = BlockIndex.build(torch.ones(8, 8), 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        output = block_sparse_attention(**given_tokens(tokens), layout=index, query_offset=20)
    assert isinstance(output, FakeTensor) and output.shape == (2, 4, tokens, 8)
    output = block_sparse_attention(**given_tokens(tokens), layout=index, query_offset=20)
    assert not isinstance(output, FakeTensor) and output.equal(torch.zeros(2, 4, tokens, 8))


def test_under_compile_it_is_refused():
    index, x = BlockIndex.build(torch.ones(4, 4), 8), zeros(1, 1, 32, 8)
    compiled = torch.compile(
        lambda x: block_sparse_attention(x[:, :, :1], x, x, index, query_offset=31), backend="eager", fullgraph=True
    )
    with pytest.raises(RuntimeError, match="query_offset cannot be read under torch.compile"):
        compiled(x)


def test_what_is_no_layout_is_said_at_an_offset_and_of_meta_tensors_too():
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match="A layout is a torch tensor of 0s and 1s, got list"):
        block_sparse_attention(query, query, query, [[1]], block=16, query_offset=0)
    query = query.to("meta")
    with pytest.raises(TypeError, match="A layout is a torch tensor of 0s and 1s, got list"):
        block_sparse_attention(query, query, query, [[1]], block=16)
