"""block_sparse_attention against the float64 reference: values, gradients, options, memory, and what torch expects."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import (
    DTYPES,
    EXAMPLES,
    OPERAND_VIEWS,
    VIEWS,
    Layout,
    as_view,
    assert_as_accurate,
    attention_allowances,
    deterministic_algorithms,
    generator,
    implementation_on,
    is_hopper,
    layouts,
    leaf,
    make_layout,
    needs_gpu_memory,
    poisoned_memory,
    random,
    seeded,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_parameters import BACKENDS, GRAPH_DTYPES
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ds_sparse
from ds_sparse import block_sparse_attention, reference
from ds_sparse.index import BlockIndex
from ds_sparse.ops.operands import dropout_seed

OPERATORS = ("block_attention_forward", "block_attention_backward", "block_attention_bias_backward")

FULL = make_layout(torch.ones(2, 2, dtype=torch.bool))
MIXED = make_layout(torch.tensor([[[1, 0, 1], [0, 0, 0], [0, 1, 1]], [[1, 1, 1], [0, 1, 0], [1, 0, 0]]]))


@dataclass(frozen=True)
class Case:
    """An attention: float64 inputs (bool masks as they are), and how it is called."""

    layout: Layout
    block: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rpe: torch.Tensor | None = None
    key_padding_mask: torch.Tensor | None = None
    attn_mask: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    scale: float | None = None
    causal: bool = False
    dropout_p: float = 0.0
    wide_biases: bool = False

    def inputs(self, dtype: torch.dtype, views: tuple[str, str] = ("contiguous", "contiguous")):
        """Everything given: operands in `dtype` behind the first view, rpe and masks behind the second."""
        names = ("query", "key", "value", "rpe", "key_padding_mask", "attn_mask", "sinks")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name, x in given.items():
            is_operand = name in ("query", "key", "value")
            if x.dtype != torch.bool:
                x = x.to(wide(dtype) if self.wide_biases and not is_operand else dtype)
            given[name] = as_view(x, views[not is_operand]) if x.dim() == 4 else x
        return given

    def differentiable(self) -> list[str]:
        return ["query", "key", "value", *(name for name in ("rpe", "sinks") if getattr(self, name) is not None)]

    def oracle(self, inputs: dict[str, torch.Tensor], seed: tuple[int, int] = (0, 0)):
        return reference.attention(
            layout=self.layout.live, block=self.block, scale=self.scale, causal=self.causal, dropout_p=self.dropout_p,
            dropout_seed=seed, return_lse=True, **inputs,
        )  # fmt: skip

    def ours(self, inputs: dict[str, torch.Tensor], **changes):
        options = {"layout": self.layout.given, "block": self.block, "scale": self.scale, "causal": self.causal}
        options |= {"dropout_p": self.dropout_p, "return_lse": True}
        return block_sparse_attention(**inputs, **{**options, **changes})


def make_case(
    layout: Layout = MIXED, block: int = 16, tokens: int = 0, keys: int = 0, heads: int = 0, key_heads: int = 0,
    head_dim: int = 16, batch: int = 2, rng: torch.Generator | None = None, **options,
) -> Case:  # fmt: skip
    """Sizes of 0 are the layout's."""
    rng = rng or seeded()
    tokens, keys, heads = tokens or layout.rows * block, keys or layout.columns * block, heads or layout.heads
    key_shape = (batch, key_heads or heads, keys, head_dim)
    query, key, value = random(rng, batch, heads, tokens, head_dim), random(rng, *key_shape), random(rng, *key_shape)
    return Case(layout, block, query, key, value, **options)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts(max_side=3))
    block = draw(st.sampled_from((8, 8, 16, 16, 32, 64)))
    if layout.heads == 1:
        key_heads = draw(st.integers(1, 2))
        heads = key_heads * draw(st.integers(1, 2))
    else:
        heads = layout.heads
        key_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    batch = draw(st.integers(1, 2))
    tokens = layout.rows * block - draw(st.sampled_from((0, 0, 1, 5, block - 1)))
    keys = layout.columns * block - draw(st.sampled_from((0, 0, 1, 6, block - 1)))
    rng = generator(draw)
    full = (batch, heads, tokens, keys)

    def shape(dims: tuple[int, ...], may_be_one: int) -> tuple[int, ...]:
        sizes = [draw(st.sampled_from((size, 1))) for size in full[:may_be_one]] + list(full[may_be_one:])
        return tuple(sizes[4 - draw(st.sampled_from(dims)) :])

    def mask(*sizes: int) -> torch.Tensor:
        kept = torch.rand(sizes, generator=rng) < 0.7
        if draw(st.booleans()):
            return kept
        return random(rng, *sizes).masked_fill(~kept, draw(st.sampled_from((-math.inf, -10000.0, 1.0))))

    return make_case(
        layout, block, tokens, keys, heads, key_heads,
        head_dim=draw(st.sampled_from((8, 16, 32, 1, 20, 64, 72))),
        batch=batch,
        rng=rng,
        rpe=random(rng, *shape((2, 3, 4), 3)) if draw(st.booleans()) else None,
        key_padding_mask=mask(draw(st.sampled_from((batch, 1))), keys) if draw(st.booleans()) else None,
        attn_mask=mask(*shape((2, 4), 3)) if draw(st.booleans()) else None,
        sinks=random(rng, heads) if draw(st.booleans()) else None,
        scale=draw(st.sampled_from((None, None, 0.3, -0.5))),
        causal=draw(st.booleans()),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.1, 0.6))),
        wide_biases=draw(st.booleans()),
    )  # fmt: skip


def allowances(
    case: Case, dtype: torch.dtype, exact: dict[str, torch.Tensor], output_grad: torch.Tensor, lse_grad: torch.Tensor
) -> dict[str, float]:
    everything = torch.eye(case.key.shape[2], dtype=torch.float64).expand(*case.key.shape[:2], -1, -1)
    with torch.no_grad():
        probs, _ = replace(case, dropout_p=0.0).oracle({**exact, "value": everything})
        operands = [exact[name] for name in ("query", "key", "value")]
        errors = attention_allowances(
            probs, *operands, case.scale, dtype, output_grad, lse_grad, dropout_p=case.dropout_p
        )
        of_scores = errors.pop("scores")
        errors["rpe"] = of_scores if case.rpe is None else of_scores.sum_to_size(case.rpe.shape)
    return {name: x.max().item() for name, x in errors.items()}


