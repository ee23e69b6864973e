"""window_attention against the float64 reference: values, gradients, options, and what torch expects of an operator."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from helpers import (
    DTYPES,
    EXAMPLES,
    OPERAND_VIEWS,
    as_view,
    assert_as_accurate,
    attention_allowances,
    deterministic_algorithms,
    generator,
    implementation_on,
    leaf,
    poisoned_memory,
    random,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st
from ops_parameters import BACKENDS, GRAPH_DTYPES
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import WindowIndex, reference, window_attention, window_matmul, window_softmax
from ds_sparse.index import lookup
from ds_sparse.index.cache import Cache
from ds_sparse.ops import unwindow_matmul

OPERATORS = ("window_attention_forward", "window_attention_backward")


@dataclass(frozen=True)
class Case:
    """A windowed attention: float64 inputs, and how it is called."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    windows: tuple[int, ...] = (5,)
    causal: bool = False
    key_padding_mask: torch.Tensor | None = None
    global_tokens: tuple[int, ...] = ()
    dilations: tuple[int, ...] = (1,)
    scale: float | None = None

    def inputs(self, dtype: torch.dtype, view: str = "contiguous") -> list[torch.Tensor]:
        return [as_view(x.to(dtype), view) for x in (self.query, self.key, self.value)]

    def options(self, like: torch.Tensor) -> dict:
        mask = self.key_padding_mask
        if mask is not None:
            # Added in fp32 at least, to PyTorch's scores as to ours; in fp64 it would make theirs fp64.
            wide = torch.promote_types(like.dtype, torch.float32)
            mask = mask.to(like.device, mask.dtype if mask.dtype == torch.bool else wide)
        return {"causal": self.causal, "key_padding_mask": mask}

    def oracle(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return reference.window_attention(
            *inputs, self.windows, **self.options(inputs[0]), global_tokens=self.global_tokens,
            dilations=self.dilations, scale=self.scale,
        )  # fmt: skip

    def ours(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        windows, dilations = (x[0] if len(x) == 1 else x for x in (self.windows, self.dilations))
        return window_attention(
            *inputs, windows, **self.options(inputs[0]), global_tokens=self.global_tokens or None,
            dilation=dilations, scale=self.scale,
        )  # fmt: skip


def make_case(
    tokens: int = 40, heads: int = 2, key_heads: int = 0, head_dim: int = 16, batch: int = 2,
    rng: torch.Generator | None = None, **options,
) -> Case:  # fmt: skip
    rng = rng or seeded()
    shape = (batch, key_heads or heads, tokens, head_dim)
    return Case(random(rng, batch, heads, tokens, head_dim), random(rng, *shape), random(rng, *shape), **options)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.sampled_from((1, 2, 7, 16, 33, 70, 100, 300)))
    key_heads = draw(st.integers(1, 2))
    heads = key_heads * draw(st.integers(1, 2))
    batch = draw(st.integers(1, 2))
    rng = generator(draw)

    def numbers(*choices: int) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(choices)) for _ in range(draw(st.sampled_from((1, heads)))))

    kept = torch.rand(draw(st.sampled_from((batch, 1))), tokens, generator=rng) < 0.7
    added = random(rng, *kept.shape).masked_fill(~kept, draw(st.sampled_from((-math.inf, -10000.0))))
    return make_case(
        tokens, heads, key_heads,
        head_dim=draw(st.sampled_from((1, 8, 16, 20, 64, 128))),
        batch=batch,
        rng=rng,
        windows=numbers(0, 1, 3, 8, 20, 200),
        causal=draw(st.booleans()),
        key_padding_mask=draw(st.sampled_from((None, None, kept, added))),
        global_tokens=tuple(draw(st.sets(st.integers(0, tokens - 1), max_size=4))),
        dilations=numbers(1, 1, 2, 3, 90),
        scale=draw(st.sampled_from((None, None, 0.3, -0.5))),
    )  # fmt: skip


