"""What PyTorch's FLOP counter says of the operations is what is counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers import random, seeded
from torch.utils.flop_counter import FlopCounterMode

from ds_sparse import (
    BlockIndex,
    MatMul,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    selected_attention,
    sparse_attn,
    sparse_matmul,
    topk_attention,
    unwindow_matmul,
    window_attention,
    window_matmul,
)
from ds_sparse.index import kernels
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops import _flops

OPERATORS = kernels.OPERATORS

LAYOUT = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]])
"""6 live blocks, 5 without the one above the diagonal."""

PER_HEAD = torch.stack([LAYOUT, torch.eye(3, dtype=torch.int64)])
"""6 + 3 live blocks."""


def counted(call: Callable, *given: torch.Tensor) -> tuple[int, int]:
    """Operations forward, and those of the gradients of all that is given."""
    given = [x.detach().requires_grad_() for x in given]
    with FlopCounterMode(display=False) as forward:
        output = call(*given)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output.sum(), given)
    return forward.get_total_flops(), backward.get_total_flops()


def tensors(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [random(seeded(), *shape, dtype=torch.float32).to(device) for shape in shapes]


@pytest.mark.parametrize(
    ("layout", "heads", "key_heads", "tokens", "keys", "causal", "live"),
    [
        (LAYOUT, 4, 4, 48, 48, False, 4 * 6),
        (LAYOUT, 4, 2, 48, 48, False, 4 * 6),
        (PER_HEAD, 2, 1, 48, 48, False, 6 + 3),
        (torch.stack([LAYOUT] * 2), 2, 2, 48, 48, False, 2 * 6),
        (LAYOUT, 4, 4, 33, 41, False, 4 * 6),
        (LAYOUT, 4, 4, 48, 48, True, 4 * 5),
        (PER_HEAD, 2, 2, 48, 48, True, 5 + 3),
        (LAYOUT[:2, :2], 2, 2, 32, 32, False, 2 * 3),
        (torch.zeros_like(LAYOUT), 2, 2, 48, 48, False, 0),
    ],
)
def test_attention_counts_whole_live_blocks(
    device: str, layout: torch.Tensor, heads: int, key_heads: int, tokens: int, keys: int, causal: bool, live: int
):
    given = tensors(device, (3, heads, tokens, 24), *[(3, key_heads, keys, 24)] * 2)
    scores = 3 * live * 16 * 16
    found = counted(lambda *given: block_sparse_attention(*given, layout.to(device), block=16, causal=causal), *given)
    assert found == (4 * 24 * scores, 10 * 24 * scores)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_the_count_is_that_of_any_block(device: str, block: int):
    live = torch.rand(2, 20, 20, generator=seeded()) < 0.3
    given = tensors(device, *[(1, 2, 20 * block, 8)] * 3)
    index = BlockIndex.build(live.to(device), block)
    with FlopCounterMode(display=False) as forward:
        block_sparse_attention(*given, index)
    assert forward.get_total_flops() == 4 * 8 * int(live.sum()) * block**2


def test_head_sizes_are_rounded_up_and_the_gradient_of_a_bias_is_apart(device: str):
    given = tensors(device, *[(1, 1, 48, 20)] * 3, (1, 1, 48, 48))
    found = counted(lambda q, k, v, rpe: block_sparse_attention(q, k, v, LAYOUT.to(device), rpe=rpe), *given)
    assert found == (4 * 24 * 6 * 256, (10 + 4) * 24 * 6 * 256)
    given[3] = given[3].new_zeros(1, 2 * 48 - 1)
    assert found == counted(lambda *x: block_sparse_attention(*x[:3], LAYOUT.to(device), distance_bias=x[3]), *given)


@pytest.mark.parametrize(("causal", "live"), [(False, 6), (True, 5)])
def test_what_compiled_graphs_hold_counts_the_same(device: str, causal: bool, live: int):
    layout = MasterLayout(LAYOUT.bool()[None], 16)
    given = tensors(device, *[(1, 2, 48, 24)] * 3)
    call = (None, None, None, None, 0.2, causal, 0.0, layout.text)
    with FlopCounterMode(display=False) as counter:
        output, _, rows = torch.ops.ds_sparse.layout_attention_forward(*given, *call)
    assert counter.get_total_flops() == 4 * 24 * 2 * live * 256
    with FlopCounterMode(display=False) as counter:
        torch.ops.ds_sparse.layout_attention_backward(output, None, *given, output, rows, *call[:-1], True, layout.text)
    assert counter.get_total_flops() == 10 * 24 * 2 * live * 256


def test_windows_in_compiled_graphs_count_the_same(device: str):
    given = tensors(device, *[(2, 3, 40, 8)] * 3)
    numbers = ([3], False, [], [1])
    with FlopCounterMode(display=False) as forward:
        output, _, rows = torch.ops.ds_sparse.window_numbers_forward(*given, None, 0.2, *numbers)
    with FlopCounterMode(display=False) as backward:
        torch.ops.ds_sparse.window_numbers_backward(output, *given, output, rows, None, 0.2, True, *numbers)
    found = forward.get_total_flops(), backward.get_total_flops()
    assert found == counted(lambda *x: window_attention(*x, 3), *given)


def test_products_count_their_live_blocks(device: str):
    layout = PER_HEAD.to(device)
    q, values = tensors(device, (3, 2, 48, 20), (3, 9, 16, 16))
    once = 2 * 3 * 9 * 256 * 20
    assert counted(MatMul(layout, 16, "sdd", trans_b=True), q, q) == (once, 2 * once)
    assert counted(MatMul(layout, 16, "dsd"), values, q) == (once, 2 * once)
    assert counted(MatMul(layout, 16, "dds", trans_a=True), q, values) == (once, 2 * once)


def test_windows_count_blocks_in_attention_and_tokens_in_bands(device: str):
    q, band = tensors(device, (2, 3, 40, 8), (2, 3, 40, 7))
    # Without the 3 + 2 + 1 places on each end that no token has.
    once = 2 * 2 * 3 * 8 * (40 * 7 - 2 * 6)
    assert counted(lambda a, b: window_matmul(a, b.mT, 3), q, q) == (once, 2 * once)
    assert counted(lambda p, v: unwindow_matmul(p, v, 3), band, q) == (once, 2 * once)
    # 5 blocks of 8 on the diagonal and 4 on each side of it.
    index = WindowIndex.build(40, 3, block=8, device=device)
    scores = 2 * 3 * (5 + 4 + 4) * 64
    assert counted(lambda *given: window_attention(*given, index), q, q, q) == (4 * 8 * scores, 10 * 8 * scores)


@pytest.mark.parametrize(
    ("layout", "offset", "causal", "blocks"),
    [(LAYOUT, 20, False, 4 * 2 * 2), (LAYOUT, [0, 40], True, 4 * (1 + 2)), (PER_HEAD, 40, True, 2 * (2 + 1))],
)
def test_few_queries_count_the_blocks_of_their_rows(device: str, layout, offset, causal: bool, blocks: int):
    q, cache = tensors(device, (2, 4 if layout is LAYOUT else 2, 3, 24), (2, 2, 48, 24))
    index = BlockIndex.build(layout, 16).to(device)
    at = offset if isinstance(offset, int) else torch.tensor(offset, device=device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        block_sparse_attention(q, cache, cache, index, query_offset=at, causal=causal)
    assert counter.get_total_flops() == 4 * 24 * 3 * 16 * blocks


def test_queries_outside_of_the_layout_count_nothing(device: str):
    """Positions on a GPU are not checked, and give NaN there."""
    q, cache = tensors(device, (3, 4, 3, 24), (3, 2, 48, 24))
    index, at = BlockIndex.build(LAYOUT, 16).to(device), torch.tensor([-2, 46, 1 << 20], device=device)
    # The last query of the first sequence, and two of the second, in rows with two live blocks each.
    blocks = 4 * (1 + 2) * 2
    given = {"query": q, "key": cache, "bits": index.bits, "block": 16, "offsets": at, "offset": 0, "causal": False}
    assert _flops.at_positions(SimpleNamespace(**given)) == 4 * 24 * 16 * blocks
    if device == "cuda":
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            block_sparse_attention(q, cache, cache, index, query_offset=at)
        assert counter.get_total_flops() == 4 * 24 * 16 * blocks


@pytest.mark.parametrize("of_batch", [1, 3])
@pytest.mark.parametrize("of_heads", [1, 2, 8])
@pytest.mark.parametrize(("causal", "offset"), [(False, 0), (True, 0), (True, 30), (True, [0, 17, 44])], ids=str)
def test_chosen_blocks_are_counted_whole_once_and_not_ahead(
    device: str, of_heads: int, of_batch: int, causal: bool, offset: int | list[int]
):
    given = tensors(device, (3, 8, 40, 20), *[(3, 2, 70, 20)] * 2)
    chosen = torch.randint(-1, 5, (of_batch, of_heads, 40, 4), generator=seeded())
    named = (chosen.unsqueeze(-1) == torch.arange(5)).any(-2).expand(3, -1, -1, -1)
    at = torch.tensor(offset).reshape(-1, 1, 1, 1) + torch.arange(40)[:, None]
    blocks = int((named & (torch.arange(5) * 16 <= at) if causal else named).sum()) * 8 // of_heads
    options = {"causal": causal, "query_offset": torch.tensor(offset, device=device)}
    found = counted(lambda *x: selected_attention(*x, chosen.to(device), 16, **options), *given)
    assert found == (4 * 24 * 16 * blocks, 10 * 24 * 16 * blocks)


def test_lists_of_keys_count_all_places(device: str):
    given = tensors(device, (3, 8, 40, 20), (3, 2, 70, 20), (3, 2, 70, 12))
    numbers = torch.randint(-1, 20, (1, 2, 40, 4), generator=seeded()).to(device)
    pairs = 3 * 8 * 40 * 4 * 4
    found = counted(lambda *x: topk_attention(*x, numbers, 4, causal=True), *given)
    assert found == (2 * (20 + 12) * pairs, 2 * (3 * 20 + 2 * 12) * pairs)


@pytest.mark.parametrize("lead", [(), (2,), (3, 1), (3, 2)], ids=str)
def test_lists_of_tokens_count_their_pairs(device: str, lead: tuple[int, ...]):
    seen = torch.rand(*lead, 20, 30, generator=seeded()) < 0.3
    pairs = int(seen.expand(3, 2, 20, 30).sum())
    q, k, v = tensors(device, (3, 2, 20, 8), (3, 2, 30, 8), (3, 2, 30, 16))
    index = TokenIndex.from_mask(seen).to(device)
    found = counted(lambda *given: sparse_attn(*given, index), q, k, v)
    assert found == (2 * (8 + 16) * pairs, 2 * (3 * 8 + 2 * 16) * pairs)

    def total(scores: torch.Tensor | list) -> torch.Tensor:
        return scores.sum() if isinstance(scores, torch.Tensor) else sum(map(total, scores))

    assert counted(lambda q, k: total(sparse_matmul(q, k, index)), q, k) == (2 * 8 * pairs, 2 * 2 * 8 * pairs)


def test_meta_tensors_are_counted_and_indices_without_values_are_a_sentence():
    q = torch.empty(1, 4, 48, 24, device="meta")
    with FlopCounterMode(display=False) as counter:
        block_sparse_attention(q, q, q, LAYOUT)
        selected_attention(q, q, q, torch.tensor([0, 2]).expand(1, 1, 48, 2), 16)
    assert counter.get_total_flops() == 4 * 24 * 4 * (6 + 6) * 256
    index = BlockIndex.build(LAYOUT, 16).to("meta")
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="and block_indices has no values here"):
        selected_attention(q, q, q, torch.zeros(1, 1, 48, 2, dtype=torch.int64, device="meta"), 16)
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match="has to know the live blocks"):
        block_sparse_attention(q, q, q, index)
    x = torch.empty(1, 4, 48, 24)
    with pytest.raises(ValueError, match="index is on the meta device, where it has no values; make it on the CPU"):
        block_sparse_attention(x, x, x, index)
