"""Softmax against the float64 reference: values, gradients, masks, errors, and what torch expects of an operator."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import (
    DTYPES,
    EXAMPLES,
    VIEWS,
    Layout,
    as_view,
    assert_as_accurate,
    generator,
    gradients,
    layouts,
    leaf,
    make_layout,
    needs_gpu_memory,
    poisoned_memory,
    random,
    rounding,
    seeded,
    wide,
)
from hypothesis import given
from hypothesis import strategies as st
from ops_parameters import BACKENDS, GRAPH_DTYPES

from ds_sparse import reference
from ds_sparse.index import BlockIndex
from ds_sparse.ops import MatMul, Softmax

OPERATORS = ("softmax_forward", "softmax_backward", "softmax_bias_backward")

FULL = make_layout(torch.ones(2, 2, dtype=torch.bool))


@dataclass(frozen=True)
class Case:
    """A softmax: float64 inputs (masks as given), and how the operation is called."""

    layout: Layout
    block: int
    heads: int
    x: torch.Tensor
    scale: float = 1.0
    rpe: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    key_padding_mask_mode: str = "add"
    attn_mask_mode: str = "add"
    causal: bool = False
    modes: dict[str, str] = field(init=False)

    def __post_init__(self):
        modes = {"rpe": "add", "key_padding_mask": self.key_padding_mask_mode, "attn_mask": self.attn_mask_mode}
        object.__setattr__(self, "modes", modes)

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Everything given, in `dtype` where it is not bool."""
        given = {"x": self.x, "rpe": self.rpe, "key_padding_mask": self.key_padding_mask, "attn_mask": self.attn_mask}
        return {name: x if x.dtype == torch.bool else x.to(dtype) for name, x in given.items() if x is not None}

    def differentiable(self, name: str) -> bool:
        return name == "x" or (self.modes[name] == "add" and getattr(self, name).dtype != torch.bool)

    def oracle(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """reference.softmax, given bool masks for 'mul' and numbers for 'add'."""
        tokens, keys = self.layout.rows * self.block, self.layout.columns * self.block
        given = dict(inputs)
        x = given.pop("x")
        for name, mask in given.items():
            if self.modes[name] == "mul":
                mask = mask != 0
            elif mask.dtype == torch.bool:
                mask = mask.to(x.dtype)
            given[name] = mask.expand(*mask.shape[:-1], keys)
            if name != "key_padding_mask" and mask.dim() == 4 and mask.shape[2] == 1:
                given[name] = given[name].expand(-1, -1, tokens, -1)
        return reference.softmax(x, self.layout.live, self.block, self.heads, self.scale, causal=self.causal, **given)

    def ours(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is torch.bool in mode 'add'")
            return Softmax(self.layout.given, self.block)(
                inputs["x"], self.scale, inputs.get("rpe"), inputs.get("key_padding_mask"), inputs.get("attn_mask"),
                self.key_padding_mask_mode, self.attn_mask_mode, causal=self.causal,
            )  # fmt: skip


def make_case(
    layout: Layout = FULL, block: int = 16, batch: int = 2, heads: int = 0, rng: torch.Generator | None = None, **given
) -> Case:
    heads = heads or layout.heads
    x = 3 * random(rng or seeded(), batch, layout.num_values(heads), block, block)
    return Case(layout, block, heads, x, **given)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts(max_side=3))
    block = draw(st.sampled_from((8, 16, 16, 32, 64)))
    heads = draw(st.integers(1, 3)) if layout.heads == 1 and layout.live.any() else layout.heads
    batch = draw(st.integers(1, 3))
    tokens, keys = layout.rows * block, layout.columns * block
    rng = generator(draw)

    def shape(ranks: tuple[int, ...]) -> tuple[int, ...]:
        full = (batch, heads, tokens, keys)
        sizes = [draw(st.sampled_from((size, 1))) for size in full[:3]] + [draw(st.sampled_from((keys, keys, keys, 1)))]
        rank = draw(st.sampled_from(ranks))
        return tuple(sizes[4 - rank :])

    def mask(mode: str, *sizes: int) -> torch.Tensor:
        kept = torch.rand(sizes, generator=rng) < 0.7
        if draw(st.booleans()):
            return kept
        if mode == "mul":
            return kept * 2.5
        bias = random(rng, *sizes)
        return bias.masked_fill(~kept, draw(st.sampled_from((-math.inf, -10000.0, 1.0))))

    modes = draw(st.sampled_from(("add", "mul"))), draw(st.sampled_from(("add", "mul")))
    return make_case(
        layout, block, batch, heads, rng,
        scale=draw(st.sampled_from((1.0, 0.125, -0.5))),
        rpe=random(rng, *shape((2, 3, 4))) if draw(st.booleans()) else None,
        key_padding_mask=mask(modes[0], draw(st.sampled_from((batch, 1))), keys) if draw(st.booleans()) else None,
        attn_mask=mask(modes[1], *shape((2, 4))) if draw(st.booleans()) else None,
        key_padding_mask_mode=modes[0],
        attn_mask_mode=modes[1],
        causal=draw(st.booleans()),
    )  # fmt: skip


def check(case: Case, dtype: torch.dtype, device: str, views: tuple[str, str], only: str | None = None) -> None:
    """Result and gradients of all inputs, or of `only` one, and that nothing given is overwritten."""
    given = {name: as_view(x, views[0]) if x.dim() == 4 else x for name, x in case.inputs(dtype).items()}
    wants = {name: case.differentiable(name) and only in (None, name) for name in given}
    plain = {name: leaf(x, "cpu", wants[name]) for name, x in given.items()}
    exact = {
        name: x if x.dtype == torch.bool else leaf(x.double(), "cpu", case.differentiable(name))
        for name, x in given.items()
    }
    ours = {name: leaf(x, device, wants[name]) for name, x in given.items()}
    plain_result, exact_result = case.oracle(plain), case.oracle(exact)
    grad = as_view(random(seeded(), *exact_result.shape, dtype=dtype), views[1])
    grad_here = leaf(grad, device, requires_grad=False)
    with poisoned_memory():
        result = case.ours(ours)
        found = gradients(result, list(ours.values()), grad_here)
    assert_as_accurate("probs", result, plain_result, exact_result)
    plain_found = gradients(plain_result, list(plain.values()), grad)
    exact_found = dict(
        zip(
            filter(case.differentiable, given),
            gradients(exact_result, list(exact.values()), grad.double()),
            strict=True,
        )
    )
    terms = exact_found["x"] / case.scale
    largest_term = terms.abs().max().item() if terms.numel() else 0.0
    for name, x, y in zip(filter(wants.get, given), found, plain_found, strict=True):
        # That of x is scale * probs * (grad - their row sum), two terms in fp32 that cancel where one is near 1.
        cancelling = (
            abs(case.scale) * (exact_result.detach() * grad.double()).abs().max().item() if grad.numel() else 0.0
        )
        allowance = rounding(wide(dtype)) * cancelling if name == "x" else 0.0
        term = 0.0 if name == "x" else largest_term
        assert_as_accurate(f"gradient of {name}", x, y, exact_found[name], term, allowance)
    for before, after in zip((*given.values(), grad), (*ours.values(), grad_here), strict=True):
        assert torch.equal(before.cpu(), after.detach().cpu()), "an input was overwritten"


@EXAMPLES
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    views=st.tuples(st.sampled_from(VIEWS), st.sampled_from(VIEWS)),
    only=st.sampled_from((None, None, "x", "rpe", "attn_mask", "key_padding_mask")),
)
def test_result_and_gradients(device: str, case: Case, dtype: torch.dtype, views: tuple[str, str], only: str | None):
    check(case, dtype, device, views, only)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_every_block_and_dtype(device: str, block: int, dtype: torch.dtype):
    layout = make_layout(
        torch.tensor([[[1, 0, 1], [0, 0, 0]], [[1, 1, 1], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]]), torch.int64
    )
    tokens, keys = 2 * block, 3 * block
    rng = seeded()
    case = make_case(
        layout, block, scale=0.3, rpe=random(rng, 1, 3, tokens, keys), attn_mask=random(rng, 2, 1, 1, keys),
        key_padding_mask=torch.rand(2, keys, generator=rng) < 0.8, key_padding_mask_mode="mul",
    )  # fmt: skip
    check(case, dtype, device, ("contiguous", "contiguous"))


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(b, h, t) for b in (1, 2) for h in (1, 3) for t in (1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_of_rpe_in_every_shape(device: str, batch: int, heads: int, tokens: int, dtype: torch.dtype):
    """On live blocks only, summed over what is broadcast."""
    layout = make_layout(torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]], [[0, 0], [0, 0]]]))
    check(
        make_case(layout, rpe=random(seeded(1), batch, heads, tokens, 32)),
        dtype,
        device,
        ("contiguous", "contiguous"),
        "rpe",
    )