def allowances(case: Case, dtype: torch.dtype, exact: list[torch.Tensor], grad: torch.Tensor) -> list[float]:
    query, key, value = (x.detach() for x in exact)
    everything = torch.eye(key.shape[2], dtype=torch.float64).expand(*key.shape[:2], -1, -1)
    probs = case.oracle([query, key, everything])
    errors = attention_allowances(probs, query, key, value, case.scale, dtype, grad)
    return [errors[name].max().item() for name in ("query", "key", "value")]


def check(
    case: Case, dtype: torch.dtype, device: str, view: str = "contiguous", grad_view: str = "contiguous",
    deterministic: bool = True,
) -> None:  # fmt: skip
    """Output and gradients, and that nothing given is overwritten."""
    given = case.inputs(dtype, view)
    plain, exact = [leaf(x, "cpu") for x in given], [leaf(x.double(), "cpu") for x in given]
    ours = [leaf(x, device) for x in given]
    plain_output, exact_output = case.oracle(plain), case.oracle(exact)
    grad = as_view(random(seeded(1), *case.query.shape, dtype=dtype), grad_view)
    with poisoned_memory() if deterministic else nullcontext():
        output = case.ours(ours)
        found = torch.autograd.grad(output, ours, leaf(grad, device, requires_grad=False))
    assert_as_accurate("output", output, plain_output, exact_output)
    plain_found = torch.autograd.grad(plain_output, plain, grad)
    exact_found = torch.autograd.grad(exact_output, exact, grad.double())
    allowed = allowances(case, dtype, exact, grad.double())
    for name, *results, allowance in zip(
        ("query", "key", "value"), found, plain_found, exact_found, allowed, strict=True
    ):
        assert_as_accurate(f"gradient of {name}", *results, allowance=allowance)
    for before, after in zip(given, ours, strict=True):
        assert torch.equal(before, after.detach().cpu()), "an input was overwritten"


@EXAMPLES
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    view=st.sampled_from(OPERAND_VIEWS),
    grad_view=st.sampled_from(OPERAND_VIEWS),
    deterministic=st.booleans(),
)
def test_output_and_gradients(
    device: str, case: Case, dtype: torch.dtype, view: str, grad_view: str, deterministic: bool
):
    if device == "cuda" and dtype == torch.float64:
        dtype = torch.float32
    check(case, dtype, device, view, grad_view, deterministic)


