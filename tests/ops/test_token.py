"""Native token operations: lists and tiles beyond those of the fuzz, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fuzz.compare import hold
from fuzz.meanings import Tensors
from fuzz.pairs import attention_case, index_of, scores_case
from helpers import (
    DTYPES,
    Pairs,
    as_view,
    deterministic_algorithms,
    is_hopper,
    leaf,
    random,
    random_pairs,
    seeded,
)

from ds_sparse import TokenIndex, sparse_attn, sparse_matmul
from ds_sparse.index import token_tiles
from ds_sparse.ops import missing_kernels
from ds_sparse.ops.operands import lists_of_tiles

OPERATORS = ("token_matmul_sdd", "token_matmul_dsd", "token_attention_forward", "token_attention_backward")


def operands(
    pairs: Pairs, batch: int = 0, heads: int = 0, head_dim: int = 8, value_dim: int = 0,
    dtype: torch.dtype = torch.float64, view: str = "contiguous",
) -> Tensors:  # fmt: skip
    """Random ones; sizes of 0 are those of the lists, or the head size."""
    lead = (batch or pairs.batch, heads or pairs.heads)
    shapes = {"q": (pairs.queries, head_dim), "k": (pairs.keys, head_dim), "v": (pairs.keys, value_dim or head_dim)}
    rng = seeded()
    return {name: as_view(random(rng, *lead, *shape, dtype=dtype), view) for name, shape in shapes.items()}


def check(device: str, pairs: Pairs, deterministic: bool = True, **of_operands) -> None:
    """Output, lse and gradients."""
    case = attention_case("sparse_attn", operands(pairs, **of_operands), pairs, return_lse=True)
    hold(replace(case, poisoned=deterministic), device)


def on_hopper(device: str) -> None:
    if not is_hopper(device):
        pytest.skip("tiles with bits are for Hopper GPUs")


@pytest.fixture
def always_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "LEAST_PAIRS", 0)
    monkeypatch.setattr(token_tiles, "MOST_BLOCKS", math.inf)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_in_tiles(device: str, deterministic: bool, dtype: torch.dtype, always_in_tiles: None):
    on_hopper(device)
    for number, (queries, keys, list_heads, density, head_dim) in enumerate(
        (
            (1, 300, 1, 0.4, 64), (64, 64, 3, 0.1, 8), (130, 200, 1, 1.0, 128), (200, 1, 3, 1.0, 72),
            (300, 300, 3, 0.4, 20), (300, 130, 1, 0.01, 1), (200, 300, 1, 0.1, 128), (130, 64, 3, 0.4, 64),
        )
    ):  # fmt: skip
        pairs = random_pairs(seeded(number), queries, keys, 1, list_heads, density)
        assert index_of(pairs).to(device).tiles is not None or not pairs.counts.any()
        for view in ("contiguous", "tokens_first", "packed", "transposed"):
            check(device, pairs, deterministic, batch=2, heads=3, head_dim=head_dim, dtype=dtype, view=view)


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_rows_and_columns_in_tiles_are_put_together(device: str, deterministic: bool):
    on_hopper(device)
    label = torch.arange(2300) // 90
    mask = label[:, None] == label
    mask[3], mask[:, 5] = True, True
    pairs = Pairs((mask.nonzero(),), 1, 1, 2300, 2300)
    tiles = index_of(pairs).to(device).tiles
    assert len(tiles.rows.cuts) > 0 and len(tiles.columns.cuts) > 0
    check(device, pairs, deterministic, batch=1, heads=2, head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("operator", ["token_tiles_forward", "token_tiles_backward"])
def test_opcheck_of_tiles(device: str, operator: str, always_in_tiles: None):
    on_hopper(device)
    pairs = random_pairs(seeded(), 150, 140, heads=2, density=0.3)
    q, k, v = (x.to(device) for x in operands(pairs, 2, 2, 24, dtype=torch.bfloat16).values())
    tiles = index_of(pairs).to(device).tiles
    rows, columns = (
        (*lists_of_tiles(x), pairs) for x, pairs in ((tiles.rows, tiles.row_pairs), (tiles.columns, tiles.column_pairs))
    )
    output, lse, saved = torch.ops.ds_sparse.token_tiles_forward(q, k, v, *rows, tiles.layout_heads, 0.2)
    arguments = {
        "token_tiles_forward": (q, k, v, *rows, tiles.layout_heads, 0.2),
        "token_tiles_backward": (output, lse, q, k, v, output, saved, *rows, *columns, tiles.layout_heads, 0.2, True),
    }
    torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments[operator])


def test_tiles_compile_into_one_graph(device: str, always_in_tiles: None):
    on_hopper(device)
    pairs = random_pairs(seeded(), 150, 140, heads=2, density=0.3)
    inputs = [leaf(x, device) for x in operands(pairs, 2, 2, 20, dtype=torch.bfloat16).values()]
    index = index_of(pairs).to(device).prepared()
    assert index.tiles is not None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse_attn(q * 2, k, v, index) * 2

    with deterministic_algorithms():
        results, expected = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs), run(*inputs)
        assert torch.equal(results, expected)
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (results, expected))
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 7, 16, 48, 64, 128, 200])
def test_attention_of_every_head_size_and_dtype(device: str, head_dim: int, dtype: torch.dtype):
    check(device, random_pairs(seeded(), 50, 45, heads=2), head_dim=head_dim, dtype=dtype)


def with_long_lines(rng: torch.Generator, lists: tuple[int, int] = (1, 1)) -> Pairs:
    """Queries that see thousands of keys, and keys that as many queries see, among short ones and empty ones."""
    queries, keys, made = 560, 2100, []
    for _ in range(math.prod(lists)):
        live = torch.rand(queries, keys, generator=rng) < 0.002
        live[[0, 1, 300]] = True
        live[5] = torch.rand(keys, generator=rng) < 0.3
        live[:, [3, 2000]] = True
        live[400] = False
        pairs = live.nonzero()
        made.append(torch.cat((pairs, pairs[::50])))
    return Pairs(tuple(made), *lists, queries, keys)


LONG = (((1, 1), 64, 64), ((1, 2), 8, 130), ((2, 1), 1, 20))


@pytest.mark.parametrize(
    ("lists", "head_dim", "value_dim", "dtype"),
    [
        (*LONG[0], torch.float32),
        (*LONG[1], torch.bfloat16),
        (*LONG[2], torch.float32),
        *(
            pytest.param(*lists, dtype, marks=pytest.mark.slow_on_cpu("other pairs of the same lists and dtypes"))
            for lists, dtype in zip(LONG, (torch.bfloat16, torch.float32, torch.bfloat16))
        ),
    ],
    ids=str,
)
def test_long_lines_among_short_ones(
    device: str, lists: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype
):
    pairs = with_long_lines(seeded(), lists)
    check(device, pairs, head_dim=head_dim, value_dim=value_dim, dtype=dtype, view="tokens_first")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_long_lines(device: str, dtype: torch.dtype):
    pairs = with_long_lines(seeded())
    tensors = operands(pairs, 1, 2, 40, dtype=dtype, view="tokens_first")
    del tensors["v"]
    hold(scores_case(tensors, pairs, by_rows=False), device)


def test_backward_takes_some_heads_at_a_time(device: str):
    """Two of these heads have as many pairs as it keeps numbers of."""
    pairs = random_pairs(seeded(), 200, 180, density=0.8)
    assert 2**16 / 3 < len(pairs.lists[0]) < 2**16 / 2
    check(device, pairs, batch=1, heads=5, head_dim=4)


def test_without_a_number_in_keys_or_of_them(device: str):
    q, k, v = (torch.randn(2, 2, n, 3, device=device, requires_grad=True) for n in (5, 0, 0))
    values, ends = torch.zeros(0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    output, lse = sparse_attn(q, k, v, values, ends, return_lse=True)
    assert output.shape == q.shape and not output.any() and (lse == -math.inf).all()
    for x, grad in zip((q, k, v), torch.autograd.grad(output.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_under_compile_an_index_that_would_have_to_be_made_is_asked_for(device: str):
    values, ends = torch.tensor([0, 1], device=device), torch.tensor([1, 2], device=device)
    x = torch.randn(2, 4, device=device)
    compiled = torch.compile(sparse_attn, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="build a TokenIndex before"):
        compiled(x, x, x, values, ends)


def test_scores_of_thousands_lose_nothing_backward(device: str):
    """Gradients of a row whose scores are all large are those of the same row with small ones."""
    k = random(seeded(), 40, 8, dtype=torch.float32)
    v = random(seeded(1), 40, 8, dtype=torch.float32)
    q = random(seeded(2), 9, 8, dtype=torch.float32)
    shift = torch.tensor(4096.0)
    near = [leaf(torch.cat((x, torch.zeros(len(x), 1)), 1), device) for x in (q, k)]
    far = [leaf(torch.cat((x, y.expand(len(x), 1)), 1), device) for x, y in ((q, shift), (k, torch.tensor(1.0)))]
    index = TokenIndex.from_mask(torch.rand(9, 40, generator=seeded()) < 0.6)
    value, grad = v.to(device), torch.ones(9, 8, device=device).cumsum(1)
    found, wanted = (torch.autograd.grad(sparse_attn(*x, value, index, scale=1.0), x, grad) for x in (far, near))
    for mine, other in zip(found, wanted, strict=True):
        # Scores have an error of a rounding at 4096.
        torch.testing.assert_close(mine[:, :8], other[:, :8], rtol=0, atol=2e-3 * other.abs().max().item())


ONES = torch.ones(5, 5, dtype=torch.bool)
X = torch.zeros(2, 5, 4)
REFUSED = [
    ((X, X[:1], X, TokenIndex.from_mask(ONES)), "have to be .*heads, tokens, head size"),
    ((X, X[..., :3], X, TokenIndex.from_mask(ONES)), "q and k need the same head size"),
    ((X, X, X[:, :4], TokenIndex.from_mask(ONES)), "k and v the same tokens"),
    ((X[..., :0], X[..., :0], X, TokenIndex.from_mask(ONES)), "head sizes have to be 1 or more"),
    ((X[0, 0], X[0, 0], X[0, 0], TokenIndex.from_mask(ONES)), "have to be .*heads, tokens, head size"),
    ((X, X.double(), X, TokenIndex.from_mask(ONES)), "k is torch.float64 and q torch.float32"),
    ((X, X.to("meta"), X, TokenIndex.from_mask(ONES)), "k is on meta and q on cpu"),
    ((X.long(), X.long(), X.long(), TokenIndex.from_mask(ONES)), "Tensors are torch.int64"),
    ((X, X, X, TokenIndex.from_mask(ONES[:4])), "for 4 query and 5 key tokens, and q has 5 and k 5"),
    ((X, X, X, TokenIndex.from_mask(ONES.expand(3, -1, -1))), "lists for 3 heads, and q has 2"),
    ((X, X, X, TokenIndex.from_mask(ONES.expand(3, 1, -1, -1))), "lists for 3 sequences, and q has 1"),
    ((X, X, X, TokenIndex.from_mask(ONES), torch.zeros(5)), "values is a TokenIndex, which has its offsets"),
    ((X, X, X, torch.zeros(0).long()), "offsets is not given"),
    ((X, X, X, torch.tensor([7]), torch.ones(5).long()), r"values\[0\], in row 0, is 7; key tokens are 0 to 4"),
    ((X, X, X, TokenIndex.from_mask(ONES), None, math.inf), "scale is inf; it has to be finite"),
    ((X, X, X, TokenIndex.from_mask(ONES), None, torch.ones(()).requires_grad_()), "scale requires a gradient"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_does_not_fit_is_refused(arguments: tuple, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        sparse_attn(*arguments)


def test_lists_of_something_else_are_refused():
    with pytest.raises(TypeError, match="values are a mask; give TokenIndex.from_mask of it"):
        sparse_attn(X, X, X, ONES)
    with pytest.raises(TypeError, match="values are a jagged tensor; give TokenIndex.from_jagged of it"):
        sparse_attn(X, X, X, TokenIndex.from_mask(ONES).jagged())
    with pytest.raises(TypeError, match="scale is 'small'; it has to be a number"):
        sparse_attn(X, X, X, TokenIndex.from_mask(ONES), scale="small")
    with pytest.raises(TypeError, match="values are 'values'"):
        sparse_attn(X, X, X, "values", torch.zeros(5))
    with pytest.raises(TypeError, match="values are torch.float32"):
        sparse_attn(X, X, X, torch.zeros(3), torch.full((5,), 3))
    with pytest.raises(TypeError, match="indices are 3; they have to be a tensor"):
        sparse_matmul(X, X, 3)


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available() or missing_kernels("cuda", OPERATORS):
        pytest.skip("no CUDA GPU or kernels here")
    return "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(257, 4), (4, 300)])
def test_on_a_gpu_larger_heads_are_refused(gpu: str, sizes: tuple[int, int]):
    x, v = (torch.zeros(2, 5, n, device=gpu) for n in sizes)
    with pytest.raises(
        ValueError, match=f"Head size is {max(sizes)}; on CUDA it has to be up to 256.*gather_attention"
    ):
        sparse_attn(x, x, v, TokenIndex.from_mask(ONES))


FULL = Pairs((ONES[:2, :2].nonzero(),), 1, 1, 2, 2)


def raw_arguments(operator: str) -> list:
    """What an operator takes, of two queries that see both of two keys."""
    index = index_of(FULL)
    q, k, v = operands(FULL, head_dim=4, dtype=torch.float32).values()
    rows, lists = (index.row_offsets, index.columns), (index.batch, index.heads)
    forward = (q, k, v, *rows, *lists, 0.5)
    output, lse, statistics = torch.ops.ds_sparse.token_attention_forward(*forward)
    scores = torch.ops.ds_sparse.token_matmul_sdd(q, k, *rows, *lists)
    arguments = {
        "token_matmul_sdd": (q, k, *rows, *lists),
        "token_matmul_dsd": (scores, q, *index.by_key, *lists),
        "token_attention_forward": forward,
        "token_attention_backward": (output, lse, q, k, v, output, statistics, *rows, *index.by_key, *lists, 0.5),
    }
    return list(arguments[operator])


def replaced(operator: str, position: int, spoiled: torch.Tensor) -> list:
    arguments = raw_arguments(operator)
    arguments[position] = spoiled
    return arguments


INTS = torch.int32
SPOILED = [
    ("token_matmul_sdd", 2, [0, 3, 2], "offsets have to ascend from 0 to the 4 entries"),
    ("token_matmul_sdd", 2, [0, 2, 3], "offsets have to ascend"),
    ("token_matmul_sdd", 2, [0, 4], "offsets has size 2 in dimension 0; it has to be 3"),
    ("token_matmul_sdd", 3, [0, 1, 2, 0], "tokens of 0 or more and below 2"),
    ("token_matmul_sdd", 3, [0, -1, 1, 0], "tokens of 0 or more and below 2"),
    ("token_matmul_dsd", 3, [0, 1, 2, 0], "tokens of 0 or more and below 2"),
    ("token_matmul_dsd", 4, [0, 4, 1, 0], "slots below the 4 entries"),
    ("token_matmul_dsd", 4, [0, 4, 1], "slots has size 3"),
    ("token_attention_forward", 4, [0, 1, 2, 0], "tokens of 0 or more and below 2"),
    ("token_attention_backward", 8, [0, 1, 2, 0], "tokens of 0 or more and below 2"),
    ("token_attention_backward", 10, [0, 1, -1, 0], "tokens of 0 or more and below 2"),
    ("token_attention_backward", 11, [0, 1, -1, 0], "slots below the 4 entries"),
]


@pytest.mark.parametrize(("operator", "position", "spoiled", "sentence"), SPOILED)
def test_lists_that_lead_outside_are_refused(operator: str, position: int, spoiled: list[int], sentence: str):
    with pytest.raises(RuntimeError, match=sentence):
        getattr(torch.ops.ds_sparse, operator)(*replaced(operator, position, torch.tensor(spoiled, dtype=INTS)))


OPERANDS = [
    ("token_attention_forward", 1, torch.zeros(1, 1, 2, 5), "key has size 5 in dimension 3; it has to be 4"),
    ("token_attention_forward", 2, torch.zeros(1, 1, 3, 4), "value has size 3 in dimension 2"),
    ("token_attention_forward", 2, torch.zeros(1, 1, 2, 4).double(), "value has to have the dtype"),
    ("token_attention_forward", 0, torch.zeros(1, 2, 4), "query has 3 dimensions"),
    ("token_attention_forward", 2, torch.zeros(1, 1, 2, 0), "value has to have numbers"),
    ("token_attention_backward", 0, torch.zeros(1, 1, 3, 4), "grad_output has size 3 in dimension 2"),
    ("token_attention_backward", 1, torch.zeros(1, 1, 3), "grad_lse has size 3 in dimension 2"),
    ("token_attention_backward", 1, torch.zeros(1, 1, 4)[..., ::2], "grad_lse has to be contiguous"),
    ("token_attention_backward", 5, torch.zeros(1, 1, 2, 3), "output has size 3 in dimension 3"),
    ("token_attention_backward", 6, torch.zeros(1, 1, 2, 1), "rows has size 1 in dimension 3"),
    ("token_matmul_dsd", 0, torch.zeros(1, 3), "values has size 3 in dimension 1; it has to be 4"),
    ("token_matmul_dsd", 0, torch.zeros(2, 4), "values has size 2 in dimension 0; it has to be 1"),
    ("token_matmul_dsd", 0, torch.zeros(4, 1).T, "values has to be contiguous"),
]


@pytest.mark.parametrize(("operator", "position", "spoiled", "sentence"), OPERANDS)
def test_operands_that_do_not_fit_are_refused(operator: str, position: int, spoiled: torch.Tensor, sentence: str):
    arguments = replaced(operator, position, spoiled)
    if sentence == "values has to be contiguous":
        arguments = (torch.zeros(4, 2)[:, 0][None].expand(1, 4), *arguments[1:])
    with pytest.raises(RuntimeError, match=sentence):
        getattr(torch.ops.ds_sparse, operator)(*arguments)


@pytest.mark.parametrize("lists", [(2, 1), (1, 2), (0, 1)])
def test_lists_of_other_heads_or_sequences_are_refused(lists: tuple[int, int]):
    arguments = raw_arguments("token_matmul_sdd")
    with pytest.raises(RuntimeError, match="for 1; it has to be 1 or as many"):
        torch.ops.ds_sparse.token_matmul_sdd(*arguments[:4], *lists)


@pytest.mark.gpu
def test_on_a_gpu_a_capture_does_not_make_what_is_missing(gpu: str):
    index = index_of(random_pairs(seeded(), 70, 60)).to(gpu)
    refused = torch.cuda.graph(torch.cuda.CUDAGraph())
    with (
        pytest.raises(RuntimeError, match=r"cannot be made while a CUDA graph is captured; pass index.prepared\(\)"),
        refused,
    ):
        _ = index.by_key
