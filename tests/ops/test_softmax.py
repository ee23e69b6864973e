"""Softmax: rows, blocks and biases beyond those of the fuzz, masks by hand, and what it refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from fuzz.blocks import softmax_case
from fuzz.compare import hold
from fuzz.meanings import Tensors
from helpers import DTYPES, leaf, needs_gpu_memory, random, seeded

from ds_sparse.index import BlockIndex
from ds_sparse.ops import Softmax

OPERATORS = ("softmax_forward", "softmax_backward", "softmax_bias_backward")

FULL = torch.ones(2, 2, dtype=torch.bool)


def scores_for(layout: torch.Tensor, block: int = 16, batch: int = 2, heads: int = 0) -> torch.Tensor:
    """float64 (batch, live blocks, block, block); 0 heads are the layout's."""
    layout = layout if layout.dim() == 3 else layout[None]
    live = int(layout.expand(heads or len(layout), -1, -1).sum())
    return 3 * random(seeded(), batch, live, block, block)


def check(
    device: str, dtype: torch.dtype, layout: torch.Tensor, block: int, more: Tensors | None = None,
    modes: dict[str, str] | None = None, batch: int = 2, heads: int = 0, **options,
) -> None:  # fmt: skip
    """Probabilities and all gradients, with biases and masks by name in `more`."""
    layout = layout if layout.dim() == 3 else layout[None]
    tensors = {"x": scores_for(layout, block, batch, heads)} | (more or {})
    tensors = {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in tensors.items()}
    hold(softmax_case(tensors, layout.bool(), block, heads or len(layout), modes, **options), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_every_block_and_dtype(device: str, block: int, dtype: torch.dtype):
    layout = torch.tensor([[[1, 0, 1], [0, 0, 0]], [[1, 1, 1], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]])
    tokens, keys, rng = 2 * block, 3 * block, seeded()
    more = {"rpe": random(rng, 1, 3, tokens, keys), "attn_mask": random(rng, 2, 1, 1, keys)}
    more["key_padding_mask"] = torch.rand(2, keys, generator=rng) < 0.8
    check(device, dtype, layout, block, more, {"key_padding_mask": "mul"}, scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_of_rpe_in_every_shape(device: str, dtype: torch.dtype):
    """On live blocks only, summed over what is broadcast."""
    layout = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]], [[0, 0], [0, 0]]])
    for shape in itertools.product((1, 2), (1, 3), (1, 32)):
        check(device, dtype, layout, 16, {"rpe": random(seeded(1), *shape, 32)}, wanted=("rpe",))
    layout = torch.rand(2, 70, 2, generator=seeded()) < 0.5  # of many block rows
    more = {"attn_mask": random(seeded(1), 2, 1, 1, 16), "key_padding_mask": random(seeded(2), 1, 16)}
    check(device, dtype, layout, 8, more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(device: str, dtype: torch.dtype):
    """By -inf in a mask, by a mask that keeps nothing, and by scores."""
    layout = torch.tensor([[1, 0], [1, 1]])
    mask = torch.zeros(32, 32, dtype=torch.float64)
    mask[3], mask[20] = -math.inf, -math.inf
    check(device, dtype, layout, 16, {"attn_mask": mask, "rpe": random(seeded(), 1, 1, 32, 32)})
    for name, shape in (("attn_mask", (32, 32)), ("key_padding_mask", (2, 32))):
        check(device, dtype, FULL, 16, {name: torch.zeros(shape, dtype=torch.bool)}, {name: "mul"})
    x = leaf(torch.full((1, 4, 16, 16), -math.inf, dtype=dtype), device)
    probs = Softmax(FULL, 16)(x)
    assert not probs.any() and not torch.autograd.grad(probs.sum(), x)[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["finfo.min", -10000.0])
def test_large_finite_negatives_are_a_softmax(device: str, dtype: torch.dtype, value: str | float):
    """Never -inf by overflow: a row of them sums to 1, where other keys are left they get nothing, and several of the
    lowest count as one."""
    low = torch.finfo(dtype).min if value == "finfo.min" else value
    mask = torch.zeros(32, 32, dtype=torch.float64)
    mask[0], mask[1, 8:] = low, low
    check(device, dtype, FULL, 16, {"attn_mask": mask})
    padding = torch.zeros(1, 32, dtype=torch.float64)
    padding[:, 2:], padding[:, 1] = low, max(low, -1e30)
    mask, rpe = torch.full((2, 32, 32), low, dtype=torch.float64)
    rpe[:, :3] = 0
    check(device, dtype, FULL, 16, {"attn_mask": mask, "rpe": rpe, "key_padding_mask": padding})


LENGTHS = (0, 1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 20, 21, 24, 25, 40, 41, 48, 49, 80, 81, 161)
"""Live blocks of a row, up to and beyond those with which CUDA's kernels take twice as many rows together (blocks of 8:
four of them count as one)."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32])
def test_rows_of_every_length(device: str, block: int, dtype: torch.dtype, masked: bool):
    lengths = torch.tensor(LENGTHS if device == "cuda" else [length for length in LENGTHS if length < 50])
    if block == 8:
        lengths = (4 * lengths - torch.arange(len(lengths)) % 4).clamp(min=0)
    lengths = lengths[torch.randperm(len(lengths), generator=seeded())]
    layout, rng = torch.arange(int(lengths.max())) < lengths[:, None], seeded()
    tokens, keys = (size * block for size in layout.shape)
    more = {"attn_mask": torch.rand(1, 1, tokens, keys, generator=rng) < 0.8, "key_padding_mask": random(rng, 1, keys)}
    options = {"more": more, "modes": {"attn_mask": "mul"}} if masked else {}
    check(device, dtype, layout, block, batch=1, scale=0.7, wanted=("x",), **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "keys"), [(16, 4096), (16, 8192), (64, 16384), (128, 24576)])
def test_rows_longer_than_a_thread_block_holds(device: str, block: int, keys: int, dtype: torch.dtype, masked: bool):
    """Among short ones, for which thread blocks are small; and alone, so that they are large. On a CPU, whose kernels
    take any row in one piece, the shortest ones, and a sixteenth of the others."""
    check_long_rows(device, block, keys // 16 if device == "cpu" and keys > 4096 else keys, dtype, masked)


@pytest.mark.slow("rows of a sixteenth are another test's")
def test_rows_of_24576_keys_on_a_cpu():
    check_long_rows("cpu", 128, 24576, torch.float32, True)


def check_long_rows(device: str, block: int, keys: int, dtype: torch.dtype, masked: bool) -> None:
    for rows in (4, 1):
        layout = torch.zeros(1, rows, keys // block, dtype=torch.bool)
        layout[0, 0], layout[0, 1:, 3] = True, True
        rng = seeded(1)
        more = {"key_padding_mask": torch.rand(1, keys, generator=rng) < 0.8, "rpe": random(rng, 2, 1, keys)}
        options = {"more": more, "modes": {"key_padding_mask": "mul"}} if masked else {}
        check(device, dtype, layout, block, batch=1, heads=2, causal=masked, wanted=("x",), **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [256, 512])
def test_large_blocks(device: str, block: int, dtype: torch.dtype, masked: bool):
    """A token row of a block is more than a warp, in fp64 than a thread block, loads at once."""
    layout = torch.tensor([[1, 0, 1], [0, 1, 0]])
    more = {"key_padding_mask": torch.rand(1, 3 * block, generator=seeded(1)) < 0.8} if masked else {}
    check(device, dtype, layout, block, more, {"key_padding_mask": "mul"}, batch=1, causal=masked, wanted=("x",))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradient_of_a_shared_bias_is_summed_in_float32(device: str, dtype: torch.dtype):
    """4096 equal contributions to one element: a sum kept in fp16 would stop growing."""
    x = torch.zeros(32, 64, 16, 16, dtype=dtype, device=device)
    rpe = torch.zeros(1, 1, 1, 32, dtype=dtype, device=device, requires_grad=True)
    probs = Softmax(FULL, 16)(x, rpe=rpe)
    weights = torch.zeros_like(probs)
    weights[..., 0] = 1
    (grad,) = torch.autograd.grad(probs, rpe, weights)
    # Columns 0 and 16 have weight 1: each row of 32 equal probabilities gives them (1 - 1/16) / 32.
    expected = torch.full((32,), -1 / 16 / 32, dtype=torch.float64)
    expected[[0, 16]] += 1 / 32
    torch.testing.assert_close(
        grad.double().flatten().cpu(), 32 * 16 * 32 * expected, rtol=torch.finfo(dtype).eps, atol=0
    )


@pytest.mark.parametrize("tokens", [1, 32])
def test_gradient_of_a_shared_bias_is_rounded_once(device: str, tokens: int):
    """512 and 16,384 contributions that cancel: the sum of what x got, to the last bit or nearly."""
    x = leaf(scores_for(FULL, batch=32, heads=16).float(), device)
    rpe = torch.zeros(1, 1, tokens, 32, device=device, requires_grad=True)
    probs = Softmax(FULL, 16)(x, rpe=rpe)
    grad_x, grad_rpe = torch.autograd.grad(probs, (x, rpe), random(seeded(1), *probs.shape, dtype=x.dtype).to(device))
    summed = grad_x.double().unflatten(1, (16, 2, 2)).sum((0, 1)).transpose(1, 2).reshape(32, 32)
    expected = summed if tokens == 32 else summed.sum(0)
    torch.testing.assert_close(grad_rpe.double().view_as(expected), expected, rtol=2**-23, atol=0)


def test_scores_that_overflow_when_scaled_stay_finite(device: str):
    x = torch.full((1, 4, 16, 16), -3e38, device=device)
    probs = Softmax(FULL, 16)(x, scale=100.0)
    assert (probs == 1 / 32).all()


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_bool_mask_in_add_mode_adds_one_and_warns(device: str, name: str):
    x = scores_for(FULL).to(device)
    mask = (torch.rand(*((32, 32) if name == "attn_mask" else (2, 32)), generator=seeded()) < 0.5).to(device)
    with pytest.warns(UserWarning, match="is torch.bool in mode 'add'.*use mode 'mul'") as caught:
        probs = Softmax(FULL, 16)(x, **{name: mask})
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.equal(probs, Softmax(FULL, 16)(x, **{name: mask.double()}))


def test_of_a_key_padding_mask_a_head_the_first_counts_for_all(device: str):
    softmax, x = Softmax(torch.ones(3, 2, 2), 16), torch.randn(2, 12, 16, 16, device=device)
    mask = torch.rand(2, 3, 32, device=device) < 0.5
    with pytest.warns(UserWarning, match=r"the first head's counts for all, as in DeepSpeed"):
        probs = softmax(x, key_padding_mask=mask, key_padding_mask_mode="mul")
    for same in (mask[:, 0], mask[:, :1], mask[:, :1, None]):
        assert torch.equal(probs, softmax(x, key_padding_mask=same, key_padding_mask_mode="mul"))


def test_mul_mask_keeps_where_not_zero(device: str):
    x = scores_for(FULL).to(device)
    keep = torch.rand(32, 32, generator=seeded()).to(device) < 0.5
    softmax = Softmax(FULL, 16)
    expected = softmax(x, attn_mask=keep, attn_mask_mode="mul")
    for mask in (keep * -0.5, keep.long() * 7, keep.double()):
        assert torch.equal(softmax(x, attn_mask=mask, attn_mask_mode="mul"), expected)
    added = torch.zeros(32, 32, dtype=torch.float64, device=device).masked_fill(~keep, -math.inf)
    assert torch.equal(softmax(x, attn_mask=added), expected)


def test_masked_nan_does_not_leak(device: str):
    x = scores_for(FULL).float()
    keep = torch.rand(2, 32, generator=seeded()) < 0.5
    spoiled = x.unflatten(1, (2, 2)).masked_fill(~keep.reshape(2, 1, 2, 1, 16), math.nan).flatten(1, 2)
    softmax = Softmax(FULL, 16)
    arguments = {"key_padding_mask": keep.to(device), "key_padding_mask_mode": "mul"}
    assert torch.equal(softmax(spoiled.to(device), **arguments), softmax(x.to(device), **arguments))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_added_to_what_is_masked_do_not_leak(device: str, value: float):
    """By causality, by a bool mask, by -inf; the last before and after."""
    x, softmax = scores_for(FULL).float().to(device), Softmax(FULL, 16)
    ahead = torch.ones(32, 32, dtype=torch.bool, device=device).triu(1)
    causal = softmax(x, causal=True)
    assert torch.equal(
        softmax(x, rpe=torch.zeros(32, 32, device=device).masked_fill(ahead, value), causal=True), causal
    )
    keep = (torch.rand(2, 32, generator=seeded()) < 0.5).to(device)
    spoiled = torch.zeros(2, 1, 1, 32, device=device).masked_fill(~keep[:, None, None], value)
    kept = softmax(x, key_padding_mask=keep, key_padding_mask_mode="mul")
    assert torch.equal(softmax(x, key_padding_mask=keep, key_padding_mask_mode="mul", attn_mask=spoiled), kept)
    dropped = torch.zeros(2, 32, device=device).masked_fill(~keep, -math.inf)
    assert torch.equal(softmax(x, rpe=spoiled.expand(2, 1, 32, 32), key_padding_mask=dropped), kept)
    if math.isnan(value):
        scores = x.unflatten(1, (2, 2)).masked_fill(~keep.reshape(2, 1, 2, 1, 16), value).flatten(1, 2)
        assert torch.equal(softmax(scores, key_padding_mask=dropped), kept)


@pytest.mark.gpu
def test_a_row_of_a_block_beyond_a_thread_block(device: str):
    if device == "cpu":
        pytest.skip("a limit of CUDA's thread blocks")
    x = torch.randn(1, 2, 2048, 2048, device=device, dtype=torch.bfloat16)
    probs = Softmax(torch.ones(1, 1, dtype=torch.bool), 2048)(x)
    torch.testing.assert_close(probs, x.softmax(-1))


@pytest.mark.gpu
def test_more_rows_than_a_grid_dimension_holds(device: str):
    """Batch times heads times block rows is above 65535."""
    if device == "cpu":
        pytest.skip("a limit of CUDA grids")
    x = torch.randn(300, 300, 8, 8, device=device)
    probs = Softmax(torch.ones(1, 1, dtype=torch.bool), 8)(x)
    torch.testing.assert_close(probs, x.softmax(-1))


@pytest.mark.gpu
def test_more_elements_than_int32_counts(device: str):
    needs_gpu_memory(device, 16)
    x = torch.zeros(2, 2**18 + 1, 64, 64, device=device, dtype=torch.float16)
    x[-1, -1, -1, 0] = 1
    probs = Softmax(torch.ones(1, 1, dtype=torch.bool), 64)(x)
    torch.testing.assert_close(probs[-1, -1], x[-1, -1].softmax(-1))
    assert (probs[:, :-1] == 1 / 64).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("strips", "most", "sentence"),
    [
        (None, 5120, "takes the strips of a BlockIndex, none were given"),
        ("given", 5121, "up to 5120, 10240 or 20480 elements, got 5121"),
        ("long", 5120, "strips has to be int32"),
    ],
)
def test_strips_that_do_not_fit_are_refused(device: str, strips: str | None, most: int, sentence: str):
    if device == "cpu":
        pytest.skip("only CUDA walks strips")
    index = BlockIndex.build(FULL, 16).to(device)
    units = {None: None, "given": index.strips.units, "long": index.strips.units.long()}[strips]
    x, lists = torch.zeros(1, 8, 16, 16, device=device), (index.row_offsets, index.row_columns, units, most)
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.ds_sparse.softmax_forward(x, None, None, None, *lists, 1, 16, 1.0, False)
    with pytest.raises(RuntimeError, match=sentence):
        torch.ops.ds_sparse.softmax_backward(x, x, *lists, 1, 16, 1.0)


@pytest.mark.gpu
def test_gradients_of_other_heads_than_the_layouts_are_refused(device: str):
    index = BlockIndex.build(torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 0]]]), 16).to(device)
    strips = (index.strips.units, index.strips.most)
    x = torch.zeros(1, 6, 16, 16, device=device)
    with pytest.raises(RuntimeError, match="layout_heads is 2 for 3 heads"):
        torch.ops.ds_sparse.softmax_backward(x, x, index.row_offsets, index.row_columns, *strips, 2, 16, 1.0)


def test_a_scale_that_would_get_no_gradient_is_refused():
    softmax = Softmax(torch.eye(2).bool(), 16)
    with pytest.raises(ValueError, match="scale requires a gradient and has none here; multiply the queries by it"):
        softmax(torch.zeros(1, 2, 16, 16), torch.ones(()).requires_grad_())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.zeros(2, 4, 16, 8)}, r"\(2, 4, 16, 8\); the layout's sparse values are \(batch, 4, 16, 16\)"),
        ({"x": torch.zeros(2, 5, 16, 16)}, "times any number of heads"),
        ({"x": torch.zeros(16, 16)}, r"x has shape \(16, 16\)"),
        ({"x": torch.zeros(2, 4, 16, 16, dtype=torch.int64)}, "Tensors are torch.int64"),
        ({"rpe": torch.zeros(32, 32, dtype=torch.float64)}, "relative position embedding must be torch.float32"),
        ({"rpe": torch.zeros(32, 31)}, r"rpe has shape \(32, 31\); it has to be \(2, 1, 32, 32\), where any"),
        ({"rpe": torch.zeros(1, 2, 1, 32, 32)}, "rpe has shape"),
        ({"rpe": torch.zeros(1, 2, 32, 32)}, "rpe has shape"),
        ({"attn_mask": torch.zeros(32, 32, dtype=torch.float16)}, "must be torch.float32, or bool; got torch.float16"),
        ({"attn_mask": torch.zeros(32, 32, dtype=torch.int64)}, "Attention mask must be torch.float32"),
        ({"attn_mask": torch.zeros(32, 33)}, r"attn_mask has shape \(32, 33\)"),
        ({"attn_mask": torch.zeros(3, 1, 32, 32)}, r"attn_mask has shape \(3, 1, 32, 32\)"),
        ({"attn_mask": torch.zeros(2, 32, 32)}, r"attn_mask has shape \(2, 32, 32\)"),
        ({"attn_mask": torch.zeros(1, 32, 32)}, r"attn_mask has shape \(1, 32, 32\)"),
        ({"attn_mask": torch.zeros(32, 32), "attn_mask_mode": "multiply"}, "mode is 'multiply'; it has to be"),
        ({"key_padding_mask": torch.zeros(2, 32, dtype=torch.float64)}, "Key padding mask must be torch.float32"),
        ({"key_padding_mask": torch.zeros(32)}, r"key_padding_mask has shape \(32,\); it has to be \(batch or 1, 32\)"),
        ({"key_padding_mask": torch.zeros(2, 3, 32)}, r"key_padding_mask has shape \(2, 3, 32\)"),
        ({"key_padding_mask": torch.zeros(2, 1, 32, 32)}, "key_padding_mask has shape"),
        ({"key_padding_mask": torch.zeros(3, 32)}, r"key_padding_mask has shape \(3, 32\)"),
        ({"key_padding_mask": torch.zeros(2, 32), "key_padding_mask_mode": ""}, "Key padding mask mode is ''"),
        ({"attn_mask_mode": "multiply"}, "Attention mask mode is 'multiply'"),
        ({"key_padding_mask_mode": "Add"}, "Key padding mask mode is 'Add'"),
        ({"rpe": torch.zeros(32, 32, device="meta")}, "rpe is on meta and x on cpu"),
        ({"attn_mask": torch.zeros(32, 32, device="meta")}, "attn_mask is on meta and x on cpu"),
        ({"key_padding_mask": torch.zeros(2, 32, device="meta")}, "key_padding_mask is on meta and x on cpu"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(change: dict[str, object], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        Softmax(FULL, 16)(**{"x": torch.zeros(2, 4, 16, 16), **change})


def test_values_of_other_heads_than_the_layouts():
    layout = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]]])
    with pytest.raises(ValueError, match=r"\(batch, 5, 16, 16\)\."):
        Softmax(layout, 16)(torch.zeros(1, 10, 16, 16))


def test_block_other_than_the_index():
    with pytest.raises(ValueError, match="block is 32, and the index was built for blocks of 16"):
        Softmax(BlockIndex.build(FULL, 16), 32)


def test_what_old_code_asks_the_operation_for():
    layout = torch.tensor([[[1, 0], [1, 1]]])
    assert Softmax(layout[0], 16).spdims == (1, 2, 2) and Softmax(layout[0], 16).num_blocks == 3
    of_two_heads = Softmax(layout.float().expand(2, 2, 2), 16)
    assert of_two_heads.spdims == (2, 2, 2) and of_two_heads.num_blocks == 6
    assert list(of_two_heads.lut_cache) == [torch.device("cpu")]