OPTIONS = {
    "window": {},
    "causal": {"causal": True},
    "global": {"global_tokens": (0, 1, 2)},
    "global anywhere": {"global_tokens": (50, 3, 299)},
    "global, causal": {"global_tokens": (50, 3, 299), "causal": True},
    "dilation": {"dilations": (3,)},
    "dilation, causal": {"dilations": (3,), "causal": True},
    "dilation, global, causal": {"dilations": (3,), "global_tokens": (50, 3, 299), "causal": True},
    "by heads": {"windows": (33, 4), "dilations": (1, 7), "global_tokens": (60,), "causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_over_many_blocks(device: str, options: dict, dtype: torch.dtype):
    keep = torch.rand(1, 300, generator=seeded()) < 0.9
    for head_dim in (16, 128):
        case = make_case(300, head_dim=head_dim, batch=1, key_padding_mask=keep, **{"windows": (20,), **options})
        check(case, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_long_rows_and_columns_are_put_together(device: str, dtype: torch.dtype, deterministic: bool):
    if device == "cpu" and not deterministic:
        pytest.skip("sums are always in a fixed order on the CPU")
    tokens = 1400 if device == "cpu" else 2300
    case = make_case(tokens, batch=1, windows=(20,), global_tokens=(7,), head_dim=64)
    index = WindowIndex.build(tokens, 20, global_tokens=(7,), device=device)
    assert len(index.blocks.row_tiles.cuts) > 0 and len(index.blocks.column_tiles.cuts) > 0
    check(case, dtype, device, deterministic=deterministic)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_every_block(device: str, block: int, causal: bool):
    case = make_case(300, windows=(37,), global_tokens=(4, 130), causal=causal)
    index = WindowIndex.build(300, 37, causal, (4, 130), block=block, device=device)
    inputs = [x.float().to(device) for x in case.inputs(torch.float64)]
    torch.testing.assert_close(window_attention(*inputs, index), case.ours(inputs))


def test_it_is_the_three_operations(device: str):
    case = make_case(100, windows=(9, 30), heads=2, key_padding_mask=torch.rand(2, 100, generator=seeded()) < 0.8)
    query, key, value = (x.float().to(device) for x in case.inputs(torch.float64))
    scores = window_matmul(query, key.mT, 30)
    mask = case.key_padding_mask.to(device)
    probs = window_softmax(scores, (9, 30), scale=0.25, key_padding_mask=mask)
    torch.testing.assert_close(unwindow_matmul(probs, value, 30), case.ours([query, key, value]))


def test_a_window_of_everything_is_dense_attention(device: str):
    query, key, value = (x.float().to(device) for x in make_case(70).inputs(torch.float64))
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        for window in (69, 10**12):
            torch.testing.assert_close(window_attention(query, key, value, window, causal), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_nothing_left_are_zeros_with_zero_gradient(device: str, dtype: torch.dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is refused on CUDA")
    keep = torch.ones(2, 50, dtype=torch.bool)
    keep[0], keep[1, 10:30] = False, False
    inputs = [leaf(x, device) for x in make_case(50).inputs(dtype)]
    with poisoned_memory():
        output = window_attention(*inputs, 4, key_padding_mask=keep.to(device))
        found = torch.autograd.grad(output, inputs, torch.full_like(output, 100.0))
    seen = (reference.window_mask(50, (4,)) & keep[:, None]).sum(-1)
    # Where a token sees one other, its probability is 1 and the query has no gradient.
    for rows, least in ((output, 1), (found[0], 2)):
        rows = rows.cpu().transpose(1, 2)
        assert not rows[seen == 0].any() and rows[seen >= least].any(-1).all()
    assert all(torch.isfinite(x).all() for x in found)
    assert not found[1][0].any() and not found[2][0].any()


def test_forms_of_numbers(device: str):
    inputs = [x.float().to(device) for x in make_case().inputs(torch.float64)]
    expected = window_attention(*inputs, (3, 7), global_tokens=(9, 2), dilation=(2, 1))
    for windows, tokens, dilations in (
        ([3, 7], [2, 9, 2], torch.tensor([2, 1])),
        (torch.tensor([3, 7], dtype=torch.int32), torch.tensor([9, 2]), [2, 1]),
    ):
        found = window_attention(*inputs, windows, global_tokens=tokens, dilation=dilations)
        assert torch.equal(found, expected)
    expected = window_attention(*inputs, 3)
    for windows in (torch.tensor(3), (3, 3), [3]):
        assert torch.equal(window_attention(*inputs, windows, global_tokens=()), expected)


def test_the_index_of_numbers_is_built_once(device: str, monkeypatch: pytest.MonkeyPatch):
    build, built = WindowIndex.build.__func__, []

    def counted(cls, *arguments, **options) -> WindowIndex:
        built.append(build(cls, *arguments, **options))
        return built[-1]

    monkeypatch.setattr(WindowIndex, "build", classmethod(counted))
    monkeypatch.setattr(lookup, "_of_windows", Cache(most=64))
    inputs = [x.float().to(device) for x in make_case().inputs(torch.float64)]
    for _ in range(3):
        window_attention(*inputs, 6, causal=True)
    assert len(built) == 1
    # Not even inference mode leaves tensors in it that backward cannot take.
    with torch.inference_mode():
        window_attention(*inputs, 6, causal=True, dilation=2)
    leaves = [x.requires_grad_() for x in inputs]
    torch.autograd.grad(window_attention(*leaves, 6, causal=True, dilation=2).sum(), leaves)


def test_no_batch_or_no_heads(device: str):
    for batch, heads in ((0, 2), (2, 0)):
        x = torch.zeros(batch, heads, 40, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        output = window_attention(x, x, x, 3, global_tokens=[5])
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        assert output.shape == grad.shape == x.shape and output.dtype == x.dtype


def test_the_same_bits_with_any_number_of_threads(device: str):
    case = make_case(500, heads=3, windows=(60,), global_tokens=(7, 300))

    def run() -> list[torch.Tensor]:
        inputs = [leaf(x, device) for x in case.inputs(torch.bfloat16)]
        output = case.ours(inputs)
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    threads = torch.get_num_threads()
    with deterministic_algorithms():
        first = run()
        try:
            for number in (threads, 1, 3):
                torch.set_num_threads(number)
                assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True)), f"{number} threads"
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(device: str, use_reentrant: bool):
    case = make_case(global_tokens=(4,), dilations=(2,))
    grads = []
    for checkpointed in (False, True):
        inputs = [leaf(x.float(), device) for x in case.inputs(torch.float64)]
        if checkpointed:
            output = torch.utils.checkpoint.checkpoint(lambda *x: case.ours(x), *inputs, use_reentrant=use_reentrant)
        else:
            output = case.ours(inputs)
        output.square().sum().backward()
        grads.append([x.grad for x in inputs])
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(device: str, options: dict):
    if device == "cuda":
        pytest.skip("fp64 is refused on CUDA")
    options = options | {"global_tokens": tuple(x % 21 for x in options.get("global_tokens", ()))}
    keep = torch.rand(1, 21, generator=seeded()) < 0.8
    case = make_case(21, head_dim=3, batch=1, key_padding_mask=keep, **{"windows": (2,), **options})
    inputs = [leaf(x, device) for x in case.inputs(torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: case.ours(x), inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "view", [pytest.param("contiguous", marks=pytest.mark.slow_on_cpu("the simpler one")), "tokens_first"]
)
def test_opcheck(device: str, operator: str, dtype: torch.dtype, view: str):
    rng = seeded()
    query, grad = (as_view(random(rng, 2, 2, 41, 16, dtype=dtype), view).to(device) for _ in range(2))
    key, value = (as_view(random(rng, 2, 1, 41, 16, dtype=dtype), view).to(device) for _ in range(2))
    key_bias = random(rng, 2, 1, 1, 41, dtype=torch.float32).to(device)
    for index in (
        WindowIndex.build(41, 5, device=device),
        WindowIndex.build(41, (5, 2), True, (3, 30), 2, block=8, device=device),
    ):
        rows, columns = (
            (x.lines, x.entries, x.units, x.cuts) for x in (index.blocks.row_tiles, index.blocks.column_tiles)
        )
        tile = index.blocks.row_tiles.tile
        numbers = (index.blocks.layout_heads, index.blocks.block, tile, index.num_global, 0.25, index.causal)
        shared = (key_bias if index.causal else None, index.limits, index.places, *rows)
        name = implementation_on(device)
        forward = (query, key, value, *shared, *numbers, name)
        output, _, statistics = torch.ops.ds_sparse.window_attention_forward(*forward)
        arguments = {
            "window_attention_forward": forward,
            "window_attention_backward": (
                grad,
                query,
                key,
                value,
                output,
                statistics,
                *shared,
                *columns,
                *numbers,
                False,
                name,
            ),
        }
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments[operator])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow_on_cpu("all options at once are compiled as well")),
        {"causal": True, "global_tokens": (3, 30), "dilation": (2, 1)},
    ],
    ids=str,
)
def test_compiles_into_one_graph(device: str, backend: str, options: dict):
    inputs = [leaf(x.float(), device) for x in make_case(head_dim=20).inputs(torch.float64)]
    keep = (torch.rand(2, 40, generator=seeded()) < 0.8).to(device)
    index = WindowIndex.build(40, 5, **options, device=device)

    def run(query, key, value):
        return window_attention(query * 2, key, value, index, key_padding_mask=keep) * 2

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    results, expected = compiled(*inputs), run(*inputs)
    torch.testing.assert_close(results, expected)
    found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (results, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        (5, {"causal": True}),
        (5, {"dilation": 2, "global_tokens": [0]}),
        ([5, 0, 9, 3], {"dilation": [1, 2, 3, 1]}),
        *(
            pytest.param(*case, marks=pytest.mark.slow_on_cpu("other pairs of the same windows and options"))
            for case in (
                (5, {"global_tokens": [9, 3]}),
                (5, {"dilation": [1, 2, 3, 1]}),
                ([5, 0, 9, 3], {"causal": True}),
                ([5, 0, 9, 3], {"global_tokens": [9, 3]}),
                ([5, 0, 9, 3], {"dilation": 2, "global_tokens": [0]}),
            )
        ),
    ],
    ids=str,
)
def test_numbers_compile_into_two_graphs_for_all_lengths(device: str, windows, options: dict):
    torch._dynamo.reset()
    counters.clear()

    def run(query, key, value, keep):
        return window_attention(query * 2, key, value, windows, key_padding_mask=keep, **options) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for tokens in (40, 64, 21):
        shapes = [(2, heads, tokens, 20) for heads in (4, 2, 2)]
        inputs = [leaf(random(seeded(), *shape, dtype=torch.float32), device) for shape in shapes]
        keep = (torch.rand(2, tokens, generator=seeded()) < 0.8).to(device)
        results, expected = compiled(*inputs, keep), run(*inputs, keep)
        torch.testing.assert_close(results, expected)
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (results, expected))
        torch.testing.assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] == 2