def check(
    case: Case, dtype: torch.dtype, device: str, views: tuple[str, str] = ("contiguous", "contiguous"),
    only: str | None = None, grad_view: str = "contiguous", deterministic: bool = True,
) -> None:  # fmt: skip
    """Output, lse and gradients of all inputs, or of `only` one, and that nothing given is overwritten."""
    given = case.inputs(dtype, views)
    names = case.differentiable()
    wanted = [name for name in names if only in (None, name)]
    plain = {name: leaf(x, "cpu", name in names) for name, x in given.items()}
    exact = {name: leaf(x if x.dtype == torch.bool else x.double(), "cpu", name in names) for name, x in given.items()}
    ours = {name: leaf(x, device, name in wanted) for name, x in given.items()}
    torch.manual_seed(7)
    seed = tuple(dropout_seed(torch.device(device)).tolist())
    plain_results, exact_results = case.oracle(plain, seed), case.oracle(exact, seed)
    output_grad = as_view(random(seeded(1), *case.query.shape, dtype=dtype), grad_view)
    lse_grad = random(seeded(2), *case.query.shape[:3], dtype=exact_results[1].dtype).to(plain_results[1].dtype)
    grads_here = [leaf(x, device, requires_grad=False) for x in (output_grad, lse_grad)]
    torch.manual_seed(7)
    with poisoned_memory() if deterministic else nullcontext():
        output, lse = case.ours(ours)
        found = torch.autograd.grad((output, lse), [ours[name] for name in wanted], grads_here)

    assert_as_accurate("output", output, plain_results[0], exact_results[0])
    dead = exact_results[1] == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, dead)
    assert_as_accurate("lse", *(x.cpu().masked_fill(dead, 0) for x in (lse, plain_results[1], exact_results[1])))
    exact_grads = (output_grad.double(), lse_grad.double())
    plain_found = torch.autograd.grad(plain_results, [plain[name] for name in wanted], (output_grad, lse_grad))
    exact_found = torch.autograd.grad(exact_results, [exact[name] for name in wanted], exact_grads)
    allowed = allowances(case, dtype, exact, *exact_grads)
    for name, x, y, z in zip(wanted, found, plain_found, exact_found, strict=True):
        assert_as_accurate(f"gradient of {name}", x, y, z, allowance=allowed[name])
    for before, after in zip((*given.values(), output_grad), (*ours.values(), grads_here[0]), strict=True):
        assert torch.equal(before.cpu(), after.detach().cpu()), "an input was overwritten"


