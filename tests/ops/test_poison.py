"""Numbers that are not finite stay with the rows that see them, and with the gradients of what these see."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers import DTYPES, deterministic_algorithms, implementation_on, is_hopper, leaf, random, seeded

from ds_sparse import (
    BlockIndex,
    Softmax,
    TokenIndex,
    block_sparse_attention,
    force_implementation,
    gather_attention,
    sparse_attn,
    window_attention,
    window_softmax,
)

OPERATORS = ("token_attention_forward", "token_attention_backward")
CLOSE_ON_CUDA = {torch.float32: (1e-4, 3e-5), torch.float16: (4e-3, 6e-3), torch.bfloat16: (2e-2, 4e-2)}
"""rtol and atol: kernels round probabilities, and rows that are made again have them as they are."""

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")

POISONS = (math.nan, math.inf, -math.inf)
KEY_SIDE = ("key", "value", "key and value")
OPERANDS = (*KEY_SIDE, "query", "grad")

LIVE = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)


@dataclass(frozen=True)
class Attention:
    """One attention: what it is called with, and which pairs count, (B, H, T, S)."""

    call: Callable[..., torch.Tensor]
    seen: torch.Tensor
    key_heads: int = 2
    head_dim: int = 16

    def operands(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        batch, heads, queries, keys = self.seen.shape
        shapes = {"query": (heads, queries), "key": (self.key_heads, keys), "value": (self.key_heads, keys)}
        shapes["grad"] = shapes["query"]
        return {
            name: random(seeded(i), batch, *shape, self.head_dim, dtype=dtype)
            for i, (name, shape) in enumerate(shapes.items())
        }


def on_blocks(block: int, device: str, option: str) -> Attention:
    """Rows of blocks that are live for some, with something that limits pairs besides."""
    batch, heads, tokens = 2, 2, 3 * block - 5
    seen = LIVE.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]
    seen = seen.repeat(batch, heads, 1, 1)
    token = torch.arange(tokens)
    kept = torch.rand(batch, tokens, generator=seeded(7)) < 0.6
    options: dict = {}
    if option == "key_padding_mask":
        options["key_padding_mask"], limit = kept.to(device), kept[:, None, None]
    elif option == "float key_padding_mask":
        added = torch.zeros(batch, tokens).masked_fill(~kept, -math.inf)
        options["key_padding_mask"], limit = added.to(device), kept[:, None, None]
    elif option == "causal":
        options["causal"], limit = True, token[:, None] >= token
    elif option == "attn_mask":
        limit = torch.rand(batch, 1, tokens, tokens, generator=seeded(8)) < 0.6
        options["attn_mask"] = limit.to(device)
    elif option == "distance_bias":
        # The last keys are hidden from all queries, but not from what fills the last block.
        bias = torch.zeros(1, 2 * tokens - 1)
        bias[:, tokens - 6 :] = -math.inf
        options["distance_bias"], limit = bias.to(device), token[:, None] - token >= 6
    elif option == "dropout":
        options["dropout_p"], options["key_padding_mask"], limit = 0.3, kept.to(device), kept[:, None, None]
    else:
        limit = torch.ones(1, dtype=torch.bool)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return block_sparse_attention(query, key, value, LIVE, block=block, **options)

    return Attention(call, seen & limit, key_heads=1 if option == "key_padding_mask" else 2)


def in_windows(device: str, option: str) -> Attention:
    tokens, token = 150, torch.arange(150)
    distance = (token[:, None] - token).abs()
    options: dict = {"window_size": 9}
    seen = (distance <= 9).repeat(2, 2, 1, 1)
    if option == "causal":
        options["causal"] = True
        seen &= token[:, None] >= token
    elif option == "global_tokens":
        options["global_tokens"] = [3, 70]
        seen[:, :, [3, 70]] = seen[:, :, :, [3, 70]] = True
    elif option == "dilation":
        options["dilation"] = 2
        seen = ((distance <= 18) & (distance % 2 == 0)).repeat(2, 2, 1, 1)
    elif option == "key_padding_mask":
        kept = torch.rand(2, tokens, generator=seeded(7)) < 0.6
        options["key_padding_mask"] = kept.to(device)
        seen &= kept[:, None, None]
    return Attention(lambda *x: window_attention(*x, **options), seen)


def of_pairs(operation: Callable[..., torch.Tensor], density: float) -> Attention:
    seen = torch.rand(150, 150, generator=seeded(9)) < density
    index = TokenIndex.from_pairs(seen.nonzero(), 150, 150)
    return Attention(lambda *x: operation(*x, index), seen.repeat(2, 2, 1, 1))


def at_an_offset(device: str, option: str, queries: int, offsets: int | list[int]) -> Attention:
    """Rows of blocks that are live for some, of queries that begin later than the keys, or where their sequence says;
    two heads share a key."""
    batch, heads, keys, block = 2, 2, 48, 16
    positions = torch.tensor([offsets] * batch if isinstance(offsets, int) else offsets)
    row, key = positions[:, None, None] + torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.stack([LIVE[rows.flatten() // block][:, key // block] for rows in row])[:, None].repeat(1, heads, 1, 1)
    limit, options = torch.ones(1, dtype=torch.bool), {}
    if option == "causal":
        options["causal"], limit = True, (key <= row)[:, None]
    elif option == "distance_bias":
        bias = torch.zeros(heads, 2 * 64 - 1)
        bias[0, 64:], bias[1, : 63 - 9] = -math.inf, -math.inf
        options["distance_bias"] = bias.to(device)
        limit = torch.stack([key <= row, key - row >= -9], 1)
    elif option != "no option":
        name, kind = option.rsplit(" ", 1)
        shape = (batch, keys) if name == "key_padding_mask" else (batch, heads, queries, keys)
        kept = torch.rand(shape, generator=seeded(8)) < 0.6
        mask = kept if kind == "bool" else torch.zeros(shape).masked_fill(~kept, -math.inf)
        options[name], limit = mask.to(device), kept[:, None, None] if name == "key_padding_mask" else kept
    offset = offsets if isinstance(offsets, int) else positions.to(device)
    return Attention(
        lambda *x: block_sparse_attention(*x, LIVE, block=block, query_offset=offset, **options), seen & limit,
        key_heads=2 if option == "distance_bias" else 1,
    )  # fmt: skip


def some_at_an_offset(attention: Attention, operand: str) -> torch.Tensor:
    """A few tokens of the first sequence's last head."""
    batch, heads, queries, keys = attention.seen.shape
    of_keys = operand in KEY_SIDE
    tokens = torch.zeros(batch, attention.key_heads if of_keys else heads, keys if of_keys else queries).bool()
    tokens[0, -1, [8, 16, 40] if of_keys else 2] = True
    return tokens