def test_autocast(device: str):
    inputs = [leaf(x.float(), device) for x in make_case().inputs(torch.float64)]
    with torch.autocast(device, dtype=torch.bfloat16):
        output = window_attention(*inputs, 5)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, window_attention(*(x.bfloat16() for x in inputs), 5))


def test_meta_tensors_give_shapes():
    x = torch.empty(2, 4, 41, 20, device="meta", dtype=torch.bfloat16)
    for window in (5, WindowIndex.build(41, 5)):
        output = window_attention(x, x, x, window)
        assert (output.device.type, output.shape, output.dtype) == ("meta", x.shape, torch.bfloat16)
    assert window_attention(x, x, x, 5, global_tokens=[7]).shape == x.shape


def test_tensors_without_memory_have_no_address():
    index = WindowIndex.build(48, 5, True, (9,), 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 2, 48, 16, requires_grad=True)
        output = window_attention(x, x, x, index)
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert isinstance(output, FakeTensor) and output.shape == grad.shape == x.shape


def test_memory_is_that_of_the_tensors(device: str):
    """Nothing of the size of the band, or of tokens squared, is a tensor."""
    x = random(seeded(), 1, 1, 4096, 16, dtype=torch.float32).to(device).requires_grad_()
    index = WindowIndex.build(4096, 500, global_tokens=[77], device=device)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = result if isinstance(result, tuple) else (result,)
            sizes.extend(x.numel() for x in results)
            return result

    with Sizes():
        torch.autograd.grad(window_attention(x, x, x, index).sum(), x)
    assert max(sizes) == x.numel()