def test_gradient_of_a_bias_shared_by_many_block_rows(device: str):
    layout = make_layout(torch.rand(2, 70, 2, generator=seeded()) < 0.5)
    case = make_case(layout, 8, attn_mask=random(seeded(1), 2, 1, 1, 16), key_padding_mask=random(seeded(2), 1, 16))
    check(case, torch.float32, device, ("contiguous", "contiguous"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradient_of_a_shared_bias_is_summed_in_float32(device: str, dtype: torch.dtype):
    """4096 equal contributions to one element: a sum kept in fp16 would stop growing."""
    case = make_case(batch=32, heads=16)
    x = torch.zeros(case.x.shape, dtype=dtype, device=device)
    rpe = torch.zeros(1, 1, 1, 32, dtype=dtype, device=device, requires_grad=True)
    probs = Softmax(FULL.given, 16)(x, rpe=rpe)
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
    case = make_case(batch=32, heads=16)
    x = leaf(case.x.float(), device)
    rpe = torch.zeros(1, 1, tokens, 32, device=device, requires_grad=True)
    probs = Softmax(FULL.given, 16)(x, rpe=rpe)
    grad_x, grad_rpe = torch.autograd.grad(probs, (x, rpe), random(seeded(1), *probs.shape, dtype=x.dtype).to(device))
    summed = grad_x.double().unflatten(1, (16, 2, 2)).sum((0, 1)).transpose(1, 2).reshape(32, 32)
    expected = summed if tokens == 32 else summed.sum(0)
    torch.testing.assert_close(grad_rpe.double().view_as(expected), expected, rtol=2**-23, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(device: str, dtype: torch.dtype):
    layout = make_layout(torch.tensor([[1, 0], [1, 1]]))
    attn_mask = torch.zeros(32, 32, dtype=torch.float64)
    attn_mask[3], attn_mask[20, :] = -math.inf, -math.inf
    case = make_case(layout, attn_mask=attn_mask, rpe=random(seeded(), 1, 1, 32, 32))
    inputs = {name: leaf(x, device) for name, x in case.inputs(dtype).items()}
    with poisoned_memory():
        probs = case.ours(inputs)
        found = torch.autograd.grad(probs.square().sum(), list(inputs.values()))
    assert torch.isfinite(probs).all() and all(torch.isfinite(x).all() for x in found)
    for x in (probs, found[0]):
        assert not x[:, 0, 3].any() and not x[:, 1:, 4].any()
        assert x[:, 0, 4].any() and x[:, 1:, 3].any()
    for bias in found[1:]:
        assert not bias[..., 3, :].any() and not bias[..., 20, :].any()
        assert not bias[..., :16, 16:].any(), "a block that does not exist has a gradient"


@pytest.mark.parametrize("mode", ["attn_mask", "key_padding_mask", "scores"])
def test_everything_masked_is_zeros(device: str, mode: str):
    case = make_case()
    inputs = {name: leaf(x, device) for name, x in case.inputs(torch.float32).items()}
    if mode == "scores":
        inputs["x"] = torch.full_like(inputs["x"], -math.inf).requires_grad_()
    else:
        shape = (32, 32) if mode == "attn_mask" else (2, 32)
        inputs[mode] = torch.zeros(shape, dtype=torch.bool, device=device)
        case = replace(case, **{f"{mode}_mode": "mul"})
    with poisoned_memory():
        probs = case.ours(inputs)
        (grad,) = torch.autograd.grad(probs.sum(), inputs["x"])
    assert not probs.any() and not grad.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["finfo.min", -10000.0])
@pytest.mark.parametrize("twice", [False, True])
def test_large_finite_negatives_are_a_softmax(device: str, dtype: torch.dtype, value: str | float, twice: bool):
    """Never -inf by overflow: a row of them sums to 1, and where other keys are left they get nothing."""
    value = torch.finfo(dtype).min if value == "finfo.min" else value
    x = -3 * torch.rand(2, 4, 16, 16, generator=seeded()).to(device, dtype)
    mask = torch.zeros(32, 32, dtype=dtype, device=device)
    mask[0], mask[1, 8:] = value, value
    padding = mask[:1] if twice else None
    probs = Softmax(FULL.given, 16)(x, 1.0, mask if twice else None, padding, mask).double()
    sums = probs.unflatten(1, (2, 2)).sum((2, 4))
    rounding = 32 * torch.finfo(dtype).eps
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=rounding, atol=rounding)
    if not twice:
        assert not probs[:, 0, 1, 8:].any() and not probs[:, 1, 1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_lowest_biases_count_as_one(device: str, dtype: torch.dtype):
    """Where none of the keys is without; those of fp16 are ordinary numbers, of which two are lower than one."""
    low = torch.finfo(dtype).min
    x = torch.zeros(1, 4, 16, 16, dtype=dtype, device=device)
    mask = torch.full((32, 32), low, dtype=dtype, device=device)
    rpe, padding = mask.clone(), torch.zeros(1, 32, dtype=dtype, device=device)
    rpe[:, :3], padding[:, 2:], padding[:, 1] = 0, low, max(low, -1e30)
    probs = Softmax(FULL.given, 16)(x, 1.0, rpe, padding, mask).double()
    expected = torch.full_like(probs, 1 / 32)
    if dtype == torch.float16:
        expected = torch.zeros_like(probs)
        expected[:, [0, 2], :, 0] = 1
    torch.testing.assert_close(probs, expected, rtol=1e-2, atol=0)
    double = [t.double().cpu() for t in (x, rpe, padding, mask)]
    masks = {"rpe": double[1], "key_padding_mask": double[2], "attn_mask": double[3]}
    exact = reference.softmax(double[0], FULL.live, 16, 1, **masks)
    torch.testing.assert_close(exact, expected.cpu(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0, -30.0])
def test_any_scale_of_large_scores(device: str, scale: float, dtype: torch.dtype):
    x = torch.randint(-250, 251, (2, 4, 16, 16), generator=seeded()).to(device, dtype).requires_grad_()
    exact = x.detach().double().cpu().requires_grad_()
    probs, expected = Softmax(FULL.given, 16)(x, scale), reference.softmax(exact, FULL.live, 16, 1, scale)
    grad = random(seeded(1), *x.shape, dtype=dtype)
    found = torch.autograd.grad(probs, x, grad.to(device))[0].double().cpu()
    wanted = torch.autograd.grad(expected, exact, grad.double())[0]
    rounding = 4 * torch.finfo(dtype).eps + 1e-12
    torch.testing.assert_close(probs.double().cpu(), expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(found, wanted, rtol=0, atol=8 * rounding * abs(scale) + 1e-12)


def test_minus_ten_thousand_everywhere_changes_nothing(device: str):
    case = make_case()
    x = case.x.to(device)
    padding = torch.full((2, 32), -10000.0, dtype=torch.float64, device=device)
    torch.testing.assert_close(
        Softmax(FULL.given, 16)(x, key_padding_mask=padding), Softmax(FULL.given, 16)(x), rtol=1e-10, atol=0
    )


def test_scores_that_overflow_when_scaled_stay_finite(device: str):
    x = torch.full((1, 4, 16, 16), -3e38, device=device)
    probs = Softmax(FULL.given, 16)(x, scale=100.0)
    assert (probs == 1 / 32).all()


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_bool_mask_in_add_mode_adds_one_and_warns(device: str, name: str):
    case = make_case()
    x = case.x.to(device)
    mask = (torch.rand(*((32, 32) if name == "attn_mask" else (2, 32)), generator=seeded()) < 0.5).to(device)
    with pytest.warns(UserWarning, match="is torch.bool in mode 'add'.*use mode 'mul'") as caught:
        probs = Softmax(FULL.given, 16)(x, **{name: mask})
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.equal(probs, Softmax(FULL.given, 16)(x, **{name: mask.double()}))


def test_of_a_key_padding_mask_a_head_the_first_counts_for_all(device: str):
    softmax, x = Softmax(torch.ones(3, 2, 2), 16), torch.randn(2, 12, 16, 16, device=device)
    mask = torch.rand(2, 3, 32, device=device) < 0.5
    with pytest.warns(UserWarning, match=r"the first head's counts for all, as in DeepSpeed"):
        probs = softmax(x, key_padding_mask=mask, key_padding_mask_mode="mul")
    for same in (mask[:, 0], mask[:, :1], mask[:, :1, None]):
        assert torch.equal(probs, softmax(x, key_padding_mask=same, key_padding_mask_mode="mul"))


def test_mul_mask_keeps_where_not_zero(device: str):
    x = make_case().x.to(device)
    keep = torch.rand(32, 32, generator=seeded()).to(device) < 0.5
    softmax = Softmax(FULL.given, 16)
    expected = softmax(x, attn_mask=keep, attn_mask_mode="mul")
    for mask in (keep * -0.5, keep.long() * 7, keep.double()):
        assert torch.equal(softmax(x, attn_mask=mask, attn_mask_mode="mul"), expected)
    added = torch.zeros(32, 32, dtype=torch.float64, device=device).masked_fill(~keep, -math.inf)
    assert torch.equal(softmax(x, attn_mask=added), expected)


def test_causal_is_a_mask_of_later_tokens(device: str):
    layout = make_layout(torch.tensor([[1, 1, 1], [1, 1, 0]]))
    x = make_case(layout).x.to(device)
    keep = torch.ones(32, 48, dtype=torch.bool, device=device).tril()
    softmax = Softmax(layout.given, 16)
    assert torch.equal(softmax(x, causal=True), softmax(x, attn_mask=keep, attn_mask_mode="mul"))


def test_nan_spoils_its_row_and_no_other(device: str):
    x = make_case().x.float()
    x[0, 0, 3, 5] = math.nan
    nan = Softmax(FULL.given, 16)(x.to(device)).isnan().cpu()
    expected = torch.zeros_like(nan)
    expected[0, :2, 3] = True
    assert torch.equal(nan, expected)


def test_a_row_of_nan_is_nan(device: str):
    x = make_case().x.float()
    x[0, :2, 3] = math.nan
    assert Softmax(FULL.given, 16)(x.to(device))[0, :2, 3].isnan().all()


def test_masked_nan_does_not_leak(device: str):
    x = make_case().x.float()
    keep = torch.rand(2, 32, generator=seeded()) < 0.5
    spoiled = x.unflatten(1, (2, 2)).masked_fill(~keep.reshape(2, 1, 2, 1, 16), math.nan).flatten(1, 2)
    softmax = Softmax(FULL.given, 16)
    arguments = {"key_padding_mask": keep.to(device), "key_padding_mask_mode": "mul"}
    assert torch.equal(softmax(spoiled.to(device), **arguments), softmax(x.to(device), **arguments))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_added_to_what_is_masked_do_not_leak(device: str, value: float):
    """By causality, by a bool mask, by -inf; the last before and after."""
    x, softmax = make_case().x.float().to(device), Softmax(FULL.given, 16)
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


@pytest.mark.parametrize("form", [torch.bool, torch.int64, torch.int32, torch.uint8, "2-D", "BlockIndex"], ids=str)
def test_every_form_of_a_layout_gives_the_same_bits(device: str, form: object):
    live = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)
    x = random(seeded(), 2, 9, 16, 16).to(device)
    given = live[0] if form == "2-D" else BlockIndex.build(live, 16) if form == "BlockIndex" else live.to(form)
    assert torch.equal(Softmax(given, 16)(x), Softmax(live.repeat(3, 1, 1), 16)(x))


def test_values_without_a_batch(device: str):
    x = make_case().x.to(device)
    probs = Softmax(FULL.given, 16)(x[0])
    assert probs.shape == (4, 16, 16)
    assert torch.equal(probs, Softmax(FULL.given, 16)(x)[0])


def test_layout_without_a_live_block(device: str):
    layout = make_layout(torch.zeros(2, 3, 2, dtype=torch.bool))
    x = torch.zeros(2, 0, 16, 16, device=device, requires_grad=True)
    rpe = torch.zeros(1, 2, 48, 32, device=device, requires_grad=True)
    with poisoned_memory():
        probs = Softmax(layout.given, 16)(x, rpe=rpe)
        grads = torch.autograd.grad(probs, (x, rpe), torch.zeros_like(probs))
    assert probs.shape == grads[0].shape == x.shape
    assert grads[1].shape == rpe.shape and not grads[1].any()


def test_rows_of_very_different_length(device: str):
    """One dense row among rows of one block, longer than any tile: 16,384 keys."""
    live = torch.eye(1024, dtype=torch.bool)
    live[5], live[:, 0] = True, True
    layout = make_layout(live[:8])
    x = random(seeded(), 1, layout.num_values(1), 16, 16)
    probs = Softmax(layout.given, 16)(x.float().to(device)).double().cpu()
    for row in (4, 5):
        offset = int(layout.live[0, :row].sum())
        entries = slice(offset, offset + int(layout.live[0, row].sum()))
        expected = x[0, entries].float().double().transpose(0, 1).flatten(1).softmax(-1)
        torch.testing.assert_close(probs[0, entries].transpose(0, 1).flatten(1), expected, rtol=1e-5, atol=1e-9)


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
    layout = make_layout(torch.arange(int(lengths.max())) < lengths[:, None])
    given, rng = {}, seeded()
    if masked:
        tokens, keys = layout.rows * block, layout.columns * block
        given = {
            "attn_mask": torch.rand(1, 1, tokens, keys, generator=rng) < 0.8, "attn_mask_mode": "mul",
            "key_padding_mask": random(rng, 1, keys),
        }  # fmt: skip
    case = make_case(layout, block, 1, scale=0.7, **given)
    check(case, dtype, device, ("contiguous", "contiguous"), "x")


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
        given, rng = {}, seeded(1)
        if masked:
            padding = torch.rand(1, keys, generator=rng) < 0.8
            given = {"key_padding_mask": padding, "key_padding_mask_mode": "mul", "rpe": random(rng, 2, 1, keys)}
        case = make_case(make_layout(layout), block, 1, 2, rng, causal=masked, **given)
        check(case, dtype, device, ("contiguous", "contiguous"), "x")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [256, 512])
def test_large_blocks(device: str, block: int, dtype: torch.dtype, masked: bool):
    """A token row of a block is more than a warp, in fp64 than a thread block, loads at once."""
    layout = make_layout(torch.tensor([[1, 0, 1], [0, 1, 0]]))
    padding = torch.rand(1, 3 * block, generator=seeded(1)) < 0.8 if masked else None
    case = make_case(layout, block, 1, key_padding_mask=padding, key_padding_mask_mode="mul", causal=masked)
    check(case, dtype, device, ("contiguous", "contiguous"), "x")


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


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(device: str, causal: bool):
    layout = make_layout(torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]]]))
    rng = seeded()
    case = make_case(
        layout, 8, scale=0.7, causal=causal, rpe=random(rng, 1, 2, 16, 16), attn_mask=random(rng, 2, 1, 1, 16),
        key_padding_mask=random(rng, 2, 16),
    )  # fmt: skip
    inputs = {name: leaf(x, device) for name, x in case.inputs(torch.float64).items()}

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return case.ours(dict(zip(inputs, tensors, strict=True)))

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device: str, operator: str, dtype: torch.dtype):
    layout = make_layout(torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 0]]]))
    index = BlockIndex.build(layout.given, 16).to(device)
    rng = seeded()
    x, y = (random(rng, 2, layout.num_values(2), 16, 16, dtype=dtype).to(device) for _ in range(2))
    rpe, mask = (
        random(rng, 1, 2, 32, 48, dtype=dtype).to(device),
        (torch.rand(2, 1, 1, 48, generator=rng) < 0.5).to(device),
    )
    lists, strips = (index.row_offsets, index.row_columns), (index.strips.units, index.strips.most)
    arguments = {
        "softmax_forward": [
            (x, rpe, mask[:, 0, 0], mask, *lists, *strips, 2, 16, 0.5, True),
            (x, None, None, None, *lists, *strips, 2, 16, 1.0, False),
        ],
        "softmax_backward": [(x, y, *lists, *strips, 2, 16, 0.5)],
        "softmax_bias_backward": [(x, *lists, 2, 2, 16, shape) for shape in ([1, 2, 32, 48], [2, 1, 1, 48])],
    }
    for example in arguments[operator]:
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, example)


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
    index = BlockIndex.build(FULL.given, 16).to(device)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph(device: str, backend: str):
    case = make_case(heads=2)
    rng = seeded()
    x, rpe = leaf(case.x.float(), device), leaf(random(rng, 1, 2, 32, 32).float(), device)
    padding = (torch.rand(2, 32, generator=rng) < 0.8).to(device)
    softmax = Softmax(BlockIndex.build(FULL.given, 16).to(device), 16)

    def run(x: torch.Tensor, rpe: torch.Tensor) -> torch.Tensor:
        return softmax(x, 0.5, rpe, padding, key_padding_mask_mode="mul", causal=True) * 2

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    result, expected = compiled(x, rpe), run(x, rpe)
    torch.testing.assert_close(result, expected)
    found, wanted = (torch.autograd.grad(y.square().sum(), (x, rpe)) for y in (result, expected))
    torch.testing.assert_close(found, wanted)


