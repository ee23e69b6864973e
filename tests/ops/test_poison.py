"""Numbers that are not finite: on a GPU, whose kernels then make rows again, and behind masks of softmaxes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz.blocks import attention_case
from fuzz.compare import hold
from fuzz.spoilt import plant
from helpers import DTYPES, implementation_on, is_hopper, random, seeded

from ds_sparse import (
    BlockIndex,
    Softmax,
    block_sparse_attention,
    force_implementation,
    window_softmax,
)

OPERATORS = ("token_attention_forward", "token_attention_backward")
CLOSE_ON_CUDA = {torch.float32: (1e-4, 3e-5), torch.float16: (4e-3, 6e-3), torch.bfloat16: (2e-2, 4e-2)}
"""rtol and atol: kernels round probabilities, and rows that are made again have them as they are."""

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")

LIVE = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("operand", ["key", "value", "query", "output"])
def test_with_every_kernel_of_a_gpu(device: str, operand: str, deterministic: bool):
    """Long lists, which are split, and heads that share keys; gradients of queries in one sweep and in two."""
    if device == "cpu" and not deterministic:
        pytest.skip("sums are always in a fixed order on the CPU")
    batch, tokens = 1 if device == "cpu" else 2, 1300
    layout = torch.rand(1, 41, 41, generator=seeded(2)) < 0.15
    layout[0, 3], layout[0, :, 5] = True, True
    for name in ("portable", "hopper") if is_hopper(device) else (implementation_on(device),):
        heads = {"query": 2, "key": 1, "value": 1}
        operands = [random(seeded(i), batch, n, tokens, 64, dtype=torch.bfloat16) for i, n in enumerate(heads.values())]
        case = attention_case(dict(zip(heads, operands)), layout, 32, device)
        planted = torch.zeros(batch, heads.get(operand, 2), tokens, dtype=torch.bool)
        planted[0, 0, [5, 6, 40]] = True
        with force_implementation(name):
            hold(replace(plant(case, (operand,), planted, math.nan), poisoned=deterministic), device)


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
    # At a normal exit autograd's thread may still drop Python objects, which aborts one process in 40.
    command = "import os, test_poison; test_poison.replay_with_each(is_captured_first=True); os._exit(0)"
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
    operands = [random(seeded(i), 2, 2, 43, 16, dtype=dtype) for i in range(4)]
    kept = (torch.rand(2, 43, generator=seeded(7)) < 0.6).to(device)
    found = []
    for hidden in (0.0, math.nan):
        query, key, value, grad = (x.to(device) for x in operands)
        for x in (key, value):
            x.masked_fill_(~kept[:, None, :, None], hidden)
        rpe = torch.zeros(1, 1, 43, 43, dtype=dtype, device=device, requires_grad=True)
        output = block_sparse_attention(query, key, value, LIVE, block=16, rpe=rpe, key_padding_mask=kept)
        found.append(torch.autograd.grad(output, rpe, grad)[0])
    assert found[0].any()
    rtol, atol = CLOSE_ON_CUDA[dtype] if device == "cuda" else (None, None)
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
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
