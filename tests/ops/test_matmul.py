"""MatMul: products, lists and tiles beyond those of the fuzz, the same bits, and what it refuses."""

from __future__ import annotations

import itertools

import pytest
import torch
from fuzz.blocks import product_case
from fuzz.compare import hold
from helpers import (
    DTYPES,
    as_on_hopper,
    as_view,
    is_hopper,
    needs_gpu_memory,
    random,
    seeded,
)

from ds_sparse.dispatch import tile_heights
from ds_sparse.index import BlockIndex
from ds_sparse.ops import MatMul, Softmax
from ds_sparse.sparsity import BSLongformerSparsityConfig

MODES = ("sdd", "dsd", "dds")
OPERATORS = ("matmul_sdd", "matmul_dsd")

DIAGONAL = torch.eye(2, dtype=torch.bool)


def operands(
    mode: str, layout: torch.Tensor = DIAGONAL, block: int = 16, heads: int = 1, width: int = 24, trans_a: bool = False,
    trans_b: bool = False, batch: int = 2, dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Random ones that fit; `width` is the inner size of sdd, the outer one of dsd and dds."""
    layout, rng = layout if layout.dim() == 3 else layout[None], seeded()
    tall, wide = (size * block for size in layout.shape[1:])
    values = (int(layout.bool().expand(heads, -1, -1).sum()), block, block)

    def dense(rows: int, columns: int, transposed: bool) -> tuple[int, ...]:
        return (heads, *((columns, rows) if transposed else (rows, columns)))

    if mode == "sdd":
        a, b = dense(tall, width, trans_a), dense(width, wide, trans_b)
    elif mode == "dsd":
        a, b = values, dense(tall if trans_a else wide, width, trans_b)
    else:
        a, b = dense(width, wide if trans_b else tall, trans_a), values
    return random(rng, batch, *a, dtype=dtype), random(rng, batch, *b, dtype=dtype)


def check(
    device: str, dtype: torch.dtype, mode: str, layout: torch.Tensor, block: int = 16, heads: int = 0, width: int = 24,
    trans_a: bool = False, trans_b: bool = False, batch: int = 2, view: str = "contiguous",
) -> None:  # fmt: skip
    """The product and both gradients; 0 heads are the layout's."""
    layout = layout if layout.dim() == 3 else layout[None]
    heads = heads or len(layout)
    given = operands(mode, layout, block, heads, width, trans_a, trans_b, batch, dtype)
    tensors = dict(zip("ab", (as_view(x, view) for x in given), strict=True))
    hold(product_case(tensors, layout.bool(), block, heads, mode, trans_a, trans_b), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_transposition_and_dtype(device: str, mode: str, dtype: torch.dtype):
    """Among them what was wrong in DeepSpeed: the gradients of sdd with trans_a and of dsd with trans_b, and bf16."""
    layout = torch.tensor([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]], [[0, 0, 0], [0, 0, 0]]])
    for trans_a, trans_b in itertools.product((False, True), repeat=2):
        check(device, dtype, mode, layout, width=40, trans_a=trans_a, trans_b=trans_b)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [8, 48, 64, 72, 128])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_query_and_key_of_one_projection(device: str, block: int, width: int, heads: int, batch: int):
    """Heads and tokens lie apart by numbers that have little in common."""
    blocks = (256 if device == "cpu" else 512) // block
    layout = torch.rand(heads, blocks, blocks, generator=seeded()) < 0.4
    check(device, torch.bfloat16, "sdd", layout, block, width=width, trans_b=True, batch=batch, view="packed")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "rows", "columns", "width"), [(16, 18, 21, 72), (32, 9, 11, 40), (64, 7, 9, 72)])
@pytest.mark.parametrize("mode", MODES)
def test_lines_of_every_length(
    device: str, mode: str, block: int, rows: int, columns: int, width: int, dtype: torch.dtype
):
    """Full, long, short and empty rows and columns: lists are cut within lines, between them and at their ends."""
    live = lines_of_every_length(rows, columns)
    for layout in (live, live[0]):
        check(device, dtype, mode, layout, block, 2, width, trans_b=mode == "sdd")


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
    for layout in (live, live[0]):
        check(device, dtype, mode, layout, block, 2, width, trans_b=mode == "sdd")


@pytest.mark.parametrize(("block", "blocks", "width"), [(16, 72, 64), (16, 72, 72), (32, 36, 64), (64, 18, 72)])
@pytest.mark.parametrize("mode", MODES)
def test_long_lines_among_short_ones(device: str, mode: str, block: int, blocks: int, width: int):
    """Parts of tiles that are cut for the sake of one line, in most of which the others have nothing."""
    live = torch.eye(blocks, dtype=torch.bool)
    live[1] = live[:, 2] = True
    assert_cut(live[None], block)
    check(device, torch.bfloat16, mode, live, block, 2, width, trans_b=mode == "sdd")


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
    check(device, torch.bfloat16, "sdd", live, block, 2, 64, trans_b=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 72])
@pytest.mark.parametrize("mode", MODES)
def test_block_128(device: str, mode: str, width: int, dtype: torch.dtype):
    layout = torch.tensor([[1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]])
    check(device, dtype, mode, layout, 128, 2, width, trans_b=True)