def test_compiles_for_any_number_of_heads(device: str):
    softmax = Softmax(BlockIndex.build(torch.eye(3).bool(), 16).to(device), 16)
    dsd = MatMul(BlockIndex.build(torch.eye(3).bool(), 16).to(device), 16, "dsd")
    compiled = torch.compile(lambda x, y: dsd(softmax(x), y), fullgraph=True, backend="aot_eager")
    for heads in (2, 4, 5):
        x, y = (random(seeded(), 2, *shape, 16).float().to(device) for shape in ((3 * heads, 16), (heads, 48)))
        torch.testing.assert_close(compiled(x, y), dsd(softmax(x), y))


def test_a_scale_that_would_get_no_gradient_is_refused():
    softmax = Softmax(torch.eye(2).bool(), 16)
    with pytest.raises(ValueError, match="scale requires a gradient and has none here; multiply the queries by it"):
        softmax(torch.zeros(1, 2, 16, 16), torch.ones(()).requires_grad_())


def test_same_bits_every_time_and_with_any_number_of_threads(device: str):
    layout = make_layout(torch.rand(2, 6, 6, generator=seeded()) < 0.5)
    case = make_case(layout, 32, rpe=random(seeded(), 1, 2, 192, 192), attn_mask=random(seeded(), 1, 1, 1, 192))

    def run() -> list[torch.Tensor]:
        inputs = {name: leaf(x, device) for name, x in case.inputs(torch.float32).items()}
        probs = case.ours(inputs)
        return [probs, *torch.autograd.grad(probs.square().sum(), list(inputs.values()))]

    first, threads = run(), torch.get_num_threads()
    try:
        for number in (threads, 1, 2, 3):
            torch.set_num_threads(number)
            for x, y in zip(first, run(), strict=True):
                assert torch.equal(x, y), f"{number} threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(device: str, use_reentrant: bool):
    softmax, case = Softmax(FULL.given, 16), make_case(rpe=random(seeded(), 1, 1, 32, 32))
    grads = []
    for checkpointed in (False, True):
        x, rpe = leaf(case.x, device), leaf(case.rpe, device)
        if checkpointed:
            probs = torch.utils.checkpoint.checkpoint(softmax, x, 0.5, rpe, use_reentrant=use_reentrant)
        else:
            probs = softmax(x, 0.5, rpe)
        probs.square().sum().backward()
        grads.append((x.grad, rpe.grad))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_autocast_leaves_the_dtype_of_x(device: str):
    x = make_case().x.float().to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(Softmax(FULL.given, 16)(x), Softmax(FULL.given, 16)(x))
        assert Softmax(FULL.given, 16)(x).dtype == torch.float32