def supported(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("fp64 is refused on CUDA")


def on_a_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("a matter of GPUs")


def draws(function):
    """Random cases, and how they are given."""
    return given(
        case=cases(),
        dtype=st.sampled_from(DTYPES),
        views=st.tuples(st.sampled_from(OPERAND_VIEWS), st.sampled_from(VIEWS)),
        only=st.sampled_from((None, None, None, "query", "key", "value", "rpe", "sinks")),
        grad_view=st.sampled_from(OPERAND_VIEWS),
        deterministic=st.booleans(),
    )(function)


def check_drawn(
    case: Case, dtype: torch.dtype, device: str, views: tuple[str, str], only: str | None, grad_view: str,
    deterministic: bool,
) -> None:  # fmt: skip
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    check(case, dtype, device, views, only if only in case.differentiable() else None, grad_view, deterministic)


@EXAMPLES
@draws
def test_output_lse_and_gradients(
    device: str, case: Case, dtype: torch.dtype, views: tuple[str, str], only: str | None, grad_view: str,
    deterministic: bool,
):  # fmt: skip
    check_drawn(case, dtype, device, views, only, grad_view, deterministic)


@pytest.mark.gpu
@settings(EXAMPLES, max_examples=1000)
@draws
def test_a_thousand_random_cases(
    device: str, case: Case, dtype: torch.dtype, views: tuple[str, str], only: str | None, grad_view: str,
    deterministic: bool,
):  # fmt: skip
    on_a_gpu(device)
    check_drawn(case, dtype, device, views, only, grad_view, deterministic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_every_block_and_dtype_with_every_option(device: str, block: int, dtype: torch.dtype):
    supported(dtype, device)
    tokens, keys = 3 * block - 3, 3 * block - 5
    rng = seeded()
    mask = random(rng, 2, 1, tokens, keys).masked_fill(torch.rand(2, 1, tokens, keys, generator=rng) < 0.1, -math.inf)
    case = make_case(
        MIXED, block, tokens, keys, key_heads=1, head_dim=32, rng=rng, rpe=random(rng, 1, 2, tokens, keys),
        attn_mask=mask, key_padding_mask=torch.rand(2, keys, generator=rng) < 0.8, causal=True, dropout_p=0.2,
        sinks=random(rng, 2),
    )  # fmt: skip
    check(case, dtype, device, ("tokens_first", "contiguous"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [1, 7, 32, 40, 64, 96, 100, 128, 136, 200, 256])
def test_every_head_size(device: str, head_dim: int, dtype: torch.dtype):
    layout = make_layout(torch.tensor([[1, 0, 1], [1, 1, 0]]))
    check(make_case(layout, 64, 100, 190, heads=2, head_dim=head_dim, batch=1, causal=True), dtype, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (1, 70), (70, 1), (40, 130), (130, 40), (64, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_lengths_that_differ_and_end_anywhere(device: str, tokens: int, keys: int, causal: bool, dtype: torch.dtype):
    for block in (16, 64):
        live = torch.rand(-(-tokens // block), -(-keys // block), generator=seeded()) < 0.8
        live[0, 0] = True
        check(make_case(make_layout(live), block, tokens, keys, heads=2, causal=causal), dtype, device)


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
    for layout, heads in ((live, 2), (live[0], 1)):
        index = BlockIndex.build(layout, block)
        assert len(index.row_tiles.cuts) and len(index.column_tiles.cuts), "nothing is cut"
        tokens, keys = rows * block - 3, columns * block - 5
        check(make_case(make_layout(layout), block, tokens, keys, heads=heads, batch=1), dtype, device)


@pytest.mark.parametrize(
    "option",
    [
        *(
            pytest.param(f"head_dim {size}", marks=pytest.mark.slow_on_cpu("every head size is another test's"))
            for size in (40, 72, 256)
        ),
        "grouped heads",
        "dropout",
        "padding",
    ],
)
def test_cut_lists_with_options(device: str, option: str):
    """Keys that are padding leave nothing of whole parts of the long rows."""
    live = torch.rand(80, 70, generator=seeded()) < 0.02
    live[3] = live[:, 2] = True
    index = BlockIndex.build(live.to(device), 16)
    assert len(index.row_tiles.cuts) and len(index.column_tiles.cuts), "nothing is cut"
    if is_hopper(device):
        assert len(index.tiles("rows", 128).cuts) and len(index.tiles("columns", 128).cuts), "nothing is cut"
    options = {}
    if option.startswith("head_dim"):
        options["head_dim"] = int(option.split()[1])
    elif option == "grouped heads":
        options["key_heads"] = 1
    elif option == "dropout":
        options["dropout_p"] = 0.2
    else:
        keeps = torch.ones(1, 70 * 16, dtype=torch.bool)
        keeps[:, 200:1000] = False
        options["key_padding_mask"] = keeps
    check(make_case(make_layout(live), heads=2, batch=1, **options), torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
@pytest.mark.parametrize("name", ["Fixed", "Variable", "BigBird", "BSLongformer", "LocalSlidingWindow"])
def test_the_structures(device: str, name: str, block: int, dtype: torch.dtype):
    config = getattr(ds_sparse, f"{name}SparsityConfig")(num_heads=2, block=block, seed=1)
    layout = make_layout(config.make_layout({16: 320, 64: 640}[block]))
    check(make_case(layout, block, head_dim=64, batch=1, causal=name == "LocalSlidingWindow"), dtype, device)


def test_a_full_layout_is_dense_attention(device: str):
    case = make_case(FULL, 64, heads=3, head_dim=64)
    inputs = {name: x.float().to(device) for name, x in case.inputs(torch.float64).items()}
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(**inputs, is_causal=causal)
        torch.testing.assert_close(block_sparse_attention(**inputs, layout=FULL.given, causal=causal), expected)


def test_heads_that_share_keys_are_repeated_keys(device: str):
    case = make_case(make_layout(torch.rand(6, 3, 3, generator=seeded()) < 0.6), heads=6, key_heads=2)
    inputs = {name: x.float().to(device) for name, x in case.inputs(torch.float64).items()}
    repeated = {name: x if name == "query" else x.repeat_interleave(3, 1) for name, x in inputs.items()}
    torch.testing.assert_close(case.ours(inputs), case.ours(repeated))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(device: str, dtype: torch.dtype):
    supported(dtype, device)
    layout = make_layout(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]]))
    mask = torch.zeros(2, 1, 48, 48, dtype=torch.float64)
    mask[:, :, 3], mask[0, :, 40] = -math.inf, -math.inf
    padding = torch.ones(2, 48, dtype=torch.bool)
    padding[1] = False
    case = make_case(layout, heads=2, rpe=random(seeded(), 2, 1, 48, 48), attn_mask=mask, key_padding_mask=padding)
    inputs = case.inputs(dtype)
    inputs = {name: leaf(x, device, name in case.differentiable()) for name, x in inputs.items()}
    with poisoned_memory():
        output, lse = case.ours(inputs)
        # Large gradients at dead rows count for nothing.
        weights = torch.full_like(output, 100.0), torch.full_like(lse, 100.0)
        found = torch.autograd.grad((output, lse), [inputs[name] for name in case.differentiable()], weights)
    dead = torch.ones(2, 48, dtype=torch.bool, device=device)
    dead[0] = False
    dead[0, 16:32] = dead[0, 3] = dead[0, 40] = True
    assert torch.equal(lse == -math.inf, dead[:, None].expand(2, 2, 48))
    assert torch.isfinite(output).all() and all(torch.isfinite(x).all() for x in found)
    grad_query, grad_key, grad_value, grad_rpe = found
    for rows in (output, grad_query, grad_rpe):
        rows = rows.expand(2, 2, -1, -1).transpose(1, 2)
        assert not rows[dead].any() and rows[~dead].any(-1).all()
    assert not grad_key[1].any() and not grad_value[1].any()
    assert not grad_rpe[0, 0, :16, 16:32].any(), "a block that does not exist has a gradient"


def test_layout_without_a_live_block(device: str):
    case = make_case(make_layout(torch.zeros(2, 3, 2, dtype=torch.bool)), rpe=random(seeded(), 1, 2, 48, 32))
    inputs = {name: leaf(x.float(), device) for name, x in case.inputs(torch.float64).items()}
    with poisoned_memory():
        output, lse = case.ours(inputs)
        found = torch.autograd.grad((output.sum(), lse.sum()), list(inputs.values()))
    assert not output.any() and (lse == -math.inf).all()
    for grad, x in zip(found, inputs.values(), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_causal_is_a_mask_of_later_tokens(device: str):
    layout = make_layout(torch.tensor([[1, 1, 1], [1, 1, 0]]))
    inputs = {name: x.float().to(device) for name, x in make_case(layout, heads=2).inputs(torch.float64).items()}
    keep = torch.ones(32, 48, dtype=torch.bool, device=device).tril()
    by_flag = block_sparse_attention(**inputs, layout=layout.given, causal=True, return_lse=True)
    by_mask = block_sparse_attention(**inputs, layout=layout.given, attn_mask=keep, return_lse=True)
    torch.testing.assert_close(by_flag, by_mask)


def test_causal_leaves_out_the_blocks_above_the_diagonal(device: str):
    x = random(seeded(), 1, 1, 48, 8, dtype=torch.float32).to(device)
    index = BlockIndex.build(torch.ones(3, 3, dtype=torch.bool), 16).to(device)
    with Calls() as calls:
        block_sparse_attention(x, x, x, index, causal=True)
        block_sparse_attention(x, x, x, index)
    tiles = [arguments[7:11] for arguments in calls.arguments]
    for found, expected in zip(tiles, (index.causal().row_tiles, index.row_tiles), strict=True):
        assert all(x is y for x, y in zip(found, (expected.lines, expected.entries, expected.units, expected.cuts)))


def test_a_bool_mask_is_minus_infinity_where_false(device: str):
    inputs = {name: x.float().to(device) for name, x in make_case().inputs(torch.float64).items()}
    for name, shape in (("attn_mask", (2, 1, 48, 48)), ("attn_mask", (48, 48)), ("key_padding_mask", (2, 48))):
        keep = (torch.rand(shape, generator=seeded()) < 0.6).to(device)
        added = torch.zeros(shape, device=device).masked_fill(~keep, -math.inf)
        for mask in (added, added.bfloat16(), added.double()):
            by_bool, by_float = (
                block_sparse_attention(**inputs, **{name: x}, layout=MIXED.given, return_lse=True) for x in (keep, mask)
            )
            assert all(torch.equal(x, y) for x, y in zip(by_bool, by_float, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["finfo.min", -10000.0])
def test_large_finite_negatives_are_a_softmax(device: str, dtype: torch.dtype, value: str | float):
    """Never -inf by overflow: a row of them is a softmax, and where other keys are left they get nothing."""
    supported(dtype, device)
    value = torch.finfo(dtype).min if value == "finfo.min" else value
    inputs = {name: x.to(device) for name, x in make_case(FULL, heads=2).inputs(dtype).items()}
    everywhere = torch.full((32, 32), value, dtype=dtype, device=device)
    padding = torch.full((2, 32), value, dtype=dtype, device=device)
    ones = {**inputs, "value": torch.ones_like(inputs["value"])}
    for biases in (
        {"attn_mask": everywhere},
        {"rpe": everywhere, "attn_mask": everywhere, "key_padding_mask": padding},
    ):
        output, lse = block_sparse_attention(**ones, **biases, layout=FULL.given, return_lse=True)
        assert torch.isfinite(lse).all() and (lse < -9000).all()
        torch.testing.assert_close(output, ones["value"])
    if value == -10000.0:
        for biases in ({"attn_mask": everywhere}, {"key_padding_mask": padding}):
            output = block_sparse_attention(**inputs, **biases, layout=FULL.given)
            torch.testing.assert_close(
                output, block_sparse_attention(**inputs, layout=FULL.given), rtol=0.02, atol=0.02
            )
    partly = torch.zeros(2, 32, dtype=dtype, device=device)
    partly[:, 8:] = value
    kept = torch.arange(32, device=device).expand(2, -1) < 8
    for name in ("attn_mask", "key_padding_mask"):
        output, expected = (
            block_sparse_attention(
                **inputs, layout=FULL.given, **{name: x[:1].expand(32, -1) if name == "attn_mask" else x}
            )
            for x in (partly, kept)
        )
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "growth", [20, pytest.param(60, marks=pytest.mark.slow_on_cpu("between the two others")), 1000]
)
def test_scores_that_grow_along_a_row(device: str, growth: float, padded: bool, head_dim: int, dtype: torch.dtype):
    """Exponentials of scores that lie so far above a row's first ones are beyond what fp16, or float32, can hold."""
    supported(dtype, device)
    rng = seeded()
    kept = torch.rand(1, 1152, generator=rng) < 0.7 if padded else None
    layout = make_layout(torch.ones(3, 18, dtype=torch.bool))
    case = make_case(layout, 64, head_dim=head_dim, batch=1, rng=rng, key_padding_mask=kept)
    query, key = case.query.clone(), case.key.clone()
    query[..., 0] = head_dim**0.5 * torch.tensor([1.0, 0.5, -1.0]).repeat(64)
    key[..., 0] = torch.linspace(0, growth, 1152)
    check(replace(case, query=query, key=key), dtype, device)


@pytest.mark.parametrize(
    ("option", "head_dim", "dtype"),
    [
        ("plain", 64, torch.bfloat16),
        ("plain", 128, torch.float32),
        ("dropout", 128, torch.bfloat16),
        ("rpe", 64, torch.float32),
        *(
            pytest.param(*case, marks=pytest.mark.slow_on_cpu("other pairs of the same options, sizes and dtypes"))
            for case in (
                ("plain", 64, torch.float32),
                ("plain", 128, torch.bfloat16),
                ("dropout", 64, torch.float32),
                ("dropout", 64, torch.bfloat16),
                ("dropout", 128, torch.float32),
                ("rpe", 64, torch.bfloat16),
                ("rpe", 128, torch.float32),
                ("rpe", 128, torch.bfloat16),
            )
        ),
    ],
    ids=str,
)
def test_long_runs_of_masked_keys(device: str, option: str, head_dim: int, dtype: torch.dtype):
    """Padding of whole steps, one after the other: at the end, the beginning, in the middle, and everywhere."""
    rng, keys = seeded(), 24 * 64
    kept = torch.ones(4, keys, dtype=torch.bool)
    kept[0, 300:] = kept[1, :1200] = kept[2, 64:640] = kept[2, 700:1500] = kept[3] = False
    options = {"dropout_p": 0.2} if option == "dropout" else {}
    if option == "rpe":
        options["rpe"] = random(rng, 1, 1, 2 * 64, keys)
    layout = make_layout(torch.rand(2, 24, generator=rng) < 0.8)
    case = make_case(layout, 64, heads=1, head_dim=head_dim, batch=4, rng=rng, key_padding_mask=kept, **options)
    check(case, dtype, device)

    # One such list after the other, on the same multiprocessor: each of many heads as the one.
    if device == "cuda" and option == "plain":
        inputs = {name: x.to(device) for name, x in case.inputs(dtype).items()}
        alone, _ = case.ours(inputs)
        together, _ = case.ours({name: x.repeat(1, 200, 1, 1) if x.dim() == 4 else x for name, x in inputs.items()})
        assert torch.equal(together, alone.expand_as(together))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_over_long_lists_and_many_heads(device: str, head_dim: int, dtype: torch.dtype):
    """Longer than the keys that are on their way at a time, and more of them than multiprocessors."""
    heads = 80 if device == "cuda" else 2
    layout = make_layout(torch.ones(4, 20, dtype=torch.bool))
    case = make_case(layout, 64, heads=heads, head_dim=head_dim, batch=1, dropout_p=0.2)
    check(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("value", ["finfo.min", -10000.0])
def test_gradients_of_rows_that_have_large_negatives_only(
    device: str, value: str | float, mask: str, block: int, dtype: torch.dtype
):
    """They are those of a softmax, though float32 keeps little or nothing of the log of a sum beside such scores.

    Scores are multiples of 1/8, to which -10000 is added without a rounding: what is rounded is found out.
    """
    value = torch.finfo(dtype).min if value == "finfo.min" else value
    rng, tokens = seeded(), 3 * block
    case = make_case(MIXED, block, head_dim=64, rng=rng, scale=0.125, wide_biases=True)
    query, key = (torch.randint(-1, 2, x.shape, generator=rng).double() for x in (case.query, case.key))
    rpe = torch.randint(-8, 9, (1, 2, tokens, tokens), generator=rng).double() / 8
    added = torch.zeros(2, 1, tokens, tokens, dtype=torch.float64)
    added[0, :, 5:] = added[1] = value
    case = replace(case, query=query, key=key, rpe=rpe, **{mask: added if mask == "attn_mask" else added[:, 0, 0]})
    output_grad, lse_grad = random(rng, *query.shape, dtype=dtype), random(rng, *query.shape[:3], dtype=torch.float32)
    names = case.differentiable()

    def expected(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """By hand for lse, as the gradient of torch.logsumexp subtracts its result again."""
        inputs = {name: leaf(x, "cpu", name in names) for name, x in given.items()}
        output, lse = case.oracle(inputs)
        everything = torch.eye(tokens, dtype=lse.dtype).expand(*key.shape[:2], -1, -1)
        probs = case.oracle({**inputs, "value": everything})[0].detach()
        scores = inputs["query"] @ inputs["key"].mT * case.scale + inputs["rpe"]
        lse_term = (lse_grad.to(lse.dtype).unsqueeze(-1) * probs * scores).sum()
        return torch.autograd.grad((output, lse_term), [inputs[name] for name in names], (output_grad.to(output), None))

    given = case.inputs(dtype)
    exact = {name: x.double() for name, x in given.items()}
    ours = {name: leaf(x, device, name in names) for name, x in given.items()}
    grads = output_grad.to(device), lse_grad.to(device)
    found = torch.autograd.grad(case.ours(ours), [ours[name] for name in names], grads)
    allowed = allowances(case, dtype, exact, output_grad.double(), lse_grad.double())
    for name, x, y, z in zip(names, found, expected(given), expected(exact), strict=True):
        assert_as_accurate(f"gradient of {name}", x, y, z, allowance=allowed[name])


def of_any_scale(device: str) -> dict[str, tuple]:
    """Each kind of attention of 75 keys, with a scale, and which pairs count."""
    tokens, block = 75, 16
    token, edges = torch.arange(tokens), torch.tensor([0, 30, 31, 75])
    layout = torch.rand(2, 5, 5, generator=seeded(3)) < 0.6
    document = torch.bucketize(token, edges, right=True)
    place = token - edges[document - 1]
    together, near = document[:, None] == document, (token[:, None] - token).abs() <= 9
    live = layout[:, token // block][:, :, token // block]
    own = layout[:, place // block][:, :, place // block] & together
    packed = {"block": block, "cu_seqlens": edges.to(device)}

    def on_blocks(**options):
        return lambda *x, scale: block_sparse_attention(*x, layout, scale=scale, **options)

    def in_windows(*x, scale, **options):
        return ds_sparse.window_attention(*x, 9, scale=scale, **options)

    pairs = ds_sparse.TokenIndex.from_pairs(near.nonzero(), tokens, tokens)
    return {
        "blocks": (on_blocks(), live, 0),
        "causal": (on_blocks(causal=True), live.tril(), 0),
        "packed": (on_blocks(**packed), own, 0),
        "row": (on_blocks(document_layout="row", **packed), live & together, 0),
        "few at an offset": (on_blocks(block=block, query_offset=70), live[:, 70:], 70),
        "many at an offset": (on_blocks(block=block, query_offset=50, causal=True), live.tril()[:, 50:], 50),
        "windows": (in_windows, near, 0),
        "windows at an offset": (lambda *x, scale: in_windows(*x, scale=scale, query_offset=70), near[70:], 70),
        "pairs": (lambda *x, scale: ds_sparse.sparse_attn(*x, pairs, scale=scale), near, 0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [65, 72, 128, 129])
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("kind", of_any_scale("cpu"))
def test_any_scale_of_large_scores(device: str, kind: str, scale: float, head_dim: int, dtype: torch.dtype):
    """Whole numbers, of which all scores are exact: what is not stable is found out."""
    call, seen, offset = of_any_scale(device)[kind]
    rng = seeded(head_dim)
    query, key = (torch.randint(-30, 31, (1, 2, 75, head_dim), generator=rng).to(dtype) for _ in range(2))
    value, weights = (torch.randint(-2, 3, (1, 2, 75, head_dim), generator=rng).to(dtype) for _ in range(2))
    query, weights = query[:, :, offset:], weights[:, :, offset:]
    ours = [leaf(x, device) for x in (query, key, value)]
    exact = [leaf(x.double(), "cpu") for x in (query, key, value)]
    everything, mask = torch.ones(1, 1, dtype=torch.bool), seen.reshape(1, -1, *seen.shape[-2:])
    output = call(*ours, scale=scale)
    expected = reference.attention(*exact, everything, 75, scale, attn_mask=mask)
    grads = torch.autograd.grad(output, ours, weights.to(device))
    expected_grads = torch.autograd.grad(expected, exact, weights.double())
    for x, y in zip((output, *grads), (expected, *expected_grads), strict=True):
        rounding = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.15}[dtype]
        torch.testing.assert_close(x.double().cpu(), y, rtol=0, atol=rounding * (1 + y.abs().max().item()))


def test_a_float64_mask_beyond_float32_stays_finite(device: str):
    inputs = {name: x.float().to(device) for name, x in make_case(FULL, heads=1).inputs(torch.float64).items()}
    for name, shape in (("attn_mask", (32, 32)), ("rpe", (32, 32)), ("key_padding_mask", (2, 32))):
        mask = torch.full(shape, -1e300, dtype=torch.float64, device=device)
        output, lse = block_sparse_attention(**inputs, **{name: mask}, layout=FULL.given, return_lse=True)
        assert torch.isfinite(lse).all()
        mean = inputs["value"].mean(2, keepdim=True).expand_as(output)
        torch.testing.assert_close(output, mean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [None, 4, 20], ids=["plain", "few at an offset", "many at an offset"])
@pytest.mark.parametrize("by_distance", [False, True], ids=["rpe", "distance_bias"])
def test_several_lowest_biases_count_as_one(device: str, by_distance: bool, queries: int | None, dtype: torch.dtype):
    """Where none of the keys is without; those of fp16 are ordinary numbers, of which two are lower than one."""
    supported(dtype, device)
    low, block, keys, tokens = torch.finfo(dtype).min, 8, 40, queries or 40
    rng, offset = seeded(), keys - tokens
    value, weights = random(rng, 1, 2, keys, 16, dtype=dtype), random(rng, 1, 2, tokens, 16, dtype=dtype)
    zeros = torch.zeros(1, 2, keys, 16, dtype=dtype)
    mask, padding = torch.full((tokens, keys), low, dtype=dtype), torch.zeros(1, keys, dtype=dtype)
    padding[:, 2:] = low
    # Others have -1e30 where the dtype has it, and below that there is nothing.
    padding[:, 1] = max(low, -1e30)
    bias = torch.zeros(2, 2 * keys - 1, dtype=dtype) if by_distance else torch.zeros(1, 2, tokens, keys, dtype=dtype)
    bias[..., 5 : keys + 3] = low
    inputs = {"query": zeros[:, :, :tokens], "key": zeros, "value": value, "attn_mask": mask}
    inputs |= {"key_padding_mask": padding, "distance_bias" if by_distance else "rpe": bias}
    names = ("value", "distance_bias" if by_distance else "rpe")
    ours = {name: leaf(x, device, name in names) for name, x in inputs.items()}
    exact = {name: leaf(x.double(), "cpu", name in names) for name, x in inputs.items()}
    layout = torch.ones(5, 5, dtype=torch.bool)
    output, lse = block_sparse_attention(
        **ours, layout=layout, block=block, query_offset=None if queries is None else offset, return_lse=True
    )
    expected, expected_lse = reference.attention(
        **exact, layout=layout, block=block, query_offset=offset, return_lse=True
    )
    grads = torch.autograd.grad(output, [ours[name] for name in names], weights.to(device))
    expected_grads = torch.autograd.grad(expected, [exact[name] for name in names], weights.double())
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.01}
    for x, y in zip((output, lse, *grads), (expected, expected_lse, *expected_grads), strict=True):
        torch.testing.assert_close(x.double().cpu(), y, **rounding)
    if dtype != torch.float16:
        torch.testing.assert_close(lse.double(), torch.full_like(lse, -1e30).double())
        mean = value.to(device).double().mean(2, keepdim=True)
        torch.testing.assert_close(output.double(), mean.expand_as(output), **rounding)


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


def test_nan_spoils_what_depends_on_it_and_nothing_else(device: str):
    layout = make_layout(torch.tensor([[1, 0], [1, 1]]))
    inputs = {name: x.float() for name, x in make_case(layout, heads=2).inputs(torch.float64).items()}
    inputs["query"][0, 0, 3, 5] = inputs["key"][0, 1, 20, 0] = inputs["value"][1, 1, 20, 4] = math.nan
    nan = (
        block_sparse_attention(**{name: x.to(device) for name, x in inputs.items()}, layout=layout.given).isnan().cpu()
    )
    expected = torch.zeros_like(nan)
    expected[0, 0, 3] = expected[0, 1, 16:] = True
    expected[1, 1, 16:, 4] = True
    assert torch.equal(nan, expected)


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
    layout = make_layout(torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]]))
    case = make_case(layout, tokens=41, keys=43, heads=2, dropout_p=0.3, causal=True)

    def surrounded(x: torch.Tensor) -> torch.Tensor:
        storage = x.new_full((x.shape[0], x.shape[1], 64, 32), math.nan)
        storage[:, :, : x.shape[2], :16] = x
        return storage[:, :, : x.shape[2], :16]

    found = []
    for place in (surrounded, torch.clone):
        inputs = {name: place(x.to(device)).requires_grad_() for name, x in case.inputs(dtype).items()}
        torch.manual_seed(0)
        output, lse = case.ours(inputs)
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


def test_a_key_padding_mask_of_any_strides(device: str):
    inputs = packed(device, "BTHD")
    layout = torch.ones(3, 3, dtype=torch.bool)
    keep = (torch.rand(2, 48, generator=seeded()) < 0.5).to(device)
    bias = random(seeded(), 2, 48, dtype=torch.float32).to(device)
    for mask in (keep, bias, bias.bfloat16()):
        found = block_sparse_attention(*inputs, layout, key_padding_mask=mask.T.contiguous().T)
        assert torch.equal(found, block_sparse_attention(*inputs, layout, key_padding_mask=mask))
        found = block_sparse_attention(*inputs, layout, key_padding_mask=mask[:, :1])
        spelled_out = mask[:, :1].expand(2, 48).contiguous()
        assert torch.equal(found, block_sparse_attention(*inputs, layout, key_padding_mask=spelled_out))


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


@pytest.mark.parametrize("form", [torch.bool, torch.int64, torch.int32, torch.uint8, "2-D", "BlockIndex"], ids=str)
def test_every_form_of_a_layout_gives_the_same_bits(device: str, form: object):
    live = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.bool)
    inputs = [random(seeded(), 2, 3, 32, 16, dtype=torch.float32).to(device) for _ in range(3)]
    given = live[0] if form == "2-D" else BlockIndex.build(live, 16) if form == "BlockIndex" else live.to(form)
    expected = block_sparse_attention(*inputs, live.repeat(3, 1, 1).to(device), block=16)
    assert torch.equal(block_sparse_attention(*inputs, given), expected)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_the_block_is_found_from_the_shapes(device: str, block: int):
    live = torch.rand(3, 2, generator=seeded()) < 0.7
    query, key = (random(seeded(), 1, 1, n, 8, dtype=torch.float32).to(device) for n in (2 * block + 1, 2 * block - 1))
    found = block_sparse_attention(query, key, key, live)
    assert torch.equal(found, block_sparse_attention(query, key, key, live, block=block))


@pytest.mark.parametrize("tokens", [1, 8, 9, 100, 128])
def test_one_block_covers_whatever_it_has_to(device: str, tokens: int):
    x = random(seeded(), 1, 1, tokens, 8, dtype=torch.float32).to(device)
    found = block_sparse_attention(x, x, x, torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(x, x, x))


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


def test_no_batch_or_no_heads(device: str):
    for batch, heads in ((0, 2), (2, 0)):
        x = torch.zeros(batch, heads, 40, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        rpe = torch.zeros(1, 1, 40, 40, device=device, requires_grad=True)
        layout = torch.ones(1, 3, 3, dtype=torch.bool)
        output, lse = block_sparse_attention(x, x, x, layout, rpe=rpe, dropout_p=0.1, return_lse=True)
        assert output.shape == x.shape and output.dtype == x.dtype
        assert lse.shape == x.shape[:3] and lse.dtype == torch.float32
        grads = torch.autograd.grad((output, lse), (x, rpe), (torch.ones_like(output), torch.ones_like(lse)))
        assert grads[0].shape == x.shape and not grads[1].any()


def test_gradients_of_one_result_alone(device: str):
    case = make_case(rpe=random(seeded(), 1, 1, 48, 48))
    inputs = {name: leaf(x.float(), device) for name, x in case.inputs(torch.float64).items()}
    exact = {name: leaf(x, "cpu") for name, x in case.inputs(torch.float64).items()}
    for result in (0, 1):
        ours, theirs = case.ours(inputs)[result], case.oracle(exact)[result]
        ours, theirs = (x.masked_fill(x == -math.inf, 0).square().sum() for x in (ours, theirs))
        found = torch.autograd.grad(ours, list(inputs.values()))
        expected = torch.autograd.grad(theirs, list(exact.values()), materialize_grads=True)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-5)


def replayed(output: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> None:
    """The output is linear in value: with the same dropout in backward, and only then, the products agree."""
    (grad,) = torch.autograd.grad(output, value, weights)
    forwards, backwards = (output.double() * weights).sum(), (grad.double() * value).sum()
    torch.testing.assert_close(forwards, backwards, rtol=1e-5, atol=1e-3)


def test_dropout_is_drawn_from_the_generator_of_torch(device: str):
    case = make_case(FULL, 64, heads=2, dropout_p=0.5)
    inputs = {name: x.float().to(device).requires_grad_() for name, x in case.inputs(torch.float64).items()}
    torch.manual_seed(3)
    first, second = case.ours(inputs)[0], case.ours(inputs)[0]
    torch.manual_seed(3)
    again, without = case.ours(inputs)[0], case.ours(inputs, dropout_p=0.0)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(case.ours(inputs)[1], without[1]), "lse is of all probabilities"
    weights = random(seeded(), *first.shape).to(device, torch.float32)
    for output in (first, second):
        replayed(output, weights, inputs["value"])


def test_without_dropout_no_random_number_is_drawn(device: str):
    case = make_case()
    inputs = {name: x.float().to(device) for name, x in case.inputs(torch.float64).items()}
    torch.manual_seed(3)
    case.ours(inputs)
    drawn = torch.rand(4, device=device)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, device=device))


def test_dropout_leaves_the_mean(device: str):
    """Over many calls, outputs spread around the one without dropout."""
    case = make_case(FULL, 64, heads=1, batch=1)
    inputs = {name: x.float().to(device) for name, x in case.inputs(torch.float64).items()}
    torch.manual_seed(0)
    outputs = torch.stack([case.ours(inputs, dropout_p=0.3)[0] for _ in range(200)]).double()
    error = (outputs.mean(0) - case.ours(inputs)[0]) / (outputs.std(0) / math.sqrt(len(outputs)))
    assert error.abs().max() < 6 and 0.9 < error.std() < 1.1


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(device: str, use_reentrant: bool, dropout_p: float):
    case = make_case(rpe=random(seeded(), 1, 1, 48, 48), dropout_p=dropout_p)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rpe: torch.Tensor) -> torch.Tensor:
        return case.ours({"query": query, "key": key, "value": value, "rpe": rpe}, return_lse=False)

    grads = []
    for checkpointed in (False, True):
        inputs = [leaf(x.float(), device) for x in case.inputs(torch.float64).values()]
        torch.manual_seed(5)
        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=use_reentrant)
        else:
            output = run(*inputs)
        torch.rand(3, device=device)
        output.square().sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_same_bits_every_time_and_with_any_number_of_threads(device: str):
    live = torch.rand(2, 80, 80, generator=seeded()) < 0.05
    live[:, 0] = live[:, :, 0] = True
    case = make_case(make_layout(live), 16, key_heads=1, rpe=random(seeded(), 1, 1, 1280, 1280), dropout_p=0.1)

    def run() -> list[torch.Tensor]:
        inputs = {name: leaf(x, device) for name, x in case.inputs(torch.bfloat16).items()}
        torch.manual_seed(0)
        with deterministic_algorithms():
            output, lse = case.ours(inputs)
            return [output, lse, *torch.autograd.grad((output.square().sum(), lse.sum()), list(inputs.values()))]

    first, threads = run(), torch.get_num_threads()
    try:
        for number in (threads, 1, 3):
            torch.set_num_threads(number)
            for x, y in zip(first, run(), strict=True):
                assert torch.equal(x, y), f"{number} threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradcheck(device: str, causal: bool, dropout_p: float):
    supported(torch.float64, device)
    layout = make_layout(torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]]]))
    case = make_case(
        layout, 8, 13, 15, key_heads=1, head_dim=5, causal=causal, dropout_p=dropout_p, scale=0.7,
        rpe=random(seeded(), 1, 2, 13, 15), key_padding_mask=torch.rand(2, 15, generator=seeded()) < 0.8,
        sinks=random(seeded(), 2) if dropout_p else None,
    )  # fmt: skip
    inputs = {name: leaf(x, device, name in case.differentiable()) for name, x in case.inputs(torch.float64).items()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        output, lse = case.ours(dict(zip(inputs, tensors, strict=True)))
        return output, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "view", [pytest.param("contiguous", marks=pytest.mark.slow_on_cpu("the simpler one")), "tokens_first"]
)
def test_opcheck(device: str, operator: str, dtype: torch.dtype, view: str):
    rng = seeded()
    index = BlockIndex.build(MIXED.given, 16).to(device)
    rows, columns = index.row_tiles, index.column_tiles
    query, grad = (as_view(random(rng, 2, 2, 41, 16, dtype=dtype), view).to(device) for _ in range(2))
    key, value = (as_view(random(rng, 2, 1, 43, 16, dtype=dtype), view).to(device) for _ in range(2))
    rpe, mask = random(rng, 1, 2, 41, 43, dtype=dtype), torch.rand(2, 1, 1, 43, generator=rng) < 0.8
    key_bias, seed = random(rng, 2, 43, dtype=torch.float32), torch.tensor([5, 6])
    row_lists, column_lists = ((tiles.lines, tiles.entries, tiles.units, tiles.cuts) for tiles in (rows, columns))
    biases = tuple(x.to(device) for x in (rpe, key_bias, mask, seed))
    for options, causal, dropout_p in ((biases, True, 0.1), ((rpe.to(device), None, None, None), False, 0.0)):
        numbers = (2, 16, rows.tile, 0.25, causal, dropout_p)
        name = implementation_on(device)
        forward = (query, key, value, *options, *row_lists, *numbers, name)
        output, lse, statistics = torch.ops.ds_sparse.block_attention_forward(*forward)
        grad_lse = None if causal else lse.nan_to_num(0, 0, 0)
        saved = (grad, grad_lse, query, key, value, output, statistics, *options)
        arguments = {
            "block_attention_forward": forward,
            "block_attention_backward": (*saved, *row_lists, *column_lists, *numbers, False, name),
            "block_attention_bias_backward": (*saved, *row_lists, *numbers, [1, 2, 41, 43]),
        }
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments[operator])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph(device: str, backend: str):
    sinks = random(seeded(), 2)
    case = make_case(tokens=41, keys=43, rpe=random(seeded(), 1, 2, 41, 43), head_dim=20, causal=True, sinks=sinks)
    inputs = [leaf(x.float(), device) for x in case.inputs(torch.float64).values()]
    padding = (torch.rand(2, 43, generator=seeded()) < 0.8).to(device)
    index = BlockIndex.build(MIXED.given, 16).causal().to(device)

    def run(query, key, value, rpe, sinks):
        output, lse = block_sparse_attention(
            query * 2, key, value, index, rpe=rpe, sinks=sinks, key_padding_mask=padding, causal=True, return_lse=True
        )
        return output * 2, lse.exp()

    def check(found, wanted):
        # Sums of numbers up to the largest: Inductor's own kernels round them otherwise.
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-6, atol=1e-6 * y.abs().max().item())

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    results, expected = compiled(*inputs), run(*inputs)
    check(results, expected)
    check(*(torch.autograd.grad(x.square().sum() + y.sum(), inputs) for x, y in (results, expected)))
    check(*(torch.autograd.grad(f(*inputs)[0].square().sum(), inputs) for f in (compiled, run)))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_dropout_is_replayed_in_backward(device: str, backend: str, checkpointed: bool):
    index = BlockIndex.build(FULL.given, 16).to(device)
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
    index = BlockIndex.build(FULL.given, 16).to(device)
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"pass BlockIndex\.build\(layout, block\)"):
        compiled(x, x, x, FULL.given)
    with pytest.raises(Exception, match=r"pass index\.causal\(\)"):
        compiled(x, x, x, index, causal=True)
    found = compiled(x, x, x, index.causal(), causal=True)
    assert torch.equal(found, block_sparse_attention(x, x, x, index, causal=True))