@dataclass(frozen=True)
class Refusal:
    """How a call is changed, and the sentence it ends in."""

    change: dict
    sentence: str
    error: type[Exception] = field(default=ValueError)


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal({"window_size": -1}, "window_size is -1; it has to be 0 or more"),
        Refusal({"window_size": True}, "window_size is True; it has to be an integer", TypeError),
        Refusal({"window_size": 2.0}, "window_size is 2.0", TypeError),
        Refusal({"window_size": torch.tensor([2.0])}, "window_size is a 1-D tensor of torch.float32", TypeError),
        Refusal({"window_size": (1, 2, 3)}, "window_size has 3 numbers; give one, or 2, one a head"),
        Refusal({"dilation": 0}, "dilation is 0; it has to be 1 or more"),
        Refusal({"dilation": (1, 2, 3)}, "dilation has 3 numbers; give one, or 2"),
        Refusal({"dilation": 1.5}, "dilation is 1.5", TypeError),
        Refusal({"global_tokens": [32]}, "global_tokens has 32, and there are 32 tokens, numbered from 0"),
        Refusal({"global_tokens": [-1]}, r"global_tokens is \[-1\]; it has to be 0 or more"),
        Refusal({"global_tokens": torch.ones(32).bool()}, "global_tokens is a 1-D tensor of torch.bool", TypeError),
        Refusal({"key": torch.zeros(2, 2, 31, 16)}, "those of key and value equal"),
        Refusal({"query": torch.zeros(2, 2, 31, 16)}, "query has 31 tokens and key 32"),
        Refusal({"query": torch.zeros(2, 3, 32, 16)}, "query has 3 heads and key 2"),
        Refusal({"value": torch.zeros(2, 2, 32, 16).half()}, "value is torch.float16 and query torch.float32"),
        Refusal({"scale": math.nan}, "scale is nan; it has to be finite"),
        Refusal({"key_padding_mask": torch.ones(2, 31)}, r"key_padding_mask has shape \(2, 31\)"),
        Refusal({"key_padding_mask": torch.ones(2, 32, requires_grad=True)}, "key_padding_mask requires a gradient"),
        Refusal({"window_size": WindowIndex.build(31, 2)}, "WindowIndex is for 31 tokens .* query has 32 tokens"),
        Refusal({"window_size": WindowIndex.build(32, (1, 2, 3))}, "and 3 heads .* and 2 heads"),
        Refusal(
            {"window_size": WindowIndex.build(32, 2), "causal": True},
            "A WindowIndex is given, and causal besides; build it with that",
        ),
        Refusal({"window_size": WindowIndex.build(32, 2), "dilation": 2}, "and dilation besides"),
        Refusal({"window_size": WindowIndex.build(32, 2), "global_tokens": ()}, "and global_tokens besides"),
        Refusal({"global_tokens": torch.ones(2, 2).long()}, "in 1-D, which all sequences of a batch share", TypeError),
    ],
    ids=lambda refusal: refusal.sentence,
)
def test_arguments_that_do_not_fit(refusal: Refusal):
    x = torch.zeros(2, 2, 32, 16)
    with pytest.raises(refusal.error, match=refusal.sentence):
        window_attention(**{"query": x, "key": x, "value": x, "window_size": 2, **refusal.change})


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": True, "global_tokens": (3, 130), "dilation": 2}], ids=str)
def test_captured_in_a_cuda_graph(device: str, options: dict):
    if device == "cpu":
        pytest.skip("a matter of GPUs")
    inputs = [leaf(x.bfloat16(), device) for x in make_case(300, head_dim=64).inputs(torch.float64)]
    weights = torch.randn_like(inputs[0])

    def run() -> list[torch.Tensor]:
        output = window_attention(*inputs, 20, **options)
        return [output.detach(), *torch.autograd.grad(output, inputs, weights)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), deterministic_algorithms():
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with deterministic_algorithms(), torch.cuda.graph(graph):
        results = run()
    with torch.no_grad():
        for x in inputs:
            x.copy_(random(seeded(5), *x.shape))
    graph.replay()
    with deterministic_algorithms():
        assert all(torch.equal(x, y) for x, y in zip(results, run(), strict=True))


def test_a_window_a_head_compiles_where_all_sizes_are_symbolic(device: str):
    index = WindowIndex.build(40, (5, 2, 9), device=device)
    compiled = torch.compile(lambda *x: window_attention(*x, index), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3, 5):
        inputs = [random(seeded(), batch, 3, 40, 24, dtype=torch.float32).to(device) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), window_attention(*inputs, index))