def test_meta_tensors_give_shapes():
    probs = Softmax(FULL.given, 16)(torch.empty(2, 8, 16, 16, device="meta", dtype=torch.bfloat16), causal=True)
    assert (probs.device.type, probs.shape, probs.dtype) == ("meta", (2, 8, 16, 16), torch.bfloat16)


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
        Softmax(FULL.given, 16)(**{"x": torch.zeros(2, 4, 16, 16), **change})


def test_values_of_other_heads_than_the_layouts():
    layout = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]]])
    with pytest.raises(ValueError, match=r"\(batch, 5, 16, 16\)\."):
        Softmax(layout, 16)(torch.zeros(1, 10, 16, 16))


def test_block_other_than_the_index():
    with pytest.raises(ValueError, match="block is 32, and the index was built for blocks of 16"):
        Softmax(BlockIndex.build(FULL.given, 16), 32)


def test_what_old_code_asks_the_operation_for():
    layout = torch.tensor([[[1, 0], [1, 1]]])
    assert Softmax(layout[0], 16).spdims == (1, 2, 2) and Softmax(layout[0], 16).num_blocks == 3
    of_two_heads = Softmax(layout.float().expand(2, 2, 2), 16)
    assert of_two_heads.spdims == (2, 2, 2) and of_two_heads.num_blocks == 6
    assert list(of_two_heads.lut_cache) == [torch.device("cpu")]


def test_its_repr_is_one_short_line():
    index = BlockIndex.build(torch.eye(2, dtype=torch.bool), 16)
    assert repr(Softmax(index, 16)) == f"Softmax({index})"