@pytest.mark.parametrize("mode", MODES)
def test_nan_reaches_what_depends_on_it_and_nothing_else(device: str, mode: str):
    a, b = operands(mode, dtype=torch.float32)
    a[0, 0, 0, 0] = float("nan")
    nan = MatMul(DIAGONAL, 16, mode)(a.to(device), b.to(device)).isnan().cpu()
    expected = torch.zeros_like(nan)
    # The first row of the first block, or of all that is multiplied with it; blocks that do not exist are not.
    expected[0, 0, 0, : 16 if mode == "dds" else None] = True
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
    trans = {"trans_a": transposed and mode == "dsd", "trans_b": transposed and mode == "dds"}
    a, b = (x.to(device, dtype) for x in operands(mode, live, block, 2, **trans))
    operation = MatMul(live, block, mode, **trans)
    # By tokens: those that are summed over, and those of the result, with the blocks that these see.
    operand, by_tokens = (b[0, 1], lambda x: x) if mode == "dsd" else (a[0, 1].mT, lambda x: x.mT)
    seen = live.mT if transposed == (mode == "dsd") else live
    operand[[5, block + 2], :9] = 0
    expected = by_tokens(operation(a, b))
    for tokens, blocks in zip(expected[0, 1].split(block), seen, strict=True):
        tokens[:, :9] += float("nan") if blocks[:2].any() else 0
    operand[[5, block + 2], :9] = float("nan")
    torch.testing.assert_close(by_tokens(operation(a, b)), expected, rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("mode", "a", "b", "expected"),
    [
        ("sdd", (32, 5), (5, 32), (2, 16, 16)),
        ("sdd", (1, 32, 5), (5, 32), (2, 16, 16)),
        ("sdd", (3, 32, 5), (5, 32), (6, 16, 16)),
        ("sdd", (2, 3, 32, 5), (5, 32), (2, 6, 16, 16)),
        ("sdd", (1, 1, 32, 5), (5, 32), (1, 2, 16, 16)),
        ("dsd", (2, 16, 16), (32, 5), (1, 32, 5)),
        ("dsd", (6, 16, 16), (3, 32, 5), (3, 32, 5)),
        ("dsd", (2, 2, 16, 16), (32, 5), (2, 1, 32, 5)),
        ("dds", (5, 32), (2, 16, 16), (1, 5, 32)),
        ("dds", (3, 5, 32), (6, 16, 16), (3, 5, 32)),
        ("dds", (2, 1, 5, 32), (2, 16, 16), (2, 1, 5, 32)),
    ],
)
def test_operands_of_fewer_dimensions(
    device: str, mode: str, a: tuple[int, ...], b: tuple[int, ...], expected: tuple[int, ...]
):
    """Missing leading dimensions are 1 and are squeezed from the result where they are still 1, as DeepSpeed did."""
    operation, rng = MatMul(DIAGONAL, 16, mode), seeded()
    a, b = random(rng, *a).to(device), random(rng, *b).to(device)
    result = operation(a, b)
    assert result.shape == expected
    full = operation(a.reshape((1,) * (4 - a.dim()) + a.shape), b.reshape((1,) * (4 - b.dim()) + b.shape))
    assert torch.equal(result, full.view(expected))


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
        MatMul(DIAGONAL, 16, mode)(**(dict(zip("ab", operands(mode))) | change))


@pytest.mark.parametrize(
    ("trans", "shape", "sentence"),
    [
        (True, (2, 1, 5, 48), "Expected tensor B to have size 32 at dim 3, got 48"),
        (False, (2, 1, 48, 5), "Expected tensor B to have size 32 at dim 2, got 48"),
    ],
)
def test_the_dimension_in_the_sentence_is_the_one_that_was_given(trans: bool, shape: tuple[int, ...], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        MatMul(DIAGONAL, 16, "dsd", trans_b=trans)(torch.zeros(2, 2, 16, 16), torch.zeros(shape))


def test_heads_other_than_the_layouts():
    layout = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]]])
    with pytest.raises(ValueError, match="3 heads and the layout 2"):
        MatMul(layout, 16, "sdd")(torch.zeros(1, 3, 32, 4), torch.zeros(1, 3, 4, 32))
    with pytest.raises(ValueError, match="3 heads and the layout 2"):
        MatMul(layout, 16, "dsd")(torch.zeros(1, 5, 16, 16), torch.zeros(1, 3, 32, 4))


@pytest.mark.parametrize("mode", ["ddd", "SDD", "", None])
def test_mode_is_one_of_three(mode: object):
    with pytest.raises(NotImplementedError, match="Supported modes are: sdd, dsd, dds"):
        MatMul(DIAGONAL, 16, mode)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_dtypes_without_kernels_are_refused(mode: str, dtype: torch.dtype):
    a, b = operands(mode)
    with pytest.raises(ValueError, match=f"Tensors are {dtype}; they have to be float16, bfloat16, float32 or float64"):
        MatMul(DIAGONAL, 16, mode)(a.to(dtype), b.to(dtype))


def test_block_other_than_the_index():
    with pytest.raises(ValueError, match="block is 32, and the index was built for blocks of 16"):
        MatMul(BlockIndex.build(DIAGONAL, 16), 32, "sdd")


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
    assert repr(Softmax(index, 16)) == f"Softmax({index})"
