"""block_sparse_attention: sizes and lists beyond those of the fuzz, memory, dropout, graphs, and what it refuses."""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from dataclasses import replace

import pytest
import torch
from fuzz.blocks import attention_case
from fuzz.cases import Case, normal_gradients
from fuzz.compare import hold
from fuzz.meanings import Tensors
from helpers import (
    DTYPES,
    as_view,
    captured,
    deterministic_algorithms,
    is_hopper,
    leaf,
    needs_gpu_memory,
    nothing_waits,
    random,
    seeded,
)
from ops_parameters import BACKENDS
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import block_sparse_attention, reference
from ds_sparse.index import BlockIndex

OPERATORS = ("block_attention_forward", "block_attention_backward", "block_attention_bias_backward")

FULL = torch.ones(2, 2, dtype=torch.bool)
MIXED = torch.tensor([[[1, 0, 1], [0, 0, 0], [0, 1, 1]], [[1, 1, 1], [0, 1, 0], [1, 0, 0]]]).bool()


def operands_of(
    layout: torch.Tensor, block: int = 16, tokens: int = 0, keys: int = 0, heads: int = 0, key_heads: int = 0,
    head_dim: int = 16, batch: int = 2, dtype: torch.dtype = torch.float32, view: str = "contiguous",
) -> Tensors:  # fmt: skip
    """Random operands for a layout; sizes of 0 are the layout's."""
    heads, rng = heads or (len(layout) if layout.dim() == 3 else 1), seeded()
    sizes = {"query": (heads, tokens or layout.shape[-2] * block)}
    sizes |= dict.fromkeys(("key", "value"), (key_heads or heads, keys or layout.shape[-1] * block))
    return {name: as_view(random(rng, batch, *size, head_dim, dtype=dtype), view) for name, size in sizes.items()}


def check(
    device: str, dtype: torch.dtype, layout: torch.Tensor, block: int = 16, more: Tensors | None = None,
    view: str = "contiguous", options: dict | None = None, **sizes: int,
) -> None:  # fmt: skip
    """Output, lse and all gradients, with biases and masks by name in `more`."""
    tensors = operands_of(layout, block, dtype=dtype, view=view, **sizes)
    tensors |= {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in (more or {}).items()}
    hold(case_for(tensors, layout, block, device, **(options or {})), device)


def case_for(tensors: Tensors, layout: torch.Tensor, block: int, device: str, **options) -> Case:
    live = layout if layout.dim() == 3 else layout[None]
    return attention_case(tensors, live, block, device, grads=normal_gradients("tokens_first"), **options)