def test_autocast_casts_query_key_and_value(device: str):
    case = make_case(rpe=random(seeded(), 1, 1, 48, 48))
    inputs = {name: leaf(x.float(), device) for name, x in case.inputs(torch.float64).items()}
    inputs["key"] = leaf(case.key.half(), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        output, lse = case.ours(inputs)
    assert output.dtype == torch.bfloat16 and lse.dtype == torch.float32
    cast = {name: x if name == "rpe" else x.bfloat16() for name, x in inputs.items()}
    assert torch.equal(output, case.ours(cast)[0])
    found = torch.autograd.grad(output.float().square().sum(), list(inputs.values()))
    assert [x.dtype for x in found] == [torch.float32, torch.float16, torch.float32, torch.float32]
    assert all(x.any() for x in found)


def test_meta_tensors_give_shapes():
    query, key = (torch.empty(2, 4, n, 20, device="meta", dtype=torch.bfloat16) for n in (41, 43))
    for layout in (MIXED.live[0], BlockIndex.build(MIXED.live[0], 16)):
        output, lse = block_sparse_attention(query, key, key, layout, causal=True, return_lse=True)
        assert (output.device.type, output.shape, output.dtype) == ("meta", (2, 4, 41, 20), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 4, 41), torch.float32)


def test_tensors_without_memory_have_no_address():
    """As tools that count memory and operations give them."""
    index = BlockIndex.build(MIXED.given, 16)
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.empty(2, 2, 48, 16, requires_grad=True)
        output = block_sparse_attention(x, x, x, index, dropout_p=0.1)
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert isinstance(output, FakeTensor) and output.shape == grad.shape == x.shape