def in_windows_at_an_offset(queries: int) -> Attention:
    at = torch.arange(20, 20 + queries)[:, None]
    seen = torch.stack([(at - torch.arange(60)).abs() <= window for window in (3, 9)]).repeat(2, 1, 1, 1)
    return Attention(lambda *x: window_attention(*x, [3, 9], query_offset=20), seen)


def of_documents(kind: str, device: str) -> Attention:
    """A row of documents that end inside a block."""
    edges, block, tokens = torch.tensor([0, 10, 47, 48, 75]), 16, 75
    document = torch.bucketize(torch.arange(tokens), edges, right=True)
    start = edges[document - 1]
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen, options = document[:, None] == document, {"cu_seqlens": edges.to(device)}
    if kind == "window":
        seen = seen & ((row - column).abs() <= 9)
        return Attention(lambda *x: window_attention(*x, 9, **options), seen.repeat(1, 2, 1, 1))
    if kind == "pairs":
        index = TokenIndex.from_mask((row - column).abs()[:40, :40] % 3 == 0)
        seen = seen & ((row - column) % 3 == 0)
        return Attention(lambda *x: sparse_attn(*x, index, **options), seen.repeat(1, 2, 1, 1))
    layout = torch.rand(5, 5, generator=seeded(3)) < 0.5
    if kind == "own":
        block_of = (torch.arange(tokens) - start) // block
    else:
        block_of, options["document_layout"] = torch.arange(tokens) // block, kind
    seen = seen & layout[block_of][:, block_of] & (row >= column)
    return Attention(
        lambda *x: block_sparse_attention(*x, layout, block=block, causal=True, **options), seen.repeat(1, 2, 1, 1)
    )


