"""window_matmul, unwindow_matmul and window_softmax: windows, rows and heads beyond those of the fuzz, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fuzz.compare import hold
from fuzz.windows import product_case, softmax_case
from helpers import DTYPES, as_view, assert_as_accurate, needs_gpu_memory, random, seeded

import ds_sparse
from ds_sparse import reference, unwindow_matmul, window_matmul, window_softmax
from ds_sparse.tools import memory

HALVES = (torch.float16, torch.bfloat16)
OPERATORS = ("window_matmul", "unwindow_matmul", "window_softmax_forward", "window_softmax_backward")
JOBS = ("unwindow_matmul", "window_matmul")


def operands(
    job: str, leading: tuple[int, ...], tokens: int, window: int, depth: int, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor]:
    shapes = {"a": (tokens, depth), "b": (depth, tokens)}
    if job == "unwindow_matmul":
        shapes = {"p": (tokens, 2 * window + 1), "v": (tokens, depth)}
    rng = seeded()
    return {name: random(rng, *leading, *shape, dtype=dtype) for name, shape in shapes.items()}


def check(
    device: str, dtype: torch.dtype, job: str, leading: tuple[int, ...], tokens: int, window: int, depth: int,
    views: tuple[str, str] = ("contiguous", "contiguous"),
) -> None:  # fmt: skip
    given = operands(job, leading, tokens, window, depth, dtype)
    tensors = {name: as_view(x, view) for (name, x), view in zip(given.items(), views, strict=True)}
    hold(product_case(job, tensors, window), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("depth", [128, 200, 256, 300])
def test_large_heads(device: str, job: str, depth: int, dtype: torch.dtype):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for gradcheck on the CPU")
    check(device, dtype, job, (1, 2), 150, 40, depth)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(130, torch.float32), *((window, dtype) for window in (140, 255, 400) for dtype in HALVES)],
    ids=str,
)
@pytest.mark.parametrize("job", JOBS)
def test_rows_of_several_tasks(device: str, job: str, window: int, dtype: torch.dtype):
    """Also where windows are so wide that a GPU has fewer thread blocks of 16 bits at work."""
    check(device, dtype, job, (1, 2) if device == "cpu" else (2, 2), 700, window, 64)


@pytest.mark.parametrize("tokens", [128, 129, 290])
@pytest.mark.parametrize("window", [4, 6, 13, 20, 48, 64, 400])
@pytest.mark.parametrize("job", JOBS)
def test_windows_that_end_anywhere_in_a_tile(device: str, job: str, window: int, tokens: int):
    """Heads of a band begin at any address, and its rows at any place of a tile."""
    for dtype in (*HALVES, torch.float32):
        check(device, dtype, job, (1, 3), tokens, window, 40)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("depth", [40, 72])
@pytest.mark.parametrize(("window", "tokens"), [(4, 129), (6, 129), (20, 129), (64, 129), (140, 300), (400, 600)])
@pytest.mark.parametrize("job", JOBS)
def test_each_of_many_heads_is_as_one(device: str, job: str, window: int, tokens: int, depth: int, dtype: torch.dtype):
    """With so many no head's rows are shared out among a GPU's thread blocks: one writes them from end to end."""
    check(device, dtype, job, (1, 1), tokens, window, depth)
    head = [x.to(device) for x in operands(job, (1, 1), tokens, window, depth, dtype).values()]
    heads, operation = 1200 if device == "cuda" else 3, getattr(ds_sparse, job)
    many = operation(*(x.expand(1, heads, -1, -1) for x in head), window)
    assert many.equal(operation(*head, window).expand_as(many))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("views", [("contiguous", "contiguous"), ("packed", "transposed")], ids=" ".join)
@pytest.mark.parametrize(
    ("window", "tokens", "depth"),
    [(64, 129, 64), (64, 1, 8), (64, 500, 64), (96, 200, 40), (128, 77, 128), (160, 333, 72)],
)
def test_heads_for_every_multiprocessor(
    device: str, window: int, tokens: int, depth: int, views: tuple[str, str], dtype: torch.dtype
):
    """With windows whose rows are whole cache lines apart."""
    leading = (2, 80) if device == "cuda" else (2, 2)
    check(device, dtype, "window_matmul", leading, tokens, window, depth, views)


@pytest.mark.parametrize(
    ("heads", "tokens", "windows", "causal"),
    [
        pytest.param(1, 700, [650], False, marks=pytest.mark.slow_on_cpu("causal ones are as long")),
        (2, 700, [650], True),
        (1, 30, [1500], False),
        (1, 6, [8000], False),
        (3, 150, [64], False),
        (600, 9, [3, 1, 4, 0, 2, 5], True),
    ],
)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_of_long_rows_and_many_heads(
    device: str, heads: int, tokens: int, windows: list[int], causal: bool, masked: bool, dtype: torch.dtype
):
    tensors = {"scores": random(seeded(), 2, heads, tokens, 2 * max(windows) + 1, dtype=dtype)}
    if masked:
        tensors["key_padding_mask"] = torch.rand(2, tokens, generator=seeded(2)) < 0.8
    windows = windows * (heads // len(windows)) if len(windows) > 1 else windows
    hold(softmax_case(tensors, windows, 0.7, causal), device)


@pytest.mark.parametrize(
    ("heads", "tokens", "windows", "causal"), [(1200, 129, [4], False), (600, 720, [3, 1, 4, 0, 2, 5], True)]
)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_softmax_of_more_rows_than_a_gpu_takes_at_a_time(
    device: str, heads: int, tokens: int, windows: list[int], causal: bool, masked: bool, dtype: torch.dtype
):
    """Its warps go on to rows of other heads, and heads with windows of their own take several launches: each of many
    heads is as among six."""
    some, rng = 6, seeded()
    scores, grad = (random(rng, 1, some, tokens, 2 * max(windows) + 1, dtype=dtype) for _ in range(2))
    tensors = {"scores": scores}
    if masked:
        tensors["key_padding_mask"] = torch.rand(1, tokens, generator=rng) < 0.8
    hold(softmax_case(tensors, windows, 0.7, causal), device)
    found = []
    for repeats in (1, heads // some if device == "cuda" else 2):
        ours = scores.repeat(1, repeats, 1, 1).to(device).requires_grad_()
        probs = window_softmax(
            ours, windows * repeats if len(windows) > 1 else windows, scale=0.7, causal=causal,
            key_padding_mask=tensors["key_padding_mask"].to(device) if masked else None,
        )  # fmt: skip
        found.append([probs, *torch.autograd.grad(probs, ours, grad.repeat(1, repeats, 1, 1).to(device))])
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many, one.repeat(1, many.shape[1] // some, 1, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_finite_negatives_are_a_softmax(device: str, dtype: torch.dtype):
    """Masks below the lowest count as it; where nothing is left, there are zeros."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is for gradcheck on the CPU")
    low = torch.finfo(dtype).min
    masks = [torch.full((1, 20), -10000.0), torch.full((1, 20), low, dtype=dtype), torch.zeros(1, 20)]
    masks.append(torch.tensor([max(-1e30, low), low], dtype=dtype).repeat(10)[None])
    masks[2][:, :12] = -math.inf
    for mask in masks:
        tensors = {"scores": random(seeded(), 1, 2, 20, 7, dtype=dtype), "key_padding_mask": mask.to(dtype)}
        hold(softmax_case(tensors, [3], causal=True), device)


