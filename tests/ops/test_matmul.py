"""MatMul against the float64 reference: values, gradients, errors, and what torch expects of an operator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers import (
    DTYPES,
    EXAMPLES,
    NEEDS_COMPILER,
    OPERAND_VIEWS,
    Layout,
    as_on_hopper,
    as_view,
    assert_as_accurate,
    generator,
    gradients,
    implementation_on,
    is_hopper,
    layouts,
    leaf,
    make_layout,
    needs_gpu_memory,
    oracle_matmul,
    poisoned_memory,
    random,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st
from ops_parameters import GRAPH_DTYPES

from ds_sparse.dispatch import tile_heights
from ds_sparse.index import BlockIndex
from ds_sparse.ops import MatMul, Softmax
from ds_sparse.sparsity import BSLongformerSparsityConfig

MODES = ("sdd", "dsd", "dds")
TRANSPOSITIONS = [(False, False), (True, False), (False, True), (True, True)]
OPERATORS = ("matmul_sdd", "matmul_dsd")

DIAGONAL = make_layout(torch.eye(2, dtype=torch.bool))


@dataclass(frozen=True)
class Case:
    """A product: operands in float64, and how the operation is called."""

    layout: Layout
    block: int
    mode: str
    trans_a: bool
    trans_b: bool
    heads: int
    a: torch.Tensor
    b: torch.Tensor

    def oracle(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return oracle_matmul(a, b, self.layout, self.block, self.mode, self.trans_a, self.trans_b, self.heads)

    @property
    def operation(self) -> MatMul:
        return MatMul(self.layout.given, self.block, self.mode, self.trans_a, self.trans_b)


def make_case(
    layout: Layout, block: int, mode: str, trans_a: bool, trans_b: bool, rng: torch.Generator,
    heads: int = 0, width: int = 24, batches: tuple[int, int] = (2, 2), dense_heads: int = 0,
) -> Case:  # fmt: skip
    """Operands that fit: `width` is the inner size of sdd, the outer one of dsd and dds; 0 heads are the layout's.

    `dense_heads` are those of the dense operand, of sdd's first one.
    """
    heads = heads or layout.heads
    if mode != "sdd" and dense_heads == layout.heads == 1 and not layout.live.any():
        heads = 1  # Neither operand tells of more.
    dense_heads = dense_heads or heads
    rows, columns = layout.rows * block, layout.columns * block

    def dense(batch: int, left: int, right: int, transposed: bool, heads: int = dense_heads) -> torch.Tensor:
        return random(rng, batch, heads, *((right, left) if transposed else (left, right)))

    def sparse(batch: int) -> torch.Tensor:
        return random(rng, batch, layout.num_values(heads), block, block)

    if mode == "sdd":
        a, b = dense(batches[0], rows, width, trans_a), dense(batches[1], width, columns, trans_b, heads)
    elif mode == "dsd":
        a, b = sparse(batches[0]), dense(batches[1], rows if trans_a else columns, width, trans_b)
    else:
        a, b = dense(batches[0], width, columns if trans_b else rows, trans_a), sparse(batches[1])
    return Case(layout, block, mode, trans_a, trans_b, heads, a, b)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts(max_side=3))
    return make_case(
        layout,
        block=draw(st.sampled_from((8, 16, 32, 64))),
        mode=draw(st.sampled_from(MODES)),
        trans_a=draw(st.booleans()),
        trans_b=draw(st.booleans()),
        rng=generator(draw),
        heads=draw(st.integers(1, 3)) if layout.heads == 1 else 0,
        width=draw(st.sampled_from((1, 3, 8, 17, 64, 65, 130))),
        batches=draw(st.sampled_from(((1, 1), (2, 2), (3, 3), (1, 2), (3, 1)))),
        dense_heads=draw(st.sampled_from((0, 0, 1))),
    )


def check(case: Case, dtype: torch.dtype, device: str, views: tuple[str, str, str], wanted: tuple[bool, bool]) -> None:
    a, b = as_view(case.a.to(dtype), views[0]), as_view(case.b.to(dtype), views[1])
    plain = [leaf(x, "cpu", want) for x, want in zip((a, b), wanted, strict=True)]
    exact = [leaf(x.double(), "cpu", want) for x, want in zip((a, b), wanted, strict=True)]
    ours = [leaf(x, device, want) for x, want in zip((a, b), wanted, strict=True)]
    plain_result, exact_result = case.oracle(*plain), case.oracle(*exact)
    grad = as_view(random(seeded(), *exact_result.shape, dtype=dtype), views[2])
    before = [x.detach().clone() for x in (*ours, grad)]
    grad_here = leaf(grad, device, requires_grad=False)
    with poisoned_memory():
        result = case.operation(*ours)
        found = gradients(result, ours, grad_here)
    assert_as_accurate("result", result, plain_result, exact_result)
    names = [name for name, want in zip("ab", wanted, strict=True) if want]
    for name, x, y, z in zip(
        names, found, gradients(plain_result, plain, grad), gradients(exact_result, exact, grad.double()), strict=True
    ):
        assert_as_accurate(f"gradient of {name}", x, y, z)
    for x, y in zip((*ours, grad_here), before, strict=True):
        assert torch.equal(x.cpu(), y.cpu()), "an input was overwritten"


@EXAMPLES
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    views=st.tuples(*[st.sampled_from(OPERAND_VIEWS)] * 3),
    wanted=st.sampled_from(((True, True), (True, False), (False, True))),
)
def test_result_and_gradients(
    device: str, case: Case, dtype: torch.dtype, views: tuple[str, str, str], wanted: tuple[bool, bool]
):
    check(case, dtype, device, views, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("trans_a", "trans_b"), TRANSPOSITIONS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_transposition_and_dtype(device: str, mode: str, trans_a: bool, trans_b: bool, dtype: torch.dtype):
    """Among them what was wrong in DeepSpeed: the gradients of sdd with trans_a and of dsd with trans_b, and bf16."""
    layout = make_layout(
        torch.tensor([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]]), torch.int64
    )
    case = make_case(layout, 16, mode, trans_a, trans_b, seeded(), width=40)
    check(case, dtype, device, ("contiguous",) * 3, (True, True))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [8, 48, 64, 72, 128])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_query_and_key_of_one_projection(device: str, block: int, width: int, heads: int, batch: int):
    """Heads and tokens lie apart by numbers that have little in common."""
    blocks = (256 if device == "cpu" else 512) // block
    layout = make_layout(torch.rand(heads, blocks, blocks, generator=seeded()) < 0.4)
    case = make_case(layout, block, "sdd", False, True, seeded(), width=width, batches=(batch, batch))
    check(case, torch.bfloat16, device, ("packed", "packed", "contiguous"), (True, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "rows", "columns", "width"), [(16, 18, 21, 72), (32, 9, 11, 40), (64, 7, 9, 72)])
@pytest.mark.parametrize("mode", MODES)
def test_lines_of_every_length(
    device: str, mode: str, block: int, rows: int, columns: int, width: int, dtype: torch.dtype
):
    """Full, long, short and empty rows and columns: lists are cut within lines, between them and at their ends."""
    check_lines_of_every_length(lines_of_every_length(rows, columns), device, mode, block, width, dtype)


@pytest.mark.slow_on_cpu("its lists are never cut, and lines of every length are another test's")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block", "rows", "columns", "width"),
    [(16, 78, 75, 72), (32, 39, 37, 64), (64, 19, 21, 64), (64, 19, 21, 72), (128, 13, 12, 40), (128, 13, 12, 128)],
)
@pytest.mark.parametrize("mode", MODES)
def test_tiles_that_are_cut(
    device: str, mode: str, block: int, rows: int, columns: int, width: int, dtype: torch.dtype
):
    """Lists of more than 1,024 tokens, below which those of tiles stay whole; only these dtypes walk tiles."""
    live = lines_of_every_length(rows, columns, 0.05 if block == 16 else 0.1)
    assert_cut(live, block)
    check_lines_of_every_length(live, device, mode, block, width, dtype)


def lines_of_every_length(rows: int, columns: int, density: float = 0.1) -> torch.Tensor:
    """A layout of two heads."""
    live = torch.rand(2, rows, columns, generator=seeded()) < density
    live[0, 3] = live[1, -1] = live[0, :, 2] = live[1, :, -1] = True
    live[0, 4:6] = live[1, 0] = live[:, :, 5] = False
    return live


def assert_cut(layout: torch.Tensor, block: int) -> None:
    """That lists of tiles are cut, from both sides, on a Hopper GPU."""
    with as_on_hopper():
        index = BlockIndex.build(layout, block)
    assert all(len(index.tiles(side, 128).cuts) > 0 for side in ("rows", "columns"))


@pytest.mark.parametrize(("block", "blocks", "width"), [(16, 72, 64), (16, 72, 72), (32, 36, 64), (64, 18, 72)])
@pytest.mark.parametrize("mode", MODES)
def test_long_lines_among_short_ones(device: str, mode: str, block: int, blocks: int, width: int):
    """Parts of tiles that are cut for the sake of one line, in most of which the others have nothing."""
    live = torch.eye(blocks, dtype=torch.bool)
    live[1] = live[:, 2] = True
    assert_cut(live[None], block)
    case = make_case(make_layout(live), block, mode, False, mode == "sdd", seeded(), heads=2, width=width)
    check(case, torch.bfloat16, device, ("contiguous",) * 3, (True, True))


def check_lines_of_every_length(
    live: torch.Tensor, device: str, mode: str, block: int, width: int, dtype: torch.dtype
) -> None:
    for layout in (live, live[0]):
        case = make_case(make_layout(layout), block, mode, False, mode == "sdd", seeded(), heads=2, width=width)
        check(case, dtype, device, ("contiguous",) * 3, (True, True))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_the_same_bits_every_time(device: str, block: int):
    blocks = max(40, 1280 // block)
    layout = torch.rand(12, blocks, blocks, generator=seeded()) < 0.05
    layout[:, 0] = layout[:, :, 0] = True
    assert_cut(layout, block)
    a = torch.randn(2, 12, blocks * block, 64, generator=seeded()).to(device, torch.bfloat16)
    sdd, dsd = MatMul(layout, block, "sdd", trans_b=True), MatMul(layout, block, "dsd", trans_a=True)
    first = dsd(sdd(a, a), a)
    for _ in range(5):
        assert torch.equal(dsd(sdd(a, a), a), first)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "width"), [(16, 128), (64, 64), (128, 64)])
def test_the_same_bits_while_memory_is_busy(device: str, block: int, width: int):
    """Stores hold up what warps read of operands: once the copy engine overtook it, in 5, 12 and 4 of 40 calls."""
    if device == "cpu":
        pytest.skip("the same bits with any number of threads are another test's")
    layout = BSLongformerSparsityConfig(1, block, num_sliding_window_blocks=9).make_layout(4096)
    sdd = MatMul(layout, block, "sdd", trans_b=True)
    a = torch.randn(4, 12, 4096, width, generator=seeded()).to(device, torch.bfloat16)
    first = sdd(a, a)
    for _ in range(60):
        assert torch.equal(sdd(a, a), first)


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "blocks", "density"), [(16, 45, 0.6), (32, 45, 0.6), (64, 37, 0.7), (128, 35, 0.9)])
def test_units_of_many_entries(device: str, block: int, blocks: int, density: float):
    """More than a warp of sdd has at once."""
    if device == "cpu":
        pytest.skip("units are those of kernels for Hopper")
    live = torch.rand(1, blocks, blocks, generator=seeded()) < density
    if not is_hopper(device):
        pytest.skip("not a Hopper GPU")
    index = BlockIndex.build(live.to(device), block)
    (tile,) = tile_heights("sdd", index.device, block)
    assert index.tiles("rows", tile).units[:, 2].max() > 32
    case = make_case(make_layout(live), block, "sdd", False, True, seeded(), heads=2, width=64)
    check(case, torch.bfloat16, device, ("contiguous",) * 3, (True, True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 16, 8), (1, 2, 4096, 64), (2, 1, 48, 128), (1, 1, 32, 24)])
def test_copies_have_the_numbers_of_a_token_adjacent(device: str, shape: tuple[int, ...], dtype: torch.dtype):
    if device == "cpu":
        pytest.skip("an operator of CUDA alone")
    batch, heads, tokens, width = shape
    whole = random(seeded(), batch, heads, width, 2 * tokens + 8, dtype=dtype).to(device)
    forms = {
        "tokens adjacent": whole[..., :tokens].contiguous().mT,
        "of longer rows": whole[..., 8 : tokens + 8].mT,
        "not aligned": whole[..., 3 : tokens + 3].mT,
        "every other token": whole[..., : 2 * tokens : 2].mT,
        "heads outside": whole[..., :tokens].transpose(0, 1).contiguous().transpose(0, 1).mT,
    }
    for form, x in forms.items():
        copied = torch.ops.ds_sparse.transpose(x)
        assert copied.is_contiguous() and torch.equal(copied, x), form
    torch.library.opcheck(torch.ops.ds_sparse.transpose.default, (forms["tokens adjacent"],))
    with pytest.raises(RuntimeError, match="x has to have 16 bits a number"):
        torch.ops.ds_sparse.transpose(forms["tokens adjacent"].float())


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("block", "width"), [(16, 8), (16, 72), (32, 64), (32, 128), (64, 64), (64, 128), (128, 64)])
def test_each_of_many_matrices_is_as_by_itself(device: str, block: int, width: int, heads: int, trans: bool):
    """On a GPU a thread block comes to many matrices, to more units than are asked for together."""
    layout = torch.rand(heads, 9, 9, generator=seeded()) < 0.3
    layout[:, 4] = layout[:, :, 2] = False
    batch = 8 if device == "cpu" else 96_000 // (2 * block)
    a = torch.randn(batch, 2, 9 * block, width, generator=seeded()).to(device, torch.bfloat16)
    sdd, dsd = MatMul(layout, block, "sdd", trans_b=True), MatMul(layout, block, "dsd", trans_a=trans)
    values = sdd(a, a)
    result = dsd(values, a)
    for i in (0, 1, batch // 2, batch - 1):
        assert torch.equal(sdd(a[i : i + 1], a[i : i + 1]), values[i : i + 1])
        assert torch.equal(dsd(values[i : i + 1], a[i : i + 1]), result[i : i + 1])


@pytest.mark.gpu
def test_fp32_is_precise_unless_tf32_is_allowed(device: str, monkeypatch: pytest.MonkeyPatch):
    if device == "cpu":
        pytest.skip("TF32 is a format of GPUs")
    a, b = (
        torch.randn(1, 1, 64, 512, generator=generator_, dtype=torch.float64) for generator_ in (seeded(1), seeded(2))
    )
    product = MatMul(torch.ones(1, 1, dtype=torch.bool), 64, "sdd", trans_b=True)
    exact = (a @ b.mT).flatten()

    def error() -> float:
        return (product(a.float().to(device), b.float().to(device)).cpu().flatten() - exact).abs().max().item()

    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert error() < 4 * (a.float() @ b.float().mT - a @ b.mT).abs().max().item()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert 1e-3 < error() < 0.3


@pytest.mark.gpu
def test_more_elements_than_int32_counts(device: str):
    """The last blocks of sparse values, and the last rows of a dense operand, of more than 2^31 elements."""
    needs_gpu_memory(device, 32)
    layout = torch.ones(1, 64, 64, dtype=torch.bool)
    a = torch.randn(33, 1, 8192, 16, device=device, dtype=torch.float16)
    values = MatMul(layout, 128, "sdd", trans_b=True)(a, a)
    assert values.numel() > 2**31
    torch.testing.assert_close(values[-1, -1], a[-1, 0, -128:] @ a[-1, 0, -128:].T)
    result = MatMul(layout, 128, "dsd")(values, a)
    torch.testing.assert_close(result[-1, 0, -128:], (a[-1, 0, -128:] @ a[-1, 0].T) @ a[-1, 0], rtol=1e-2, atol=1)
    del values, result
    wide = torch.randn(1, 1, 2**17, 2**14 + 128, device=device, dtype=torch.float16)
    diagonal = torch.eye(2**10, dtype=torch.bool)
    values = MatMul(diagonal, 128, "sdd", trans_b=True)(wide, wide)
    torch.testing.assert_close(values[0, -1], wide[0, 0, -128:] @ wide[0, 0, -128:].T, rtol=1e-2, atol=1)
    result = MatMul(diagonal, 128, "dsd")(values[:, :, :128], wide)
    torch.testing.assert_close(result[0, 0, -128:, -64:], values[0, -1] @ wide[0, 0, -128:, -64:], rtol=1e-2, atol=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 72])
@pytest.mark.parametrize("mode", MODES)
def test_block_128(device: str, mode: str, width: int, dtype: torch.dtype):
    layout = make_layout(torch.tensor([[1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]]))
    check(
        make_case(layout, 128, mode, False, True, seeded(), heads=2, width=width),
        dtype,
        device,
        ("contiguous",) * 3,
        (True, True),
    )


@pytest.mark.parametrize("mode", MODES)
def test_sums_longer_than_a_half_can_count(device: str, mode: str):
    """4096 ones: a sum kept in fp16 or bf16 stops growing on the way, one kept in fp32 is exact."""
    layout, block = torch.ones(1 if mode == "sdd" else 32, 1 if mode == "sdd" else 32, dtype=torch.bool), 128
    for dtype in (torch.float16, torch.bfloat16):
        one = torch.ones((), dtype=dtype, device=device)
        if mode == "sdd":
            result = MatMul(layout, block, mode)(one.expand(1, 1, block, 4096), one.expand(1, 1, 4096, block))
        elif mode == "dsd":
            result = MatMul(layout, block, mode)(one.expand(1, 1024, block, block), one.expand(1, 1, 4096, 8))
        else:
            result = MatMul(layout, block, mode)(one.expand(1, 1, 8, 4096), one.expand(1, 1024, block, block))
        assert (result == 4096).all()


@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize("trans", [False, True])
def test_rows_without_blocks_are_zeros_with_zero_gradient(device: str, mode: str, trans: bool):
    layout = make_layout(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0]]))
    case = make_case(layout, 16, mode, trans and mode == "dsd", trans and mode == "dds", seeded())
    a, b = leaf(case.a, device), leaf(case.b, device)
    with poisoned_memory():
        result = case.operation(a, b)
        grad_a, grad_b = torch.autograd.grad(result.sum(), (a, b))
    grad_dense = (grad_b if mode == "dsd" else grad_a.mT).unflatten(2, (3, 16))
    result = (result if mode == "dsd" else result.mT).unflatten(2, (3, 16))
    # Of S: block row 1 and block column 2 are empty. dds multiplies by S from the right.
    uses_columns = trans == (mode == "dsd")
    empty_result, empty_grad = (2, 1) if uses_columns else (1, 2)
    for x, empty in ((result, empty_result), (grad_dense, empty_grad)):
        assert not x[:, :, empty].any()
        assert x[:, :, 0].any()


@pytest.mark.parametrize("mode", MODES)
def test_layout_without_a_live_block(device: str, mode: str):
    case = make_case(make_layout(torch.zeros(2, 3, 2, dtype=torch.bool)), 16, mode, False, False, seeded())
    a, b = leaf(case.a, device), leaf(case.b, device)
    with poisoned_memory():
        result = case.operation(a, b)
        found = torch.autograd.grad(result.sum(), (a, b))
    assert result.shape == case.oracle(case.a, case.b).shape
    assert not result.any()
    for grad, x in zip(found, (a, b), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("given_as", [torch.bool, torch.int64, torch.int32, torch.uint8, "2-D", "BlockIndex"], ids=str)
def test_every_form_of_a_layout_gives_the_same_bits(device: str, given_as: object):
    case = make_case(make_layout(torch.tensor([[1, 0], [1, 1]])), 16, "sdd", False, False, seeded(), heads=3)
    live = case.layout.live
    form = (
        live[0] if given_as == "2-D" else BlockIndex.build(live, 16) if given_as == "BlockIndex" else live.to(given_as)
    )
    a, b = case.a.to(device), case.b.to(device)
    assert torch.equal(MatMul(form, 16, "sdd")(a, b), MatMul(live.repeat(3, 1, 1), 16, "sdd")(a, b))


@pytest.mark.parametrize(
    ("mode", "a", "b", "expected"),
    [
        ("sdd", (32, 5), (5, 32), (2, 16, 16)),
        ("sdd", (1, 32, 5), (5, 32), (2, 16, 16)),
        ("sdd", (3, 32, 5), (5, 32), (6, 16, 16)),
        ("sdd", (2, 3, 32, 5), (5, 32), (2, 6, 16, 16)),
        ("sdd", (1, 1, 32, 5), (5, 32), (1, 2, 16, 16)),
        ("dsd", (2, 16, 16), (32, 5), (32, 5)),
        ("dsd", (6, 16, 16), (3, 32, 5), (3, 32, 5)),
        ("dsd", (2, 2, 16, 16), (32, 5), (2, 1, 32, 5)),
        ("dds", (5, 32), (2, 16, 16), (5, 32)),
        ("dds", (3, 5, 32), (6, 16, 16), (3, 5, 32)),
        ("dds", (2, 1, 5, 32), (2, 16, 16), (2, 1, 5, 32)),
    ],
)
def test_operands_of_fewer_dimensions(
    device: str, mode: str, a: tuple[int, ...], b: tuple[int, ...], expected: tuple[int, ...]
):
    """Missing leading dimensions are 1 and are squeezed from the result where they are still 1, as DeepSpeed did."""
    operation = MatMul(DIAGONAL.given, 16, mode)
    rng = seeded()
    a, b = random(rng, *a).to(device), random(rng, *b).to(device)
    result = operation(a, b)
    added = 4 - max(a.dim(), b.dim())
    full = operation(a.reshape((1,) * (4 - a.dim()) + a.shape), b.reshape((1,) * (4 - b.dim()) + b.shape))
    for _ in range(added):
        full = full.squeeze(0)
    assert torch.equal(result, full)
    if mode != "sdd" and max(len(a.shape), len(b.shape)) == 3 and expected[0] not in (2, 3, 6):
        expected = result.shape
    assert result.shape == expected


def test_gradcheck(device: str):
    layout = make_layout(torch.tensor([[[1, 0], [1, 1]], [[0, 1], [0, 0]]]))
    for mode in MODES:
        for trans_a, trans_b in TRANSPOSITIONS:
            case = make_case(layout, 8, mode, trans_a, trans_b, seeded(), width=3, batches=(2, 1))
            a, b = leaf(case.a, device), leaf(case.b, device)
            assert torch.autograd.gradcheck(case.operation, (a, b), fast_mode=True)


def raw_arguments(device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    layout = make_layout(torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 0, 0], [1, 1, 0]]]))
    index = BlockIndex.build(layout.given, 16).to(device)
    rng = seeded()
    a, b = random(rng, 2, 2, 32, 8, dtype=dtype).to(device), random(rng, 2, 2, 48, 8, dtype=dtype).to(device)
    values = random(rng, 2, layout.num_values(2), 16, 16, dtype=dtype).to(device)
    name = "hopper" if is_hopper(device) and dtype == torch.bfloat16 else implementation_on(device)

    def tiles_of(side: str, tile: int) -> tuple[torch.Tensor | None, ...]:
        if name != "hopper":
            return (None,) * 5
        tiles = index.tiles(side, tile)
        return tiles.lines, tiles.entries, tiles.units, tiles.cuts, index.lists.slots[side, tile]

    rows = (index.row_offsets, index.row_columns, None, *tiles_of("rows", 128))
    columns = (index.column_offsets, index.column_rows, index.column_slots, *tiles_of("columns", 128))
    lines, entries, units, _, slots = tiles_of("rows", 64)
    sdd = (a, b.transpose(2, 3), index.row_offsets, index.row_columns, lines, entries, units, slots)
    return {
        "matmul_sdd": [(*sdd, index.layout_heads, 16, False, name)],
        "matmul_dsd": [
            (values, dense, *lists, index.layout_heads, 16, transpose, False, name)
            for dense, lists in ((b, rows), (a, columns))
            for transpose in (False, True)
        ],
    }


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device: str, operator: str, dtype: torch.dtype):
    for arguments in raw_arguments(device, dtype)[operator]:
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments)


def forward_and_backward(operation: MatMul, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    result = operation(a, b)
    return [result, *torch.autograd.grad(result.square().sum(), (a, b))]


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_compiles_into_one_graph(device: str, mode: str, dtype: torch.dtype):
    case = make_case(DIAGONAL, 16, mode, True, True, seeded(), heads=2)
    a, b = leaf(case.a.to(dtype), device), leaf(case.b.to(dtype), device)
    operation = MatMul(BlockIndex.build(case.layout.given, 16).to(device), 16, mode, True, True)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    result = compiled(a, b)
    found = [result, *torch.autograd.grad(result.square().sum(), (a, b))]
    for x, y in zip(found, forward_and_backward(operation, a, b), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
def test_captured_in_a_cuda_graph(device: str, block: int):
    if device == "cpu":
        pytest.skip("CUDA graphs are for GPUs")
    layout = torch.eye(2048 // block, dtype=torch.bool)
    layout[3] = True  # a line that is cut
    sdd, dsd = MatMul(layout, block, "sdd", trans_b=True), MatMul(layout, block, "dsd")
    softmax = Softmax(layout, block)
    a = torch.randn(1, 2, 2048, 64, generator=seeded()).to(device, torch.bfloat16)
    dsd(softmax(sdd(a, a)), a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = sdd(a, a)
        probs = softmax(values)
        result = dsd(probs, a)
    a.copy_(torch.randn(1, 2, 2048, 64, generator=seeded(1)))
    for _ in range(2):
        graph.replay()
        assert torch.equal(values, sdd(a, a))
        assert torch.equal(probs, softmax(values)) and torch.equal(result, dsd(probs, a))


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
def test_compiles_with_inductor(device: str, dtype: torch.dtype):
    case = make_case(DIAGONAL, 16, "sdd", False, True, seeded(), heads=2)
    a, b = leaf(case.a.to(dtype), device), leaf(case.b.to(dtype), device)
    operation = MatMul(BlockIndex.build(case.layout.given, 16).to(device), 16, "sdd", False, True)
    compiled = torch.compile(lambda a, b: operation(a, b) * 2, fullgraph=True)
    found = torch.autograd.grad(compiled(a, b).square().sum(), (a, b))
    expected = torch.autograd.grad((operation(a, b) * 2).square().sum(), (a, b))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_every_time_and_with_any_number_of_threads(device: str, mode: str):
    layout = make_layout(torch.rand(2, 6, 6, generator=seeded()) < 0.5)
    case = make_case(layout, 32, mode, False, False, seeded(), width=72)
    a, b = leaf(case.a.float(), device), leaf(case.b.float(), device)
    first = forward_and_backward(case.operation, a, b)
    threads = torch.get_num_threads()
    try:
        for number in (threads, 1, 2, 3):
            torch.set_num_threads(number)
            for x, y in zip(first, forward_and_backward(case.operation, a, b), strict=True):
                assert torch.equal(x, y), f"{number} threads"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_casts_both_operands(device: str, mode: str):
    case = make_case(DIAGONAL, 16, mode, False, False, seeded())
    a, b = leaf(case.a.float(), device), leaf(case.b.half(), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        result = case.operation(a, b)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, case.operation(a.bfloat16(), b.bfloat16()))
    grad_a, grad_b = torch.autograd.grad(result.float().square().sum(), (a, b))
    assert (grad_a.dtype, grad_b.dtype) == (torch.float32, torch.float16)
    assert grad_a.any() and grad_b.any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(device: str, use_reentrant: bool):
    case = make_case(DIAGONAL, 16, "dsd", False, False, seeded())
    a, b = leaf(case.a.float(), device), leaf(case.b.float(), device)
    result = torch.utils.checkpoint.checkpoint(case.operation, a, b, use_reentrant=use_reentrant)
    found = torch.autograd.grad(result.square().sum(), (a, b)) if not use_reentrant else backward(result, a, b)
    for x, y in zip(found, forward_and_backward(case.operation, a, b)[1:], strict=True):
        assert torch.equal(x, y)


def backward(result: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    result.square().sum().backward()
    return [x.grad for x in leaves]


@pytest.mark.parametrize("mode", MODES)
def test_meta_tensors_give_shapes(mode: str):
    case = make_case(make_layout(torch.tensor([[1, 0], [1, 1]])), 16, mode, False, True, seeded(), heads=2)
    result = case.operation(case.a.to("meta"), case.b.to("meta"))
    assert result.device.type == "meta"
    assert result.shape == case.oracle(case.a, case.b).shape


@pytest.mark.parametrize("mode", MODES)
def test_nan_reaches_what_depends_on_it_and_nothing_else(device: str, mode: str):
    case = make_case(DIAGONAL, 16, mode, False, False, seeded())
    a, b = case.a.float(), case.b.float()
    a[0, 0, 0, 0] = float("nan")
    nan = case.operation(a.to(device), b.to(device)).isnan().cpu()
    expected = case.oracle(a, b).isnan()
    if mode == "dds":
        # Dense zeros times NaN are NaN too; blocks that do not exist are not multiplied.
        expected[:, :, :, 16:] = False
    assert torch.equal(nan, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize(("block", "rows", "columns"), [(16, 9, 7), (16, 5, 150), (32, 5, 6), (64, 3, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dense_operand_that_is_not_finite_reaches_those_who_have_its_block(
    device: str, dtype: torch.dtype, block: int, rows: int, columns: int, mode: str, transposed: bool
):
    live = torch.rand(rows, columns, generator=seeded(3)) < 0.4
    live[0] = True  # a list that is cut, where it is long
    case = make_case(
        make_layout(live), block, mode, transposed and mode == "dsd", transposed and mode == "dds", seeded(), heads=2
    )
    a, b = (x.to(device, dtype) for x in (case.a, case.b))
    # By tokens: those that are summed over, and those of the result, with the blocks that these see.
    operand, by_tokens = (b[0, 1], lambda x: x) if mode == "dsd" else (a[0, 1].mT, lambda x: x.mT)
    seen = live.mT if transposed == (mode == "dsd") else live
    operand[[5, block + 2], :9] = 0
    expected = by_tokens(case.operation(a, b))
    for tokens, blocks in zip(expected[0, 1].split(block), seen, strict=True):
        tokens[:, :9] += float("nan") if blocks[:2].any() else 0
    operand[[5, block + 2], :9] = float("nan")
    result = by_tokens(case.operation(a, b))
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-3, equal_nan=True)


def operands(mode: str = "sdd", **overrides: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    case = make_case(DIAGONAL, 16, mode, False, False, seeded())
    return overrides.get("a", case.a), overrides.get("b", case.b)


@pytest.mark.parametrize(
    ("mode", "change", "sentence"),
    [
        ("sdd", {"b": torch.zeros(2, 1, 24, 32)}, "same dtype; got torch.float64 for A and torch.float32 for B"),
        ("sdd", {"b": torch.zeros(2, 1, 24, 32, device="meta").double()}, "same device; got cpu for tensor A and meta"),
        ("sdd", {"a": torch.zeros(1, 2, 1, 32, 24).double()}, "more than 4 dimensions are not currently supported"),
        ("sdd", {"b": torch.zeros(24).double()}, "nor with fewer than 2; tensor B has 1"),
        ("sdd", {"b": torch.zeros(2, 1, 25, 32).double()}, r"the -1 dim \(24\) must match .* the -2 dim \(25\)"),
        ("sdd", {"a": torch.zeros(2, 1, 48, 24).double()}, "48 rows, and the layout 2 block rows of 16, which is 32"),
        ("sdd", {"b": torch.zeros(2, 1, 24, 16).double()}, "16 columns, and the layout 2 block columns of 16"),
        ("sdd", {"a": torch.zeros(3, 1, 32, 24).double()}, "Tensor B has batch 2"),
        (
            "sdd", {"a": torch.zeros(2, 2, 32, 24).double(), "b": torch.zeros(2, 3, 24, 32).double()},
            "Tensor A has batch 2 and 2 heads",
        ),
        ("dsd", {"b": torch.zeros(2, 1, 48, 5).double()}, "Expected tensor B to have size 32 at dim 2, got 48"),
        ("dsd", {"a": torch.zeros(2, 3, 16, 16).double()}, r"shape \(2, 16, 16\) for argument A, got \(3, 16, 16\)"),
        ("dsd", {"a": torch.zeros(2, 2, 8, 16).double()}, r"for argument A, got \(2, 8, 16\)"),
        ("dsd", {"a": torch.zeros(3, 2, 16, 16).double()}, "batch"),
        ("dsd", {"b": torch.zeros(3, 1, 32, 5).double()}, "Tensor A has batch 2 and tensor B 3"),
        ("dds", {"a": torch.zeros(2, 1, 5, 48).double()}, "Expected tensor A to have size 32 at dim 3, got 48"),
        ("dds", {"b": torch.zeros(2, 1, 16, 16).double()}, r"for argument B, got \(1, 16, 16\)"),
        ("dds", {"a": torch.zeros(3, 1, 5, 32).double()}, "Tensor B has batch 2 and tensor A 3"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(mode: str, change: dict[str, torch.Tensor], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        MatMul(DIAGONAL.given, 16, mode)(*operands(mode, **change))


@pytest.mark.parametrize(
    ("trans", "shape", "sentence"),
    [
        (True, (2, 1, 5, 48), "Expected tensor B to have size 32 at dim 3, got 48"),
        (False, (2, 1, 48, 5), "Expected tensor B to have size 32 at dim 2, got 48"),
    ],
)
def test_the_dimension_in_the_sentence_is_the_one_that_was_given(trans: bool, shape: tuple[int, ...], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        MatMul(DIAGONAL.given, 16, "dsd", trans_b=trans)(torch.zeros(2, 2, 16, 16), torch.zeros(shape))


def test_heads_other_than_the_layouts():
    layout = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]]])
    with pytest.raises(ValueError, match="3 heads and the layout 2"):
        MatMul(layout, 16, "sdd")(torch.zeros(1, 3, 32, 4), torch.zeros(1, 3, 4, 32))
    with pytest.raises(ValueError, match="3 heads and the layout 2"):
        MatMul(layout, 16, "dsd")(torch.zeros(1, 5, 16, 16), torch.zeros(1, 3, 32, 4))


@pytest.mark.parametrize("mode", ["ddd", "SDD", "", None])
def test_mode_is_one_of_three(mode: object):
    with pytest.raises(NotImplementedError, match="Supported modes are: sdd, dsd, dds"):
        MatMul(DIAGONAL.given, 16, mode)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_dtypes_without_kernels_are_refused(mode: str, dtype: torch.dtype):
    a, b = operands(mode)
    with pytest.raises(ValueError, match=f"Tensors are {dtype}; they have to be float16, bfloat16, float32 or float64"):
        MatMul(DIAGONAL.given, 16, mode)(a.to(dtype), b.to(dtype))


def test_block_other_than_the_index():
    with pytest.raises(ValueError, match="block is 32, and the index was built for blocks of 16"):
        MatMul(BlockIndex.build(DIAGONAL.given, 16), 32, "sdd")


def test_second_derivatives_are_refused():
    a, b = (x.requires_grad_() for x in operands())
    (grad,) = torch.autograd.grad(MatMul(DIAGONAL.given, 16, "sdd")(a, b).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_layouts_of_any_type_and_what_old_code_asks_the_operation_for(dtype):
    layout = torch.tensor([[1, 0], [1, 1]])
    given = layout.to(dtype)
    multiply = MatMul(given, 16, "sdd")
    assert torch.equal(multiply.layout, given) and multiply.layout.dtype == dtype and multiply.spdims == (1, 2, 2)
    assert MatMul(given.expand(3, 2, 2), 16, "dsd").spdims == (3, 2, 2)
    assert list(multiply.lut_cache) == [torch.device("cpu")]
    a, b = torch.randn(2, 1, 1, 32, 32, dtype=torch.float64)
    assert torch.equal(multiply(a, b), MatMul(layout, 16, "sdd")(a, b))


@pytest.mark.parametrize("operation", [lambda layout: MatMul(layout, 16, "sdd"), lambda layout: Softmax(layout, 16)])
def test_what_becomes_of_the_layout_later_changes_no_operation(operation):
    """The values of one operation go to the next: all read the layout when they are made."""
    for shape in ((2, 2), (1, 2, 2), (3, 2, 2)):
        layout = torch.ones(shape, dtype=torch.int64)
        made = operation(layout)
        layout[..., 0, 1] = 0
        layout.numpy()[..., 1, 0] = 0
        assert torch.equal(made.layout, torch.ones_like(layout)) and made._index.live_blocks == 4
    index = BlockIndex.build(layout, 16)
    assert operation(index).layout is index


def test_its_repr_is_one_short_line():
    index = BlockIndex.build(torch.eye(2, dtype=torch.bool), 16)
    assert repr(MatMul(index, 16, "sdd", trans_b=True)) == f"MatMul(sdd, trans_b, {index})"
    assert repr(MatMul(torch.eye(2, dtype=torch.bool), 16, "dsd")) == f"MatMul(dsd, {index})"