def passes(attention: Attention, operands: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    inputs = [leaf(operands[name], device) for name in ("query", "key", "value")]
    output = attention.call(*inputs)
    grads = torch.autograd.grad(output, inputs, operands["grad"].to(device))
    names = ("output", "grad_query", "grad_key", "grad_value")
    return {name: x.detach().cpu() for name, x in zip(names, (output, *grads), strict=True)}


def check(attention: Attention, operand: str, tokens: torch.Tensor, poison: float, dtype: torch.dtype, device: str):
    """With numbers of these tokens, (B, Hkv, S) or (B, H, T), not finite, whoever has no part in them has the results
    that zeros in their place give."""
    clean = attention.operands(dtype)
    for name in ("key", "value") if operand == "key and value" else (operand,):
        clean[name][tokens] = 0
    spoilt = {name: x.clone() for name, x in clean.items()}
    for name in ("key", "value") if operand == "key and value" else (operand,):
        spoilt[name][tokens] = poison
    expected, found = passes(attention, clean, device), passes(attention, spoilt, device)

    seen, group = attention.seen, attention.seen.shape[1] // attention.key_heads
    if operand in ("query", "grad"):
        rows = tokens
    else:
        rows = (seen & tokens.repeat_interleave(group, 1).unsqueeze(2)).any(3)
    keys = (seen & rows.unsqueeze(3)).any(2).unflatten(1, (-1, group)).any(2)
    assert not rows.all() and not keys.all(), "nothing to look at"
    for name, x in found.items():
        clear = ~(keys if name in ("grad_key", "grad_value") else rows)
        rtol, atol = CLOSE_ON_CUDA[dtype] if device == "cuda" else (None, None)
        torch.testing.assert_close(
            x[clear], expected[name][clear], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
    if operand == "value" and math.isnan(poison):
        assert found["output"][rows].isnan().all(), "what a row sees has to show"


def some_of(attention: Attention, operand: str) -> torch.Tensor:
    """A few tokens of the first sequence's first head."""
    batch, heads, queries, keys = attention.seen.shape
    of_keys = operand in KEY_SIDE
    tokens = torch.zeros(batch, attention.key_heads if of_keys else heads, keys if of_keys else queries).bool()
    tokens[0, 0, [5, 6, 40]] = True
    return tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("option", ["key_padding_mask", "float key_padding_mask", "dropout"])
def test_behind_a_key_padding_mask(device: str, option: str, dtype: torch.dtype):
    """Every masked key may hold anything: no row changes, and its own gradients are zero."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fused attention refuses float64 on CUDA")
    for block, poison in zip((16, 32, 64), POISONS, strict=True):
        attention = on_blocks(block, device, option)
        batch, _, _, keys = attention.seen.shape
        hidden = ~attention.seen.any((1, 2)).unsqueeze(1).expand(batch, attention.key_heads, keys)
        for operand in ("key and value", "key"):  # where values are finite, a row whose NaN are all dropped is
            check(attention, operand, hidden, poison, dtype, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("option", ["no option", "key_padding_mask", "causal", "attn_mask", "distance_bias"])
def test_what_some_rows_see_is_in_those_alone(device: str, option: str, operand: str):
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (16, 72, 128):
            attention = replace(on_blocks(16, device, option), head_dim=head_dim)
            check(attention, operand, some_of(attention, operand), math.nan, dtype, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("option", ["no option", "causal", "global_tokens", "dilation", "key_padding_mask"])
def test_outside_of_a_window(device: str, option: str, operand: str):
    attention = in_windows(device, option)
    for dtype in (torch.float32, torch.bfloat16):
        check(attention, operand, some_of(attention, operand), math.nan, dtype, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("operation", [sparse_attn, gather_attention])
def test_tokens_of_no_pair(device: str, operation: Callable[..., torch.Tensor], operand: str):
    attention = of_pairs(operation, 0.05)
    for dtype in (torch.float32, torch.bfloat16):  # on Hopper in tiles, where kernels serve both
        check(attention, operand, some_of(attention, operand), math.nan, dtype, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("offsets", [20, [9, 31]], ids=str)
@pytest.mark.parametrize(
    "option",
    ["no option", "causal", "key_padding_mask bool", "attn_mask bool", "attn_mask float", "rpe float", "distance_bias"],
)
def test_few_queries_at_an_offset(device: str, option: str, offsets: int | list[int], operand: str):
    attention = at_an_offset(device, option, 5, offsets)
    for poison in POISONS:
        check(attention, operand, some_at_an_offset(attention, operand), poison, torch.float32, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("offsets", [20, [9, 23]], ids=str)
@pytest.mark.parametrize("option", ["no option", "causal", "attn_mask bool", "attn_mask float", "distance_bias"])
def test_many_queries_at_an_offset(device: str, option: str, offsets: int | list[int], operand: str):
    attention = at_an_offset(device, option, 25, offsets)
    check(attention, operand, some_at_an_offset(attention, operand), math.nan, torch.float32, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("queries", [5, 25])
def test_windows_at_an_offset(device: str, queries: int, operand: str):
    attention = in_windows_at_an_offset(queries)
    tokens = torch.zeros(2, 2, *((60,) if operand in KEY_SIDE else (queries,)), dtype=torch.bool)
    tokens[0, 0, [14, 38] if operand in KEY_SIDE else 2] = True
    check(attention, operand, tokens, math.nan, torch.float32, device)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("kind", ["own", "row", "window", "pairs"])
def test_packed_documents(device: str, kind: str, operand: str):
    attention = of_documents(kind, device)
    tokens = torch.zeros(1, 2, 75, dtype=torch.bool)
    tokens[0, 0, [0, 12]] = True
    for dtype in (torch.float32, torch.bfloat16):
        check(attention, operand, tokens, math.nan, dtype, device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("operand", OPERANDS)
def test_with_every_kernel_of_a_gpu(device: str, operand: str, deterministic: bool):
    """Long lists, which are split, and heads that share keys; gradients of queries in one sweep and in two."""
    tokens = 1300
    layout = torch.rand(1, 41, 41, generator=seeded(2)) < 0.15
    layout[0, 3], layout[0, :, 5] = True, True
    seen = layout.repeat_interleave(32, 1).repeat_interleave(32, 2)[:, :tokens, :tokens].repeat(2, 2, 1, 1)
    for name in ("portable", "hopper") if is_hopper(device) else (implementation_on(device),):
        attention = Attention(lambda *x: block_sparse_attention(*x, layout, block=32), seen, 1, 64)
        with force_implementation(name), deterministic_algorithms() if deterministic else nullcontext():
            check(attention, operand, some_of(attention, operand), math.nan, torch.bfloat16, device)


def spoilt_and_finite(
    rows: int = 12, batch: int = 2
) -> tuple[Callable[..., list[torch.Tensor]], list[torch.Tensor], torch.Tensor]:
    """A pass forward and backward on a GPU, its operands, and the same operand of keys with NaN in some of a row."""
    layout = torch.rand(1, rows, rows, generator=seeded(2)) < 0.3
    layout[0].fill_diagonal_(True)
    index = BlockIndex.build(layout.cuda(), 64)
    operands = [random(seeded(i), batch, 2, 64 * rows, 64, dtype=torch.bfloat16).cuda() for i in range(4)]
    spoilt = operands[1].clone()
    spoilt[0, 0, [3, 200]] = math.nan

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        output = block_sparse_attention(*inputs, index)
        return [output.detach(), *torch.autograd.grad(output, inputs, grad)]

    return run, operands, spoilt


def replay_with_each(*, is_captured_first: bool) -> None:
    run, (query, key, value, grad), spoilt = spoilt_and_finite()
    static = key.clone()
    if not is_captured_first:
        run(query, static, value, grad)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = run(query, static, value, grad)
    for keys in (key, spoilt, key, spoilt, spoilt, key):
        static.copy_(keys)
        graph.replay()
        # An eager pass between replays has numbers of its own.
        for found, expected in zip(results, run(query, keys, value, grad), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-3, equal_nan=True)
    assert results[0].isfinite().all()


@pytest.mark.gpu
@NO_GPU
def test_graphs_are_replayed_with_what_is_finite_and_what_is_not():
    replay_with_each(is_captured_first=False)


@pytest.mark.gpu
@NO_GPU
def test_the_first_pass_of_a_process_may_be_captured():
    command = "import test_poison; test_poison.replay_with_each(is_captured_first=True)"
    subprocess.run(
        [sys.executable, "-c", command], check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
    )  # fmt: skip


@pytest.mark.gpu
@NO_GPU
def test_threads_with_streams_of_their_own_do_not_disturb_each_other():
    run, (query, key, value, grad), spoilt = spoilt_and_finite()
    expected = [run(query, keys, value, grad) for keys in (key, spoilt)]

    def of_thread(number: int) -> int:
        different = 0
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(100):
                which = (number + i) % 2
                found = run(query, (key, spoilt)[which], value, grad)
                torch.cuda.current_stream().synchronize()
                different += not all(
                    torch.allclose(x, y, rtol=2e-2, atol=1e-3, equal_nan=True)
                    for x, y in zip(found, expected[which], strict=True)
                )
        return different

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(of_thread, range(4))) == [0] * 4


@pytest.mark.gpu
@NO_GPU
def test_a_pass_after_one_that_had_no_memory_is_right():
    """An error between the kernels of a pass leaves nothing behind that the next one would take for its own."""
    run, (query, key, value, grad), spoilt = spoilt_and_finite(rows=64, batch=32)  # tensors of 32 MiB each
    expected = [run(query, keys, value, grad) for keys in (key, spoilt)]
    errors = 0
    try:
        for more in range(0, 512, 16):
            torch.cuda.empty_cache()
            limit = torch.cuda.memory_reserved() + (more << 20)
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
            try:
                run(query, spoilt, value, grad)
            except RuntimeError:  # torch.OutOfMemoryError, or what a kernel that asks for memory makes of it
                errors += 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert errors > 2
    for keys, results in zip((key, spoilt), expected, strict=True):
        for found, wanted in zip(run(query, keys, value, grad), results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_rpe_where_pairs_are_masked(device: str, dtype: torch.dtype):
    """It is summed over sequences: what one hides is another's."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fused attention refuses float64 on CUDA")
    attention = on_blocks(16, device, "no option")
    kept = (torch.rand(2, 43, generator=seeded(7)) < 0.6).to(device)
    found = []
    for hidden in (0.0, math.nan):
        query, key, value, grad = (x.to(device) for x in attention.operands(dtype).values())
        for x in (key, value):
            x.masked_fill_(~kept[:, None, :, None], hidden)
        rpe = torch.zeros(1, 1, 43, 43, dtype=dtype, device=device, requires_grad=True)
        output = block_sparse_attention(query, key, value, LIVE, block=16, rpe=rpe, key_padding_mask=kept)
        found.append(torch.autograd.grad(output, rpe, grad)[0])
    assert found[0].any()
    rtol, atol = CLOSE_ON_CUDA[dtype] if device == "cuda" else (None, None)
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_masked_probabilities(device: str, dtype: torch.dtype, poison: float):
    """They are made of values that may hold anything."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("windows refuse float64 on CUDA")
    kept = (torch.rand(2, 48, generator=seeded(7)) < 0.6).to(device)
    scores = random(seeded(), 2, 5, 16, 16, dtype=dtype).to(device)
    of_blocks = torch.stack([kept.unflatten(1, (3, 16))[:, column] for column in LIVE.nonzero()[:, 1]], 1).unsqueeze(2)
    band, width = random(seeded(1), 2, 2, 48, 15, dtype=dtype).to(device), torch.arange(15, device=device)
    places = torch.arange(48, device=device)[:, None] + width - 7
    of_band = ((places >= 0) & (places < 48) & kept[:, places.clamp(0, 47)]).unsqueeze(1)
    softmax = Softmax(LIVE, 16)
    for x, seen, call in (
        (scores, of_blocks, lambda x: softmax(x, key_padding_mask=kept, key_padding_mask_mode="mul")),
        (band, of_band, lambda x: window_softmax(x, 7, key_padding_mask=kept)),
    ):
        x.requires_grad_()
        grad = random(seeded(2), *x.shape, dtype=dtype).to(device)
        expected, found = (
            torch.autograd.grad(call(x), x, grad.masked_fill(~seen.expand_as(grad), hidden))[0]
            for hidden in (0.0, poison)
        )
        assert expected.any()
        torch.testing.assert_close(found, expected)