def beside_the_sequence(tokens: int, window: int) -> torch.Tensor:
    """bool (T, 2 * window + 1): the numbers of a band that belong to no token."""
    column = torch.arange(tokens)[:, None] + torch.arange(-window, window + 1)
    return (column < 0) | (column >= tokens)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_there_are_zeros_where_there_is_no_token(device: str, dtype: torch.dtype):
    """Also in rows that are not finite, with as many heads."""
    a, b = (random(rng, 2, 80, 200, 24).to(device, dtype) for rng in (seeded(), seeded(1)))
    rows = torch.tensor([0, 70, 199], device=device)
    a[:, :, rows] = math.inf
    band = window_matmul(a, b.mT, 64)
    beside = beside_the_sequence(200, 64).to(device)
    assert not band[:, :, beside].any()
    spoilt = (torch.arange(200, device=device)[:, None] == rows).any(1)[:, None] & ~beside
    assert not torch.isfinite(band[:, :, spoilt]).any() and torch.isfinite(band[:, :, ~spoilt]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_beside_the_sequence_do_not_count(device: str, dtype: torch.dtype):
    """Whatever they are; and what is not finite stays in the rows that see it."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("fp64 is refused on CUDA")
    p, v = operands("unwindow_matmul", (1, 2), 40, 7, 16, dtype).values()
    beside = beside_the_sequence(40, 7)
    v[:, :, 20] = math.inf
    expected = unwindow_matmul(p.masked_fill(beside, 0).to(device), v.to(device), 7)
    p = p.masked_fill(beside, math.nan).to(device).requires_grad_()
    found = unwindow_matmul(p, v.to(device), 7)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    far = (torch.arange(40, device=device) - 20).abs() > 7
    assert torch.isfinite(found[:, :, far]).all() and not torch.isfinite(found[:, :, ~far]).any()
    (grad,) = torch.autograd.grad(found[:, :, far].sum(), p)
    assert not grad[:, :, beside.to(device)].any() and torch.isfinite(grad[:, :, far]).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_what_is_not_finite_stays_in_its_windows(device: str, dtype: torch.dtype):
    """Of all products: rows of a tile have windows of their own."""
    a, b = (random(rng, 1, 2, 200, 24).to(device, dtype) for rng in (seeded(), seeded(1)))
    p = random(seeded(2), 1, 2, 200, 11).to(device, dtype)
    spoilt = a.clone()
    spoilt[:, :, 90, 3], spoilt[:, :, 131] = math.nan, -math.inf
    token, rows = torch.arange(200, device=device), torch.tensor([90, 131], device=device)
    far = ((token[:, None] - rows).abs() > 5).all(1)
    v = a.clone().requires_grad_()
    (grad,) = torch.autograd.grad(unwindow_matmul(p, v, 5), v, spoilt)
    (expected,) = torch.autograd.grad(unwindow_matmul(p, v, 5), v, a)
    for found, right in ((unwindow_matmul(p, spoilt, 5), unwindow_matmul(p, a, 5)), (grad, expected)):
        torch.testing.assert_close(found[:, :, far], right[:, :, far])
        torch.testing.assert_close(found[:, :, 90, 4:], right[:, :, 90, 4:])
        assert not torch.isfinite(found[:, :, 131]).any() and not torch.isfinite(found[:, :, 90, 3]).any()
    band = window_matmul(spoilt, b.mT, 5)
    near = torch.zeros(200, dtype=torch.bool, device=device)
    near[rows] = True
    assert torch.equal(band[:, :, ~near], window_matmul(a, b.mT, 5)[:, :, ~near])
    # Where there is no token, a number that is not finite is beside zeros.
    spoilt[:, :, 0] = math.nan
    assert not window_matmul(spoilt, b.mT, 5)[:, :, 0, :5].any()


def test_more_matrices_than_a_grid_has_rows(device: str):
    for job in JOBS:
        inputs = [x.to(device) for x in operands(job, (70000,), 3, 1, 4, torch.float32).values()]
        some = torch.tensor([0, 65534, 65535, 65536, 69999])
        expected = getattr(reference, job)(*(x.cpu()[some] for x in inputs), 1)
        torch.testing.assert_close(getattr(ds_sparse, job)(*inputs, 1).cpu()[some], expected)


@pytest.mark.gpu
def test_more_elements_than_int32_counts(device: str):
    """The last rows of bands of more than 2^31 elements, forward and backward."""
    needs_gpu_memory(device, 32)
    tokens, window, last = 16384, 1024, 2048
    query, key, grad = (torch.randn(66, tokens, 64, device=device, dtype=torch.float16) / 8 for _ in range(3))

    def run(operations, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        query, key, grad = inputs[0].requires_grad_(), inputs[1].requires_grad_(), inputs[2]
        scores = operations.window_matmul(query, key.mT, window)
        probs = operations.window_softmax(scores, (window,))
        output = operations.unwindow_matmul(probs, key, window)
        # Large enough for the gradient of scores to be of normal numbers.
        grads = torch.autograd.grad(output, (scores, query, key), 64 * grad)
        results = {"scores": scores, "probabilities": probs, "output": output}
        return results | {f"gradient of {x}": grad for x, grad in zip(("scores", "query", "key"), grads)}

    # All that the last rows see, and all that sees the last columns.
    rest = [x[-1:, -2 * last :] for x in (query, key, grad)]
    with torch.device(device):
        plain = run(reference, *(x.clone() for x in rest))
        exact = run(reference, *(x.double() for x in rest))
    found = run(ds_sparse, query, key, grad)
    assert found["scores"].numel() > 2**31
    for name, ours in found.items():
        assert_as_accurate(name, *(x[-1:, -last:].cpu() for x in (ours, plain[name], exact[name])))


@pytest.mark.gpu
def test_float64_is_refused_on_cuda(device: str):
    if device == "cpu":
        pytest.skip("the CPU takes it")
    x = torch.zeros(2, 8, 4, device=device, dtype=torch.float64)
    for call in (
        lambda: window_matmul(x, x.mT, 1),
        lambda: unwindow_matmul(x[..., :3], x, 1),
        lambda: window_softmax(x[..., :3], 1),
    ):
        with pytest.raises(ValueError, match="float64 on CUDA, where operations of windows take float16"):
            call()


def test_bands_whose_rows_are_one_row(device: str):
    band, v = random(seeded(), 1, 9).to(device, torch.float32), random(seeded(1), 40, 8).to(device, torch.float32)
    for rows in (band.expand(40, 9), band[:, :1].expand(40, 9)):
        found, expected = [], []
        for p, results in ((rows, found), (rows.contiguous(), expected)):
            v_leaf = v.clone().requires_grad_()
            output = unwindow_matmul(p, v_leaf, 4)
            results += [output, *torch.autograd.grad(output.square().sum(), v_leaf)]
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_softmax_of_scores_as_low_as_can_be(device: str, scale: float, dtype: torch.dtype):
    """Only -inf masks, however low the rest is, and whatever scaling makes of it."""
    scores = torch.full((1, 1, 50, 41), torch.finfo(dtype).min, dtype=dtype, device=device)
    scores[:, :, 30] = -math.inf
    probs = window_softmax(scores, 20, scale=scale).float()
    sums = probs.sum(-1)[0, 0]
    assert not sums[30] and not probs[0, 0, 30].any()
    torch.testing.assert_close(sums[:30], torch.ones_like(sums[:30]), rtol=0.02, atol=0)
    torch.testing.assert_close(probs[0, 0, 25, :20], probs[0, 0, 25, :1].expand(20), rtol=0, atol=0)


@pytest.mark.parametrize("window_size", [True, 2.0, "2", None, torch.tensor(2.0), torch.tensor([True]), [2.5]])
def test_windows_of_another_type(window_size: object):
    x = torch.zeros(2, 2, 8, 4)
    for call in (
        lambda: window_matmul(x, x.mT, window_size),
        lambda: unwindow_matmul(torch.zeros(2, 2, 8, 5), x, window_size),
        lambda: window_softmax(torch.zeros(2, 2, 8, 5), window_size),
    ):
        with pytest.raises(TypeError, match="window_size is .* integer"):
            call()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: window_matmul(x, x.mT, -1), "window_size is -1; it has to be 0 or more"),
        (lambda x: window_matmul(x, x.mT, 2**30), r"window_size is 1073741824; of a band it has to be below 2\*\*30"),
        (lambda x: unwindow_matmul(x, x, 10**30), r"of a band it has to be below 2\*\*30"),
        (lambda x: window_softmax(x, np.int32(2**31 - 1)), r"it has to be \(..., T, 4294967295\)"),
        (lambda x: window_matmul(x, x.mT, [2, 1]), "has 2 numbers, and the band has one width; .*window_softmax"),
        (lambda x: window_matmul(x, x.mT, []), "window_size has 0 numbers; give one"),
        (lambda x: window_matmul(x, x, 2), r"a \(2, 3, 8, 4\), b \(2, 3, 8, 4\); they have to be \(..., T, D\) and"),
        (lambda x: window_matmul(x, x.mT[..., :7], 2), "with the same T and D"),
        (lambda x: window_matmul(x[0, 0, 0], x.mT, 2), r"a \(4,\)"),
        (lambda x: window_matmul(x, x.mT[:, :2], 2), "all but the last two dimensions have to broadcast"),
        (lambda x: window_matmul(x, x.mT.half(), 2), "b is torch.float16 and a torch.float32"),
        (lambda x: window_matmul(x, x.mT.to("meta"), 2), "b is on meta and a on cpu"),
        (lambda x: window_matmul(x.long(), x.mT.long(), 2), "Tensors are torch.int64"),
        (lambda x: unwindow_matmul(x, x, 2), r"with window_size 2 they have to be \(..., T, 5\) and \(..., T, D\)"),
        (lambda x: unwindow_matmul(torch.zeros(7, 5), x, 2), "with the same T"),
        (lambda x: unwindow_matmul(torch.zeros(2, 2, 8, 5), x, 2), "have to broadcast"),
        (lambda x: window_softmax(x, 2), r"scores has shape \(2, 3, 8, 4\); .* it has to be \(..., T, 5\)"),
        (lambda x: window_softmax(torch.zeros(2, 3, 8, 5), (2, 1)), "window_size has 2 numbers; give one, or 3, one a"),
        (lambda x: window_softmax(torch.zeros(8, 5), (2, 1)), r"it has to be \(B, H, T, 2 \* window_size \+ 1\)"),
        (lambda x: window_softmax(torch.zeros(8, 5), 2, key_padding_mask=torch.ones(1, 8)), "with a key_padding_mask"),
        (
            lambda x: window_softmax(torch.zeros(2, 3, 8, 5), 2, key_padding_mask=torch.ones(3, 8)),
            r"key_padding_mask has shape \(3, 8\); it has to be \(2, 8\)",
        ),
        (
            lambda x: window_softmax(torch.zeros(2, 3, 8, 5), 2, key_padding_mask=torch.ones(2, 8, requires_grad=True)),
            "key_padding_mask requires a gradient",
        ),
        (
            lambda x: window_softmax(torch.zeros(2, 3, 8, 5), 2, key_padding_mask=torch.ones(2, 8, device="meta")),
            "key_padding_mask is on meta and scores on cpu",
        ),
        (lambda x: window_softmax(torch.zeros(8, 5).long(), 2), "Tensors are torch.int64"),
    ],
)
def test_arguments_that_do_not_fit(call, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        call(torch.zeros(2, 3, 8, 4))


def test_a_band_that_no_memory_holds_gets_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 64 << 30)
    x = torch.zeros(1, 2, 32, 8)
    with pytest.raises(
        MemoryError, match="With window_size 536870912 a band of 1073741825 numbers for each of 32 tokens"
    ):
        window_matmul(x, x.mT, 2**29)


def test_numbers_of_numpy_are_numbers():
    x = torch.randn(1, 2, 8, 4, generator=seeded())
    band = window_matmul(x, x.mT, 2)
    for window in (np.int64(2), np.uint8(2), [np.int32(2)], torch.tensor(2)):
        assert torch.equal(window_matmul(x, x.mT, window), band)
        assert torch.equal(unwindow_matmul(band, x, window), unwindow_matmul(band, x, 2))
        assert torch.equal(window_softmax(band, window), window_softmax(band, 2))


def test_softmax_of_no_sequence_takes_a_mask_that_is_repeated(device: str):
    scores = torch.randn(0, 2, 20, 7, device=device)
    mask = torch.ones(0, 1, device=device).expand(0, 20)
    assert window_softmax(scores, 3, key_padding_mask=mask).shape == scores.shape