def test_second_derivatives_are_refused():
    x = random(seeded(), 1, 1, 32, 8).requires_grad_()
    (grad,) = torch.autograd.grad(block_sparse_attention(x, x, x, FULL.given).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        grad.sum().backward()


@pytest.mark.gpu
def test_float64_on_cuda_is_refused(device: str):
    on_a_gpu(device)
    x = torch.zeros(1, 1, 32, 8, device=device, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64 on CUDA, .* use MatMul and Softmax"):
        block_sparse_attention(x, x, x, FULL.given)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_once_the_index_is_built(device: str):
    on_a_gpu(device)
    case = make_case(head_dim=20, key_heads=1)
    inputs = {name: leaf(x.bfloat16(), device) for name, x in case.inputs(torch.float64).items()}
    rpe = torch.randn(1, 2, 48, 48, device=device, dtype=torch.float16, requires_grad=True)
    masks = [
        (torch.zeros(2, 48, device=device, dtype=torch.float64), torch.ones(48, 48, device=device, dtype=torch.bool)),
        (torch.ones(2, 48, device=device, dtype=torch.bool), torch.zeros(2, 1, 1, 48, device=device).half()),
    ]
    layout = MIXED.given.to(device)

    def run() -> None:
        for padding, mask in masks:
            options = {"rpe": rpe, "key_padding_mask": padding, "attn_mask": mask, "causal": True, "dropout_p": 0.1}
            output, lse = block_sparse_attention(**inputs, **options, layout=layout, return_lse=True)
            torch.autograd.grad((output.sum(), lse.sum()), [*inputs.values(), rpe])

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_captured_in_a_cuda_graph(device: str, dropout_p: float):
    on_a_gpu(device)
    index = BlockIndex.build(MIXED.given, 16).to(device).causal()
    inputs = [x.detach().requires_grad_() for x in packed(device, "BTHD", torch.float32)]
    inputs[0] = inputs[0][:, :2].detach().requires_grad_()
    inputs[1:] = (x[:, :1].detach().requires_grad_() for x in inputs[1:])
    rpe = torch.randn(1, 1, 48, 48, device=device, requires_grad=True)
    weights = torch.randn_like(inputs[0])

    def run() -> list[torch.Tensor]:
        output = block_sparse_attention(*inputs, index, causal=True, rpe=rpe, dropout_p=dropout_p)
        return [output.detach(), *torch.autograd.grad(output, [*inputs, rpe], weights)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    outputs = []
    for seed in (1, 2):
        with torch.no_grad():
            for x in inputs:
                x.copy_(random(seeded(seed), *x.shape))
        graph.replay()
        outputs.append(results[0].clone())
        if dropout_p == 0:
            for x, y in zip(results, run(), strict=True):
                assert torch.equal(x, y)
        else:
            products = [(x.double() * y).sum() for x, y in ((results[0], weights), (results[3], inputs[2]))]
            torch.testing.assert_close(*products, rtol=1e-5, atol=1e-3)
    graph.replay()
    assert torch.equal(results[0], outputs[-1]) == (dropout_p == 0)


@pytest.mark.gpu
def test_while_a_cuda_graph_is_captured_a_new_layout_is_refused(device: str):
    on_a_gpu(device)
    x, layout = torch.zeros(1, 1, 32, 16, device=device), FULL.given.to(device)
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
    case = make_case(rpe=random(seeded(), 1, 2, 48, 48))
    layout, results = MIXED.given.to("cuda:0"), []
    for place in ("cuda:0", "cuda:1"):
        inputs = {name: leaf(x.bfloat16(), place) for name, x in case.inputs(torch.float64).items()}
        for form in (layout, BlockIndex.build(layout, 16)):
            with deterministic_algorithms():
                output, lse = case.ours(inputs, layout=form)
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
        ({"layout": BlockIndex.build(FULL.given, 16), "block": 32}, "block is 32, and the index was .* of 16"),
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
        block_sparse_attention(**{"query": x, "key": x, "value": x, "layout": FULL.given, **change})


@pytest.mark.parametrize("layout", [[[1, 0], [0, 1]], torch.ones(2, 2, dtype=torch.complex64)])
def test_layouts_of_another_type(layout: object):
    x = zeros(2, 2, 32, 16)
    with pytest.raises(TypeError, match="A layout is"):
        block_sparse_attention(x, x, x, layout)


def test_masks_that_require_a_gradient_are_taken_where_none_is_computed():
    x, mask = zeros(2, 2, 32, 16), zeros(32, 32, requires_grad=True)
    with torch.no_grad():
        assert not block_sparse_attention(x, x, x, FULL.given, attn_mask=mask).any()