def supported(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("fp64 is refused on CUDA")


def on_a_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("a matter of GPUs")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_every_block_and_dtype_with_every_option(device: str, block: int, dtype: torch.dtype):
    supported(dtype, device)
    tokens, keys = 3 * block - 3, 3 * block - 5
    rng = seeded()
    mask = random(rng, 2, 1, tokens, keys).masked_fill(torch.rand(2, 1, tokens, keys, generator=rng) < 0.1, -math.inf)
    more = {"rpe": random(rng, 1, 2, tokens, keys), "attn_mask": mask, "sinks": random(rng, 2)}
    more["key_padding_mask"] = torch.rand(2, keys, generator=rng) < 0.8
    options = {"causal": True, "dropout_p": 0.2}
    check(
        device, dtype, MIXED, block, more, "tokens_first", options, tokens=tokens, keys=keys, key_heads=1, head_dim=32
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [1, 7, 32, 40, 64, 96, 100, 128, 136, 200, 256])
def test_every_head_size(device: str, head_dim: int, dtype: torch.dtype):
    layout, options = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool(), {"causal": True}
    check(device, dtype, layout, 64, options=options, tokens=100, keys=190, heads=2, head_dim=head_dim, batch=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 70), (70, 1), (40, 130), (130, 40), (64, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lengths_that_differ_and_end_anywhere(device: str, tokens: int, keys: int, causal: bool, dtype: torch.dtype):
    for block in (16, 64):
        live = torch.rand(-(-tokens // block), -(-keys // block), generator=seeded()) < 0.8
        live[0, 0] = True
        check(device, dtype, live, block, options={"causal": causal}, tokens=tokens, keys=keys, heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block", "rows", "columns"),
    [
        pytest.param(8, 140, 150, marks=pytest.mark.slow_on_cpu("tiles are those of other blocks")),
        (16, 80, 70),
        pytest.param(64, 22, 24, marks=pytest.mark.slow_on_cpu("tiles are those of other blocks")),
    ],
)
def test_lists_of_every_length(device: str, block: int, rows: int, columns: int, dtype: torch.dtype):
    """Full, short and empty rows and columns: long lists are cut, and their parts put together."""
    live = torch.rand(2, rows, columns, generator=seeded()) < 0.02
    live[0, 3] = live[1, -1] = live[0, :, 2] = live[1, :, -1] = True
    live[0, 4:6] = live[1, 0] = live[:, :, 5] = False
    for layout in (live, live[0]):
        index = BlockIndex.build(layout, block)
        assert len(index.row_tiles.cuts) and len(index.column_tiles.cuts), "nothing is cut"
        check(device, dtype, layout, block, tokens=rows * block - 3, keys=columns * block - 5, batch=1)


@pytest.mark.parametrize(
    "option",
    [
        *(
            pytest.param(size, marks=pytest.mark.slow_on_cpu("every head size is another test's"))
            for size in (40, 72, 256)
        ),
        "grouped heads",
        "dropout",
        "padding",
    ],
)
def test_cut_lists_with_options(device: str, option: str | int):
    """Keys that are padding leave nothing of whole parts of the long rows."""
    live = torch.rand(80, 70, generator=seeded()) < 0.02
    live[3] = live[:, 2] = True
    index = BlockIndex.build(live.to(device), 16)
    assert len(index.row_tiles.cuts) and len(index.column_tiles.cuts), "nothing is cut"
    if is_hopper(device):
        assert len(index.tiles("rows", 128).cuts) and len(index.tiles("columns", 128).cuts), "nothing is cut"
    sizes = {"heads": 2, "batch": 1, "head_dim": option if isinstance(option, int) else 16}
    sizes["key_heads"] = 1 if option == "grouped heads" else 2
    keeps = torch.ones(1, 70 * 16, dtype=torch.bool)
    keeps[:, 200:1000] = False
    more = {"key_padding_mask": keeps} if option == "padding" else {}
    options = {"dropout_p": 0.2} if option == "dropout" else {}
    check(device, torch.bfloat16, live, more=more, options=options, **sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not is_hopper("cuda"), reason="tiles have two halves on Hopper")
@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_halves_of_a_tile_are_walked_apart_or_together(block: int, differ: bool):
    """Of lists that are cut, of tiles without a step, with keys that do not exist and more queries than a block row."""
    live = torch.rand(2, 3072 // block, 3072 // block, generator=seeded()) < 0.1
    live[0, 4], live[1, 8:16], live[:, :, 3] = True, False, True
    index = BlockIndex.build(live.cuda(), block)
    for walked in (index, index.causal()):
        walked._made["rows", 128] = replace(walked.tiles("rows", 128), lines_differ=differ)
    for causal, tokens, growth in itertools.product((False, True), (3072, 3065), (1, 30)):
        tensors = operands_of(live, block, tokens, tokens, head_dim=128, batch=1, dtype=torch.bfloat16)
        tensors["query"] *= growth
        tensors["key_padding_mask"] = torch.rand(1, tokens, generator=seeded()) < 0.7
        wide = {name: x.cuda() if x.dtype == torch.bool else x.cuda().double() for name, x in tensors.items()}
        wanted, lse = reference.attention(**wide, layout=live.cuda(), block=block, causal=causal, return_lse=True)
        given = {name: x.cuda() for name, x in tensors.items()}
        found, found_lse = block_sparse_attention(
            **given, layout=index.causal() if causal else index, causal=causal, return_lse=True
        )
        torch.testing.assert_close(found.double(), wanted, rtol=2**-7, atol=0.03)
        torch.testing.assert_close(found_lse.double(), lse.double(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "growth", [20, pytest.param(60, marks=pytest.mark.slow_on_cpu("between the two others")), 1000]
)
def test_scores_that_grow_along_a_row(device: str, growth: float, padded: bool, head_dim: int, dtype: torch.dtype):
    """Exponentials of scores that lie so far above a row's first ones are beyond what fp16, or float32, can hold."""
    supported(dtype, device)
    layout = torch.ones(3, 18, dtype=torch.bool)
    tensors = operands_of(layout, 64, head_dim=head_dim, batch=1, dtype=dtype)
    tensors["query"][..., 0] = head_dim**0.5 * torch.tensor([1.0, 0.5, -1.0]).repeat(64)
    tensors["key"][..., 0] = torch.linspace(0, growth, 1152)
    if padded:
        tensors["key_padding_mask"] = torch.rand(1, 1152, generator=seeded()) < 0.7
    hold(case_for(tensors, layout, 64, device), device)


ALWAYS = [("plain", 64, torch.bfloat16), ("plain", 128, torch.float32), ("dropout", 128, torch.bfloat16)]
ALWAYS += [("rpe", 64, torch.float32)]


@pytest.mark.parametrize(
    ("option", "head_dim", "dtype"),
    [
        case if case in ALWAYS else pytest.param(*case, marks=pytest.mark.slow_on_cpu("other pairs of the options"))
        for case in itertools.product(("plain", "dropout", "rpe"), (64, 128), (torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_long_runs_of_masked_keys(device: str, option: str, head_dim: int, dtype: torch.dtype):
    """Padding of whole steps, one after the other: at the end, the beginning, in the middle, and everywhere."""
    keys = 24 * 64
    kept = torch.ones(4, keys, dtype=torch.bool)
    kept[0, 300:] = kept[1, :1200] = kept[2, 64:640] = kept[2, 700:1500] = kept[3] = False
    layout = torch.rand(1, 2, 24, generator=seeded()) < 0.8
    tensors = operands_of(layout, 64, head_dim=head_dim, batch=4, dtype=dtype) | {"key_padding_mask": kept}
    if option == "rpe":
        tensors["rpe"] = random(seeded(1), 1, 1, 2 * 64, keys, dtype=dtype)
    hold(case_for(tensors, layout, 64, device, dropout_p=0.2 if option == "dropout" else 0.0), device)

    # One such list after the other, on the same multiprocessor: each of many heads as the one.
    if device == "cuda" and option == "plain":
        inputs = {name: x.to(device) for name, x in tensors.items()}
        alone = block_sparse_attention(**inputs, layout=layout)
        many = {name: x.repeat(1, 200, 1, 1) if x.dim() == 4 else x for name, x in inputs.items()}
        together = block_sparse_attention(**many, layout=layout)
        assert torch.equal(together, alone.expand_as(together))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_over_long_lists_and_many_heads(device: str, head_dim: int, dtype: torch.dtype):
    """Longer than the keys that are on their way at a time, and more of them than multiprocessors."""
    sizes = {"heads": 80 if device == "cuda" else 2, "head_dim": head_dim, "batch": 1}
    check(device, dtype, torch.ones(4, 20, dtype=torch.bool), 64, options={"dropout_p": 0.2}, **sizes)


def test_dropout_of_nearly_all(device: str):
    check(device, torch.bfloat16, torch.ones(2, 12, dtype=torch.bool), 64, options={"dropout_p": 0.97}, head_dim=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_biases_of_16_bits_beside_numbers_added_to_keys(device: str, block: int, head_dim: int, dtype: torch.dtype):
    """Of pairs of tokens, some of which are masked, and of keys that are left out, nearly left out, or neither."""
    layout = torch.rand(2, 5, 6, generator=seeded()) < 0.6
    queries, keys = 5 * block, 6 * block
    rpe = random(seeded(1), 1, 2, queries, keys)
    rpe[..., ::7] = -torch.inf
    of_keys = random(seeded(2), 2, keys)
    of_keys[0, keys // 2 :] = -10000.0
    of_keys[1, : keys // 3] = -torch.inf
    of_keys[1, keys // 3 : keys // 2] = 0
    check(device, dtype, layout, block, {"rpe": rpe, "key_padding_mask": of_keys}, head_dim=head_dim)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("block", "keys"), [(16, 75), (32, 100), (64, 129), (128, 300)])
def test_numbers_added_to_keys_that_end_anywhere(device: str, block: int, keys: int, head_dim: int, dropout_p: float):
    """Steps of keys have their numbers, where the last of them is not whole."""
    layout = torch.ones(2, 2, -(-keys // block), dtype=torch.bool)
    layout[:, 0, 0] = False
    tensors = operands_of(layout, block, head_dim=head_dim, dtype=torch.bfloat16)
    tensors |= {name: tensors[name][:, :, :keys] for name in ("key", "value")}
    of_keys = 3 * random(seeded(2), 2, keys)
    of_keys[0, ::5] = -torch.inf
    hold(case_for(tensors | {"key_padding_mask": of_keys}, layout, block, device, dropout_p=dropout_p), device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
def test_gradients_of_rows_that_have_large_negatives_only(device: str, mask: str, dtype: torch.dtype):
    """They are those of the softmax without them, though float32 keeps little of the log of a sum beside such scores.

    Scores are multiples of 1/8, to which -10000 is added without a rounding: what is rounded is found out.
    """
    for block in (16, 64):
        rng, tokens = seeded(), 3 * block
        tensors = operands_of(MIXED, block, head_dim=64, dtype=dtype)
        for name in ("query", "key"):
            tensors[name] = torch.randint(-1, 2, tensors[name].shape, generator=rng).to(dtype)
        tensors["rpe"] = torch.randint(-8, 9, (1, 2, tokens, tokens), generator=rng) / 8
        added = torch.full((2, 1, tokens, tokens) if mask == "attn_mask" else (2, tokens), -10000.0)
        found = []
        for bias in (added, torch.zeros_like(added)):
            leaves = {name: leaf(x, device) for name, x in tensors.items()}
            options = {"scale": 0.125, mask: bias.to(device), "return_lse": True}
            results = block_sparse_attention(**leaves, layout=MIXED, block=block, **options)
            grads = [random(seeded(i), *x.shape, dtype=x.dtype).to(device) for i, x in enumerate(results)]
            found.append(torch.autograd.grad(results, list(leaves.values()), grads))
        rtol, atol = (1.6e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
        torch.testing.assert_close(*found, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_dtype", ["as operands", "fp32"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_bias_by_distance_with_blocks_of_16_and_more(device: str, block: int, bias_dtype: str, dtype: torch.dtype):
    """Tiles of 128 tokens have blocks of several places, those at the ends are short, and some distances are masked."""
    rows, columns, rng = max(3, 352 // block), max(2, 288 // block), seeded()
    tokens, keys = rows * block - 7, columns * block - 5
    layout = torch.rand(2, rows, columns, generator=rng) < 0.5
    bias = random(rng, 1 if block == 32 else 2, 2 * max(tokens, keys) + 5)
    bias[:, torch.rand(bias.shape[1], generator=rng) < 0.05] = -math.inf
    bias[:, torch.rand(bias.shape[1], generator=rng) < 0.05] = torch.finfo(dtype).min
    padding = random(rng, 2, keys).masked_fill(torch.rand(2, keys, generator=rng) < 0.1, -math.inf)
    # Few heads take less than 64 numbers a token; no mask, and one of keys, are each with both paddings of heads.
    head_dim, masks = (40, {}) if block in (16, 64) else (72, {"key_padding_mask": padding.to(dtype)})
    tensors = operands_of(layout, block, tokens, keys, key_heads=1, head_dim=head_dim, dtype=dtype) | masks
    tensors["distance_bias"] = bias.to(torch.float32 if bias_dtype == "fp32" else dtype)
    hold(case_for(tensors, layout, block, device, causal=block == 128), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [None, 4, 20], ids=["plain", "few at an offset", "many at an offset"])
@pytest.mark.parametrize("by_distance", [False, True], ids=["rpe", "distance_bias"])
def test_several_lowest_biases_count_as_one(device: str, by_distance: bool, queries: int | None, dtype: torch.dtype):
    """Where none of the keys is without; those of fp16 are ordinary numbers, of which two are lower than one."""
    supported(dtype, device)
    low, keys, tokens = torch.finfo(dtype).min, 40, queries or 40
    layout = torch.ones(1, 5, 5, dtype=torch.bool)
    tensors = operands_of(layout, 8, tokens, heads=2, batch=1, dtype=dtype)
    padding, mask = torch.zeros(1, keys, dtype=dtype), torch.full((tokens, keys), low, dtype=dtype)
    padding[:, 2:] = low
    # Others have -1e30 where the dtype has it, and below that there is nothing.
    padding[:, 1] = max(low, -1e30)
    bias = torch.zeros(2, 2 * keys - 1, dtype=dtype) if by_distance else torch.zeros(1, 2, tokens, keys, dtype=dtype)
    bias[..., 5 : keys + 3] = low
    tensors |= {"attn_mask": mask, "key_padding_mask": padding, "distance_bias" if by_distance else "rpe": bias}
    case = case_for(tensors, layout, 8, device, offset=None if queries is None else keys - tokens)
    hold(case, device)
    if dtype != torch.float16:
        output = case.call({name: x.to(device) for name, x in tensors.items()})["output"].double()
        mean = tensors["value"].to(device).double().mean(2, keepdim=True)
        torch.testing.assert_close(output, mean.expand_as(output), rtol=0.02, atol=0.01)


def test_a_float64_mask_beyond_float32_stays_finite(device: str):
    for name, shape in (("attn_mask", (32, 32)), ("rpe", (32, 32)), ("key_padding_mask", (2, 32))):
        tensors = operands_of(FULL) | {name: torch.full(shape, -1e300, dtype=torch.float64)}
        hold(case_for(tensors, FULL, 16, device), device)


def test_gradients_of_lse_alone(device: str):
    tensors = operands_of(MIXED) | {"rpe": random(seeded(), 1, 1, 48, 48, dtype=torch.float32)}
    exact = {name: leaf(x.double(), "cpu") for name, x in tensors.items()}
    ours = {name: leaf(x, device) for name, x in tensors.items()}
    found, expected = (
        torch.autograd.grad(
            lse.masked_fill(lse.isinf(), 0).square().sum(), list(leaves.values()), materialize_grads=True
        )
        for leaves, (_, lse) in (
            (ours, block_sparse_attention(**ours, layout=MIXED, return_lse=True)),
            (exact, reference.attention(**exact, layout=MIXED, block=16, return_lse=True)),
        )
    )
    torch.testing.assert_close([x.double().cpu() for x in found], list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout_heads", [1, 64])
def test_sequences_of_many_heads_are_as_each_alone(device: str, layout_heads: int):
    """More heads than the CPU packs at a time; NaN in one stays behind its mask."""
    query = random(seeded(), 3, 64, 512, 64).float().to(device)
    key, value = (random(seeded(n), 3, 32, 512, 64).float().to(device) for n in (1, 2))
    value[2, 31, 500] = math.nan
    layout = (torch.rand(layout_heads, 16, 16, generator=seeded(3)) < 0.1) | torch.eye(16, dtype=torch.bool)
    found = block_sparse_attention(query, key, value, layout.to(device), block=32, causal=True)
    for b in range(3):
        sequence = slice(b, b + 1)
        alone = block_sparse_attention(
            query[sequence], key[sequence], value[sequence], layout.to(device), block=32, causal=True
        )
        torch.testing.assert_close(found[sequence], alone, equal_nan=True)


@pytest.mark.parametrize("kernel", [False, True], ids=["few at an offset", "kernel"])
def test_the_gradient_of_a_bias_below_the_lowest_is_that_of_the_bias(device: str, kernel: bool):
    """Not none, in whichever dtype it is given."""
    query, key, value = (x.to(device) for x in random(seeded(), 3, 1, 1, 16, 8, dtype=torch.float32))
    offset, found = None if kernel else 0, []
    for dtype, low in ((torch.float32, -1e30), (torch.float32, -3e38), (torch.float64, -1e300)):
        bias = torch.full((16, 16), low, dtype=dtype, device=device, requires_grad=True)
        output = block_sparse_attention(query, key, value, torch.ones(2, 2), block=8, query_offset=offset, rpe=bias)
        found.append(torch.autograd.grad(output.square().sum(), bias)[0].float())
    assert found[0].any()
    torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_of_one_head_is_in_the_gradients_of_no_other(device: str, head_dim: int):
    """Nor does it get there by way of tokens that a block has and the sequence has not."""
    inputs = [random(seeded(i), 2, 2, 100, head_dim, dtype=torch.bfloat16) for i in range(3)]
    inputs[1][0, 1, 50, 0] = math.nan
    query, key, value = (leaf(x, device) for x in inputs)
    output = block_sparse_attention(query, key, value, torch.ones(1, 1, dtype=torch.bool), block=128)
    for grad in torch.autograd.grad(output.sum(), (query, key, value)):
        finite = grad.isfinite().flatten(2).all(2)
        assert finite.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_behind_the_last_token_is_not_read(device: str, dtype: torch.dtype):
    layout = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]])
    tensors = operands_of(layout, tokens=41, keys=43, heads=2, dtype=dtype)

    def surrounded(x: torch.Tensor) -> torch.Tensor:
        storage = x.new_full((x.shape[0], x.shape[1], 64, 32), math.nan)
        storage[:, :, : x.shape[2], :16] = x
        return storage[:, :, : x.shape[2], :16]

    found = []
    for place in (surrounded, torch.clone):
        inputs = {name: place(x.to(device)).requires_grad_() for name, x in tensors.items()}
        torch.manual_seed(0)
        output, lse = block_sparse_attention(**inputs, layout=layout, dropout_p=0.3, causal=True, return_lse=True)
        grad = place(torch.ones_like(output))
        found.append((output, lse, *torch.autograd.grad(output, list(inputs.values()), grad)))
    for x, y in zip(*found, strict=True):
        assert torch.isfinite(x).all() and torch.equal(x, y)


class Calls(TorchDispatchMode):
    """The operators called in its scope, and the arguments of ours."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.arguments: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func != torch.ops.aten.detach.default:
            self.names.append(str(func))
        if func.namespace == "ds_sparse":
            self.arguments.append(args)
        return func(*args, **(kwargs or {}))


def test_a_call_and_its_gradients_fill_no_memory(device: str):
    """Sums begin where a kernel that runs anyway writes their zeros; what steps of models fill besides is PyTorch's."""
    layout = torch.rand(3, 3, generator=seeded()) < 0.7
    inputs = [x.detach().requires_grad_() for x in packed(device, "BTHD")]
    index, grad = BlockIndex.build(layout.to(device), 16), torch.ones_like(inputs[0])

    def step() -> None:
        torch.autograd.grad(block_sparse_attention(*inputs, index), inputs, grad)

    step()
    with Calls() as calls:
        step()
    assert not [name for name in calls.names if any(word in name for word in ("zero", "fill", "full", "ones"))]
    if device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        kernels = [event.key for event in profile.key_averages()]
        assert kernels and not [name for name in kernels if "Memset" in name or "Fill" in name]


def packed(device: str, order: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Query, key and value (2, 4, 48, 32) as parts of one tensor, as projections in one product give them."""
    rng = seeded()
    if order == "BT3HD":
        parts = random(rng, 2, 48, 3, 4, 32, dtype=dtype).to(device).unbind(2)
    elif order == "BTH3D":
        parts = random(rng, 2, 48, 4, 96, dtype=dtype).to(device).chunk(3, -1)
    else:
        parts = [random(rng, 2, 48, 4, 32, dtype=dtype).to(device) for _ in range(3)]
    return [x.transpose(1, 2) for x in parts]


@pytest.mark.parametrize("order", ["BTHD", "BT3HD", "BTH3D"])
def test_tokens_before_heads_in_memory_are_read_in_place(device: str, order: str):
    """Nothing is copied on the way to the operator, and results have the same order of memory."""
    inputs = [x.detach().requires_grad_() for x in packed(device, order)]
    layout = torch.rand(3, 3, generator=seeded()) < 0.7
    index = BlockIndex.build(layout, 16).to(device)
    with Calls() as calls:
        output, lse = block_sparse_attention(*inputs, index, return_lse=True)
    assert calls.names == ["ds_sparse.block_attention_forward.default"]
    grad = torch.ones_like(output.transpose(1, 2).contiguous()).transpose(1, 2)
    with Calls() as calls:
        found = torch.autograd.grad(output, inputs, grad)
    assert calls.names == ["ds_sparse.block_attention_backward.default"]
    for x in (output, *found):
        assert x.transpose(1, 2).is_contiguous()
    copies = [x.detach().contiguous().requires_grad_() for x in inputs]
    expected = block_sparse_attention(*copies, index, return_lse=True)
    assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])
    for x, y in zip(found, torch.autograd.grad(expected[0], copies, grad), strict=True):
        assert torch.equal(x, y) and y.is_contiguous()


def test_an_expanded_mask_is_not_spelled_out(device: str):
    inputs = packed(device, "BTHD")
    index = BlockIndex.build(torch.ones(3, 3, dtype=torch.bool), 16).to(device)
    for mask in (torch.rand(1, 1, 48, 48, generator=seeded()), torch.rand(1, 1, 1, 48, generator=seeded()) < 0.5):
        mask = mask.to(device).expand(2, 4, 48, 48)
        with Calls() as calls:
            block_sparse_attention(*inputs, index, attn_mask=mask)
        made = [name for name in calls.names if not name.startswith(("aten.expand", "aten.view"))]
        assert made == ["ds_sparse.block_attention_forward.default"]


def test_an_expanded_mask_of_another_dtype_is_converted_once(device: str):
    inputs = packed(device, "BTHD")
    index = BlockIndex.build(torch.ones(3, 3, dtype=torch.bool), 16).to(device)
    mask = random(seeded(), 1, 1, 48, 48, dtype=torch.float16).to(device)
    with Calls() as calls:
        found = block_sparse_attention(
            *inputs, index, attn_mask=mask.expand(2, 4, -1, -1), rpe=mask.expand(2, 4, -1, -1)
        )
    for bias in (calls.arguments[0][3], calls.arguments[0][5]):
        assert bias.dtype == torch.float32 and bias.untyped_storage().nbytes() == 48 * 48 * 4
    assert torch.equal(found, block_sparse_attention(*inputs, index, attn_mask=mask.float(), rpe=mask.float()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_each_element_of_an_expanded_bias_has_its_own_gradient(device: str, dtype: torch.dtype):
    """Also where it is converted: its gradient is not that of the number which it repeats."""
    inputs = packed(device, "BTHD")
    layout = torch.ones(3, 3, dtype=torch.bool)
    bias = random(seeded(), 1, 1, 48, 48, dtype=dtype).to(device)
    found = []
    for rpe in (bias.expand(2, 4, -1, -1), bias.repeat(2, 4, 1, 1)):
        rpe = rpe.detach().requires_grad_()
        output = block_sparse_attention(*inputs, layout, rpe=rpe)
        found.append(torch.autograd.grad(output, rpe, torch.ones_like(output))[0])
    assert found[0][1, 3].any() and torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 48), (4, 48, 1), (1, 1, 1, 1)])
def test_the_gradient_of_a_bias_that_is_repeated_is_rounded_once(device: str, shape: tuple[int, ...], dtype):
    inputs, layout = packed(device, "BTHD", dtype), torch.ones(3, 3, dtype=torch.bool)
    weights = random(seeded(1), 2, 4, 48, 32, dtype=dtype).to(device)
    bias, found = random(seeded(2), *shape, dtype=dtype).to(device), []
    for rpe in (bias, bias.float()):
        rpe = rpe.requires_grad_()
        output = block_sparse_attention(*inputs, layout, rpe=rpe)
        found.append(torch.autograd.grad(output, rpe, weights)[0])
    assert torch.equal(found[0], found[1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_cannot_be_read_in_place_is_copied(device: str, dtype: torch.dtype):
    index = BlockIndex.build(torch.rand(3, 3, generator=seeded()) < 0.7, 16).to(device)

    def odd_offset(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(x.shape).copy_(x)

    def odd_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=dtype, device=device)[..., :-1].copy_(x)

    def odd_batch(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x[0].numel() * 2 + 3, dtype=dtype, device=device).as_strided(
            x.shape, (x[0].numel() + 3, *x.contiguous().stride()[1:])
        ).copy_(x)  # fmt: skip

    def transposed(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    operands = packed(device, "BTHD", dtype)
    first = None
    for place in (torch.Tensor.contiguous, odd_offset, odd_rows, odd_batch, transposed):
        inputs = [place(x).detach().requires_grad_() for x in operands]
        with Calls() as calls:
            output = block_sparse_attention(*inputs, index)
            results = [output, *torch.autograd.grad(output, inputs, place(operands[0]))]
        forward, backward = calls.arguments
        for x in (*forward[:3], backward[0], *backward[2:5]):
            assert x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 8 == 0 for stride in x.stride()[:3])
        first = first or results
        for x, y in zip(results, first, strict=True):
            assert torch.equal(x, y), place.__name__


def test_the_index_of_a_layout_is_built_once_and_again_after_a_change(device: str, monkeypatch: pytest.MonkeyPatch):
    build, built = BlockIndex.build.__func__, []

    def counted(cls, layout: torch.Tensor, block: int) -> BlockIndex:
        built.append(build(cls, layout, block))
        return built[-1]

    monkeypatch.setattr(BlockIndex, "build", classmethod(counted))
    x = random(seeded(), 1, 1, 32, 8, dtype=torch.float32).to(device)
    for on in ("cpu", device):
        built.clear()
        layout = torch.ones(2, 2, dtype=torch.bool, device=on)
        dense = [block_sparse_attention(x, x, x, layout) for _ in range(3)][-1]
        assert len(built) == 1 and built[0].device == x.device
        layout[0, 1] = False
        changed = block_sparse_attention(x, x, x, layout)
        assert len(built) == 2
        expected = reference.attention(x.cpu(), x.cpu(), x.cpu(), layout.cpu(), 16)
        torch.testing.assert_close(changed.cpu(), expected)
        assert not torch.equal(changed, dense)
        # The layout takes its index with it.
        tiles = weakref.ref(built[-1])
        built.clear()
        del layout
        gc.collect()
        assert tiles() is None


def test_a_layout_made_in_inference_mode(device: str):
    x = random(seeded(), 1, 1, 32, 8, dtype=torch.float32).to(device)
    with torch.inference_mode():
        layout = torch.ones(2, 2, dtype=torch.bool)
        dense = block_sparse_attention(x, x, x, layout)
        layout[0, 1] = False
        assert not torch.equal(block_sparse_attention(x, x, x, layout), dense)


def replayed(output: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> None:
    """The output is linear in value: with the same dropout in backward, and only then, the products agree."""
    (grad,) = torch.autograd.grad(output, value, weights)
    forwards, backwards = (output.double() * weights).sum(), (grad.double() * value).sum()
    torch.testing.assert_close(forwards, backwards, rtol=1e-5, atol=1e-3)


def test_dropout_is_drawn_from_the_generator_of_torch(device: str):
    inputs = {name: leaf(x, device) for name, x in operands_of(FULL, 64, heads=2).items()}

    def run(dropout_p: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
        return block_sparse_attention(**inputs, layout=FULL, dropout_p=dropout_p, return_lse=True)

    torch.manual_seed(3)
    first, second = run(), run()
    torch.manual_seed(3)
    again = run()
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])
    assert torch.equal(second[1], run(0.0)[1]), "lse is of all probabilities"
    weights = random(seeded(), *first[0].shape).to(device, torch.float32)
    for output, _ in (first, second):
        replayed(output, weights, inputs["value"])


def test_without_dropout_no_random_number_is_drawn(device: str):
    inputs = {name: x.to(device) for name, x in operands_of(MIXED).items()}
    torch.manual_seed(3)
    block_sparse_attention(**inputs, layout=MIXED)
    drawn = torch.rand(4, device=device)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, device=device))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_replays_dropout(device: str, use_reentrant: bool):
    grads = []
    for checkpointed in (False, True):
        inputs = [leaf(x, device) for x in operands_of(MIXED).values()]

        def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return block_sparse_attention(query, key, value, MIXED, dropout_p=0.3)

        torch.manual_seed(5)
        options = {"use_reentrant": use_reentrant}
        output = torch.utils.checkpoint.checkpoint(run, *inputs, **options) if checkpointed else run(*inputs)
        torch.rand(3, device=device)
        output.square().sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_dropout_is_replayed_in_backward(device: str, backend: str, checkpointed: bool):
    index = BlockIndex.build(FULL, 16).to(device)
    inputs = [x.float() for x in packed(device, "BTHD")]
    query, key, value = (x[:, :, :32].detach().requires_grad_() for x in inputs)

    def attend(query, key, value):
        return block_sparse_attention(query, key, value, index, dropout_p=0.4)

    def run(*inputs):
        if not checkpointed:
            return attend(*inputs)
        return torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    first, second = compiled(query, key, value), compiled(query, key, value)
    assert not torch.equal(first, second)
    for output in (first, second):
        replayed(output, random(seeded(), *output.shape).to(device, torch.float32), value)


def test_under_compile_an_index_that_would_have_to_be_made_is_asked_for(device: str):
    x = random(seeded(), 1, 1, 32, 8, dtype=torch.float32).to(device)
    index = BlockIndex.build(FULL, 16).to(device)
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"pass BlockIndex\.build\(layout, block\)"):
        compiled(x, x, x, FULL)
    with pytest.raises(Exception, match=r"pass index\.causal\(\)"):
        compiled(x, x, x, index, causal=True)
    found = compiled(x, x, x, index.causal(), causal=True)
    assert torch.equal(found, block_sparse_attention(x, x, x, index, causal=True))


@pytest.mark.gpu
def test_float64_on_cuda_is_refused(device: str):
    on_a_gpu(device)
    x = torch.zeros(1, 1, 32, 8, device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64 on CUDA, .* use MatMul and Softmax"):
        block_sparse_attention(x, x, x, FULL)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_once_the_index_is_built(device: str):
    on_a_gpu(device)
    tensors = operands_of(MIXED, head_dim=20, key_heads=1, dtype=torch.bfloat16)
    inputs = {name: leaf(x, device) for name, x in tensors.items()}
    rpe = torch.randn(1, 2, 48, 48, device=device, dtype=torch.float16, requires_grad=True)
    masks = [
        (torch.zeros(2, 48, device=device, dtype=torch.float64), torch.ones(48, 48, device=device, dtype=torch.bool)),
        (torch.ones(2, 48, device=device, dtype=torch.bool), torch.zeros(2, 1, 1, 48, device=device).half()),
    ]
    layout = MIXED.to(device)

    def run() -> None:
        for padding, mask in masks:
            options = {"rpe": rpe, "key_padding_mask": padding, "attn_mask": mask, "causal": True, "dropout_p": 0.1}
            output, lse = block_sparse_attention(**inputs, **options, layout=layout, return_lse=True)
            torch.autograd.grad((output.sum(), lse.sum()), [*inputs.values(), rpe])

    run()
    with nothing_waits():
        run()


@pytest.mark.gpu
def test_dropout_captured_in_a_cuda_graph_is_another_one_each_time(device: str):
    on_a_gpu(device)
    index = BlockIndex.build(MIXED, 16).to(device)
    inputs = [leaf(x, device) for x in operands_of(MIXED, head_dim=32).values()]
    weights = torch.randn_like(inputs[0])

    def run() -> list[torch.Tensor]:
        output = block_sparse_attention(*inputs, index, dropout_p=0.4)
        return [output.detach(), *torch.autograd.grad(output, inputs, weights)]

    graph, results = captured(run)
    outputs = []
    for _ in range(2):
        graph.replay()
        outputs.append(results[0].clone())
        products = [(x.double() * y).sum() for x, y in ((results[0], weights), (results[3], inputs[2]))]
        torch.testing.assert_close(*products, rtol=1e-5, atol=1e-3)
    assert not torch.equal(*outputs)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_captured_a_new_layout_is_refused(device: str):
    on_a_gpu(device)
    x, layout = torch.zeros(1, 1, 32, 16, device=device), FULL.to(device)
    refused = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="cannot be built while a CUDA graph is captured"), refused:
        block_sparse_attention(x, x, x, layout)
    expected = block_sparse_attention(x, x, x, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = block_sparse_attention(x, x, x, layout)
    graph.replay()
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_several_streams(device: str):
    on_a_gpu(device)
    live = torch.rand(4, 64, 64, generator=seeded()) < 0.2
    inputs = [torch.randn(2, 4, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(8)]

    def run(x: torch.Tensor, layout: torch.Tensor) -> list[torch.Tensor]:
        with deterministic_algorithms():
            output = block_sparse_attention(x, x, x, layout)
            return [output, *torch.autograd.grad(output.square().sum(), x)]

    expected = [run(x, live) for x in inputs]
    torch.cuda.synchronize()
    layout, streams = live.clone(), [torch.cuda.Stream() for _ in inputs]
    found = []
    for x, stream in zip(inputs, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(run(x, layout))
    torch.cuda.synchronize()
    for x, y in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.gpu
def test_several_devices(device: str):
    on_a_gpu(device)
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = operands_of(MIXED, dtype=torch.bfloat16) | {"rpe": random(seeded(), 1, 2, 48, 48, dtype=torch.bfloat16)}
    layout, results = MIXED.to("cuda:0"), []
    for place in ("cuda:0", "cuda:1"):
        inputs = {name: leaf(x, place) for name, x in tensors.items()}
        for form in (layout, BlockIndex.build(layout, 16)):
            with deterministic_algorithms():
                output, lse = block_sparse_attention(**inputs, layout=form, return_lse=True)
                found = [output, lse, *torch.autograd.grad(output.square().sum(), list(inputs.values()))]
            assert all(str(x.device) == place for x in found)
            results.append([x.cpu() for x in found])
    assert torch.cuda.current_device() == 0
    for x in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(x, results[0], strict=True))


@pytest.mark.gpu
def test_memory_grows_with_tokens_and_not_with_their_square(device: str):
    on_a_gpu(device)
    taken = []
    for tokens in (8192, 16384):
        blocks = torch.arange(tokens // 64)
        index = BlockIndex.build((blocks[:, None] - blocks).abs() < 3, 64).to(device)
        inputs = [
            torch.randn(1, 2, tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        mask = torch.ones(1, 1, 1, tokens, device=device, dtype=torch.bool).expand(1, 2, tokens, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = block_sparse_attention(*inputs, index, attn_mask=mask, dropout_p=0.1)
        forward = torch.cuda.max_memory_allocated() - before
        assert forward < 1.1 * output.numel() * 2 + 2 * tokens * 4 + 2**20
        output.sum().backward()
        taken.append(torch.cuda.max_memory_allocated() - before)
    assert taken[1] < 2.1 * taken[0]


@pytest.mark.gpu
def test_more_heads_than_a_grid_dimension_holds(device: str):
    """Batch times heads is above 65535."""
    on_a_gpu(device)
    x = torch.randn(300, 300, 16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    output = block_sparse_attention(x, x, x, torch.ones(1, 1, dtype=torch.bool), block=16)
    expected = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)
    weights = torch.randn_like(output)
    found, wanted = (torch.autograd.grad(y, x, weights)[0] for y in (output, expected))
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.1)


@pytest.mark.gpu
def test_more_elements_than_int32_counts(device: str):
    """The last tokens of operands, and of a mask, of more than 2^31 elements."""
    needs_gpu_memory(device, 40)
    x = torch.randn(1, 2, 2**17, 128, device=device, dtype=torch.bfloat16)
    x = x.repeat(65, 1, 1, 1).requires_grad_()
    assert x.numel() > 2**31
    output, lse = block_sparse_attention(x, x, x, torch.eye(2**10, dtype=torch.bool), block=128, return_lse=True)
    (grad,) = torch.autograd.grad(output, x, output.detach())
    last = x[-1:, -1:, -128:].detach().requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(last, last, last)
    torch.testing.assert_close(output[-1:, -1:, -128:], expected, rtol=0.02, atol=0.02)
    (expected_grad,) = torch.autograd.grad(expected, last, expected.detach())
    torch.testing.assert_close(grad[-1:, -1:, -128:], expected_grad, rtol=0.05, atol=0.1)
    assert torch.equal(lse[0], lse[-1])
    del x, output, lse, grad
    tokens = 46_400
    x = torch.randn(1, 1, tokens, 16, device=device, dtype=torch.bfloat16)
    mask = torch.ones(tokens, tokens, device=device, dtype=torch.bool)
    assert mask.numel() > 2**31
    mask[-1, :-1] = False
    blocks = -(-tokens // 64)
    output = block_sparse_attention(x, x, x, torch.eye(blocks, dtype=torch.bool), attn_mask=mask)
    assert torch.equal(output[0, 0, -1], x[0, 0, -1]) and not torch.equal(output[0, 0, -2], x[0, 0, -2])


def zeros(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"query": zeros(32, 16)}, r"query \(32, 16\), key \(2, 2, 32, 16\).*have to be \(batch, heads, tokens"),
        ({"value": zeros(2, 2, 31, 16)}, "those of key and value equal"),
        ({"query": zeros(3, 2, 32, 16)}, "batch and head size, the first and the last, have to be equal"),
        ({"query": zeros(2, 2, 32, 8)}, "batch and head size, the first and the last, have to be equal"),
        ({"query": zeros(2, 3, 32, 16)}, "query has 3 heads and key 2; they have to be a multiple of key's"),
        ({"query": zeros(2, 1, 32, 16)}, "query has 1 heads and key 2"),
        ({"key": zeros(2, 0, 32, 16), "value": zeros(2, 0, 32, 16)}, "query has 2 heads and key 0"),
        ({x: zeros(2, 2, 32, 257) for x in ("query", "key", "value")}, "Head size is 257; it has to be from 1 to 256"),
        ({x: zeros(2, 2, 32, 0) for x in ("query", "key", "value")}, "Head size is 0"),
        ({"query": zeros(2, 2, 0, 16)}, "there has to be at least one token"),
        ({"key": zeros(2, 2, 0, 16), "value": zeros(2, 2, 0, 16)}, "there has to be at least one token"),
        ({"key": zeros(2, 2, 32, 16, device="meta")}, "key is on meta and query on cpu"),
        ({"value": zeros(2, 2, 32, 16).half()}, "value is torch.float16 and query torch.float32"),
        ({x: zeros(2, 2, 32, 16).long() for x in ("query", "key", "value")}, "Tensors are torch.int64"),
        ({"scale": math.inf}, "scale is inf; it has to be finite"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0; it has to be 0 or more and below 1"),
        ({"dropout_p": -0.1}, "dropout_p is -0.1"),
        ({"layout": torch.ones(3, 2, 2, dtype=torch.bool)}, "query has 2 heads and the layout 3"),
        (
            {"layout": torch.ones(3, 3, dtype=torch.bool)},
            "The layout has 3 x 3 blocks; for 32 query and 32 key tokens it has to have 4 x 4 of 8 or 2 x 2 of 16 or 1",
        ),
        ({"block": 32}, "has 2 x 2 blocks; for 32 query and 32 key tokens it has to have 1 x 1 of 32; build it"),
        ({"block": 24}, "block is 24; attention takes 8, 16, 32, 64 and 128"),
        ({"layout": BlockIndex.build(torch.ones(3, 3).bool(), 16)}, "has 3 x 3 blocks.*2 x 2 of 16; build"),
        ({"layout": BlockIndex.build(torch.ones(1, 1).bool(), 256)}, "block is 256; attention takes"),
        ({"layout": BlockIndex.build(FULL, 16), "block": 32}, "block is 32, and the index was .* of 16"),
        ({"layout": torch.full((2, 2), 2)}, "A layout holds only 0 and 1"),
        ({"rpe": zeros(32, 31)}, r"rpe has shape \(32, 31\); it .* \(32, 32\) or \(2, 32, 32\) or \(2, 2, 32, 32\)"),
        ({"rpe": zeros(3, 1, 32, 32)}, r"rpe has shape \(3, 1, 32, 32\)"),
        ({"rpe": zeros(32, 32).bool()}, "rpe is torch.bool; .* which is added.$"),
        ({"attn_mask": zeros(2, 32, 32)}, r"attn_mask has shape \(2, 32, 32\); .* \(32, 32\) or \(2, 2, 32, 32\)"),
        ({"attn_mask": zeros(2, 3, 32, 32)}, r"attn_mask has shape \(2, 3, 32, 32\)"),
        ({"attn_mask": zeros(32, 32).long()}, "attn_mask is torch.int64; .*or bool, which keeps where True"),
        ({"attn_mask": zeros(32, 32, requires_grad=True)}, "attn_mask requires a gradient, .* give it as rpe"),
        ({"key_padding_mask": zeros(32)}, r"key_padding_mask has shape \(32,\); it has to be \(2, 32\)"),
        ({"key_padding_mask": zeros(2, 33)}, r"key_padding_mask has shape \(2, 33\)"),
        ({"key_padding_mask": zeros(2, 32, requires_grad=True)}, "key_padding_mask requires .* MatMul and Softmax"),
        ({"rpe": zeros(32, 32, device="meta")}, "rpe is on meta and query on cpu"),
        ({"attn_mask": zeros(32, 32, device="meta")}, "attn_mask is on meta and query on cpu"),
        ({"key_padding_mask": zeros(2, 32, device="meta")}, "key_padding_mask is on meta and query on cpu"),
        ({"sinks": zeros(2, device="meta")}, "sinks is on meta and query on cpu"),
        ({"sinks": zeros(3)}, r"sinks has shape \(3,\); it has to be \(2,\), a logit a head"),
        ({"sinks": zeros(2, 1)}, r"sinks has shape \(2, 1\)"),
        ({"sinks": zeros(2).long()}, "sinks is torch.int64; it has to be float16"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(change: dict[str, object], sentence: str):
    x = zeros(2, 2, 32, 16)
    with pytest.raises(ValueError, match=sentence):
        block_sparse_attention(**{"query": x, "key": x, "value": x, "layout": FULL, **change})


@pytest.mark.parametrize("layout", [[[1, 0], [0, 1]], torch.ones(2, 2, dtype=torch.complex64)])
def test_layouts_of_another_type(layout: object):
    x = zeros(2, 2, 32, 16)
    with pytest.raises(TypeError, match="A layout is"):
        block_sparse_attention(x, x, x, layout)


def test_masks_that_require_a_gradient_are_taken_where_none_is_computed():
    x, mask = zeros(2, 2, 32, 16), zeros(32, 32, requires_grad=True)
    with torch.no_grad():
        assert not block_sparse_attention(x, x, x, FULL, attn_mask=mask).any()
