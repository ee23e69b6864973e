"""Native token operations against the float64 reference: values, gradients, refusals, and what torch expects."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from helpers import (
    DTYPES,
    EXAMPLES,
    OPERAND_VIEWS,
    Pairs,
    as_view,
    assert_as_accurate,
    attention_allowances,
    deterministic_algorithms,
    generator,
    is_hopper,
    leaf,
    poisoned_memory,
    random,
    random_pairs,
    seeded,
)
from hypothesis import given
from hypothesis import strategies as st
from ops_parameters import BACKENDS, GRAPH_DTYPES

from ds_sparse import (
    TokenIndex,
    gather_attention,
    reference,
    sparse_attn,
    sparse_matmul,
    sparse_matmul_vo,
)
from ds_sparse.index import token_tiles
from ds_sparse.index.token_forms import tensors_in
from ds_sparse.ops import missing_kernels
from ds_sparse.ops.operands import lists_of_tiles

OPERATORS = ("token_matmul_sdd", "token_matmul_dsd", "token_attention_forward", "token_attention_backward")


@dataclass(frozen=True)
class Case:
    """Lists and operands (B, H, tokens, D) in float64."""

    pairs: Pairs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float | None = None

    @property
    def index(self) -> TokenIndex:
        return TokenIndex.from_pairs(self.pairs.nested(list(self.pairs.lists)), self.pairs.queries, self.pairs.keys)


def make_case(
    pairs: Pairs, batch: int = 0, heads: int = 0, head_dim: int = 8, value_dim: int = 0, scale: float | None = None,
    rng: torch.Generator | None = None,
) -> Case:  # fmt: skip
    rng, lead = rng or seeded(), (batch or pairs.batch, heads or pairs.heads)
    q, k = (random(rng, *lead, n, head_dim) for n in (pairs.queries, pairs.keys))
    return Case(pairs, q, k, random(rng, *lead, pairs.keys, value_dim or head_dim), scale)


@st.composite
def cases(draw: st.DrawFn, repeated: bool = True, longest: int = 70) -> Case:
    sizes = st.sampled_from((1, 2, 5, 17, 40, longest))
    list_batch, list_heads = draw(st.sampled_from(((1, 1), (1, 1), (1, 3), (2, 1), (2, 3))))
    rng = generator(draw)
    pairs = random_pairs(
        rng, draw(sizes), draw(sizes), list_batch, list_heads,
        draw(st.sampled_from((0.4, 0.1, 1.0, 0.0))), repeated and draw(st.booleans()),
    )  # fmt: skip
    return make_case(
        pairs,
        list_batch if list_batch > 1 else draw(st.integers(1, 2)),
        list_heads if list_heads > 1 else draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 3, 8, 16, 20, 64, 72, 130))),
        draw(st.sampled_from((0, 0, 1, 24, 64))),
        draw(st.sampled_from((None, None, 0.3, -0.5))),
        rng,
    )


def allowances(
    case: Case, dtype: torch.dtype, exact: list[torch.Tensor], output_grad: torch.Tensor, lse_grad: torch.Tensor
) -> list[float]:
    q, k, v = (x.detach() for x in exact)
    everything = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    probs = reference.token_attention(q, k, everything, case.pairs.counts, case.scale)
    errors = attention_allowances(probs, q, k, v, case.scale, dtype, output_grad, lse_grad)
    return [errors[name].max().item() for name in ("query", "key", "value")]


def check_attention(
    case: Case,
    dtype: torch.dtype,
    device: str,
    views: tuple[str, str] = ("contiguous", "contiguous"),
    only: str = "qkv",
    deterministic: bool = True,
) -> None:
    """Output, lse and gradients, and that nothing given is overwritten."""
    given = [as_view(x.to(dtype), views[0]) for x in (case.q, case.k, case.v)]
    plain, exact = [leaf(x, "cpu") for x in given], [leaf(x.double(), "cpu") for x in given]
    ours = [leaf(x, device, name in only) for name, x in zip("qkv", given)]
    plain_results, exact_results = (
        reference.token_attention(*x, case.pairs.counts, case.scale, return_lse=True) for x in (plain, exact)
    )
    output_grad = as_view(random(seeded(1), *exact_results[0].shape, dtype=dtype), views[1])
    lse_grad = random(seeded(2), *exact_results[1].shape, dtype=plain_results[1].dtype)
    grads_here = [leaf(x, device, requires_grad=False) for x in (output_grad, lse_grad)]
    with poisoned_memory() if deterministic else nullcontext():
        output, lse = sparse_attn(*ours, case.index, scale=case.scale, return_lse=True)
        found = torch.autograd.grad((output, lse), [x for x in ours if x.requires_grad], grads_here)
    assert_as_accurate("output", output, plain_results[0], exact_results[0])
    dead = exact_results[1] == -math.inf
    assert torch.equal(lse.cpu() == -math.inf, dead)
    assert_as_accurate("lse", *(x.cpu().masked_fill(dead, 0) for x in (lse, plain_results[1], exact_results[1])))
    # Where a row has no pair its lse is -inf for the reference too, which has no gradient from there.
    grads = (output_grad, lse_grad.masked_fill(dead, 0))
    plain_found = torch.autograd.grad(plain_results, plain, grads)
    exact_grads = [x.double() for x in grads]
    exact_found = torch.autograd.grad(exact_results, exact, exact_grads)
    allowed = dict(zip("qkv", zip(plain_found, exact_found, allowances(case, dtype, exact, *exact_grads)), strict=True))
    for name, x in zip(only, found, strict=True):
        y, z, allowance = allowed[name]
        assert_as_accurate(f"gradient of {name}", x, y, z, allowance=allowance)
    for before, after in zip((*given, output_grad), (*ours, grads_here[0]), strict=True):
        assert torch.equal(before.cpu(), after.detach().cpu()), "an input was overwritten"


@EXAMPLES
@given(
    case=cases(),
    dtype=st.sampled_from(DTYPES),
    views=st.tuples(st.sampled_from(OPERAND_VIEWS), st.sampled_from(OPERAND_VIEWS)),
    only=st.sampled_from(("qkv", "qkv", "q", "k", "v")),
)
def test_attention(device: str, case: Case, dtype: torch.dtype, views: tuple[str, str], only: str):
    check_attention(case, dtype, device, views, only)


@st.composite
def cases_in_tiles(draw: st.DrawFn) -> Case:
    sizes, list_heads, rng = st.sampled_from((1, 64, 130, 200, 300)), draw(st.sampled_from((1, 1, 3))), generator(draw)
    density = draw(st.sampled_from((0.4, 0.1, 1.0, 0.01)))
    return make_case(
        random_pairs(rng, draw(sizes), draw(sizes), 1, list_heads, density, False),
        draw(st.integers(1, 2)),
        list_heads if list_heads > 1 else draw(st.integers(1, 3)),
        draw(st.sampled_from((1, 8, 20, 64, 72, 128))),
        scale=draw(st.sampled_from((None, None, 0.3, -0.5))),
        rng=rng,
    )


def on_hopper(device: str) -> None:
    if not is_hopper(device):
        pytest.skip("tiles with bits are for Hopper GPUs")


@pytest.fixture
def always_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tiles, "LEAST_PAIRS", 0)
    monkeypatch.setattr(token_tiles, "MOST_BLOCKS", math.inf)


@EXAMPLES
@given(
    case=cases_in_tiles(),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
    views=st.tuples(st.sampled_from(OPERAND_VIEWS), st.sampled_from(OPERAND_VIEWS)),
    deterministic=st.booleans(),
)
def test_attention_in_tiles(device: str, case: Case, dtype: torch.dtype, views: tuple[str, str], deterministic: bool):
    on_hopper(device)
    with mock.patch.object(token_tiles, "LEAST_PAIRS", 0), mock.patch.object(token_tiles, "MOST_BLOCKS", math.inf):
        assert case.index.to(device).tiles is not None or not case.pairs.counts.any()
        check_attention(case, dtype, device, views, deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_rows_and_columns_in_tiles_are_put_together(device: str, deterministic: bool):
    on_hopper(device)
    label = torch.arange(2300) // 90
    mask = label[:, None] == label
    mask[3], mask[:, 5] = True, True
    case = make_case(Pairs((mask.nonzero(),), 1, 1, 2300, 2300), 1, 2, head_dim=64)
    tiles = case.index.to(device).tiles
    assert len(tiles.rows.cuts) > 0 and len(tiles.columns.cuts) > 0
    check_attention(case, torch.bfloat16, device, deterministic=deterministic)


@pytest.mark.parametrize("operator", ["token_tiles_forward", "token_tiles_backward"])
def test_opcheck_of_tiles(device: str, operator: str, always_in_tiles: None):
    on_hopper(device)
    case = make_case(random_pairs(seeded(), 150, 140, heads=2, density=0.3), 2, 2, head_dim=24)
    q, k, v = (x.to(device, torch.bfloat16) for x in (case.q, case.k, case.v))
    tiles = case.index.to(device).tiles
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
    case = make_case(random_pairs(seeded(), 150, 140, heads=2, density=0.3), 2, 2, head_dim=20)
    inputs = [leaf(x.bfloat16(), device) for x in (case.q, case.k, case.v)]
    index = case.index.to(device).prepared()
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
    check_attention(make_case(random_pairs(seeded(), 50, 45, heads=2), head_dim=head_dim), dtype, device)


@EXAMPLES
@given(case=cases(), dtype=st.sampled_from(DTYPES), view=st.sampled_from(OPERAND_VIEWS), by_pairs=st.booleans())
def test_scores(device: str, case: Case, dtype: torch.dtype, view: str, by_pairs: bool):
    check_scores(case, dtype, device, view, by_pairs)


def check_scores(case: Case, dtype: torch.dtype, device: str, view: str, by_pairs: bool) -> None:
    """In the order in which pairs are listed, and in the form in which lists are given; with their gradients."""
    pairs, (batch, heads) = case.pairs, case.q.shape[:2]
    given = [as_view(x.to(dtype), view) for x in (case.q, case.k)]
    plain, exact = [leaf(x, "cpu") for x in given], [leaf(x.double(), "cpu") for x in given]
    ours = [leaf(x, device) for x in given]
    values, ends = pairs.csr()
    lists = [torch.stack((torch.arange(pairs.queries).repeat_interleave(e.diff(prepend=e.new_zeros(1))), v), 1)
             for v, e in zip(values, ends, strict=True)]  # fmt: skip
    with poisoned_memory():
        if by_pairs:
            lists = pairs.lists
            found = sparse_matmul(*ours, pairs.nested([x.to(device) for x in lists]))
        else:
            found = sparse_matmul_vo(*ours, pairs.nested([x.to(device) for x in values]), pairs.nested(ends))
    found = tensors_in(found)

    def expected(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        if len(lists) == 1:
            return [reference.token_scores(q, k, lists[0])]
        places = [(b if pairs.batch > 1 else slice(None), h if pairs.heads > 1 else slice(None))
                  for b in range(pairs.batch) for h in range(pairs.heads)]  # fmt: skip
        return [reference.token_scores(q[place], k[place], one) for place, one in zip(places, lists, strict=True)]

    plain_results, exact_results = expected(*plain), expected(*exact)
    grads = [random(seeded(3), *x.shape, dtype=dtype) for x in exact_results]
    for x, y, z in zip(found, plain_results, exact_results, strict=True):
        assert_as_accurate("scores", x, y, z, largest_term=largest_product(*given))
    with poisoned_memory():
        ours_found = torch.autograd.grad(found, ours, [x.to(device) for x in grads])
    plain_found = torch.autograd.grad(plain_results, plain, grads)
    exact_found = torch.autograd.grad(exact_results, exact, [x.double() for x in grads])
    assert (batch, heads) == ours_found[0].shape[:2]
    term = max(largest_product(*grads, x) for x in given)
    for x, y, z in zip(ours_found, plain_found, exact_found, strict=True):
        assert_as_accurate("gradient", x, y, z, largest_term=term)


def largest_product(*tensors: torch.Tensor) -> float:
    """The largest term that sums of products of these may have."""
    return math.prod(max(1.0, x.abs().max().item()) if x.numel() else 1.0 for x in (*tensors[:1], *tensors[-1:]))


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, 3), (2, 3), (2, 1)])
def test_padded_lists_give_padded_scores(device: str, batch: int, heads: int):
    case = make_case(random_pairs(seeded(), 9, 7, batch, heads), batch=2, heads=3)
    pairs, lead = case.pairs, (2, 3)
    q, k = case.q.to(device), case.k.to(device)
    given = pairs.stacked(list(pairs.lists), -1)
    scores = sparse_matmul(q, k, given.to(device))
    full = given.expand(*lead, *given.shape[-2:])
    everything = q @ k.mT
    where = [torch.arange(n).view(shape) for n, shape in zip(lead, ((-1, 1, 1), (1, -1, 1)))]
    expected = everything.cpu()[where[0], where[1], full[..., 0], full[..., 1]].masked_fill(full[..., 0] < 0, 0)
    torch.testing.assert_close(scores.cpu(), expected)
    values, ends = pairs.csr()
    stacked = torch.stack(ends).view(*pairs.counts.shape[pairs.batch == 1 : 2], 9) if len(ends) > 1 else ends[0]
    scores = sparse_matmul_vo(q, k, pairs.stacked(values, 99).to(device), stacked)
    for (b, h), mine in zip(((b, h) for b in range(2) for h in range(3)), scores.flatten(0, 1)):
        p = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
        rows = torch.arange(9).repeat_interleave(ends[p].diff(prepend=ends[p].new_zeros(1)))
        torch.testing.assert_close(mine[: len(rows)].cpu(), everything[b, h].cpu()[rows, values[p]])
        assert not mine[len(rows) :].any()


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_any_leading_dimensions(device: str, lead: tuple[int, ...]):
    pairs = random_pairs(seeded(), 9, 7)
    q, k, v = (random(seeded(i), *lead, n, 4).to(device) for i, n in enumerate((9, 7, 7)))
    output, lse = sparse_attn(q, k, v, *(x[0].to(device) for x in pairs.csr()), return_lse=True)
    scores = sparse_matmul(q, k, pairs.lists[0].to(device))
    assert (output.shape, lse.shape, scores.shape) == ((*lead, 9, 4), (*lead, 9), (*lead, len(pairs.lists[0])))
    four = [x.reshape(-1, 1, *x.shape[-2:]).cpu() for x in (q, k, v)]
    expected = reference.token_attention(*four, pairs.counts)
    torch.testing.assert_close(output.cpu(), expected.view(output.shape))


def test_the_scale_multiplies(device: str):
    case = make_case(random_pairs(seeded(), 9, 7), head_dim=16)
    tensors = [x.to(device) for x in (case.q, case.k, case.v)]
    output = sparse_attn(*tensors, case.index)
    torch.testing.assert_close(sparse_attn(*tensors, case.index, scale=0.25), output)
    torch.testing.assert_close(sparse_attn(tensors[0] / 8, *tensors[1:], case.index, scale=2.0), output)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_key_are_zeros_with_zero_gradient(device: str, dtype: torch.dtype):
    values, ends = torch.tensor([1, 0, 2], device=device), torch.tensor([0, 2, 2, 3, 3], device=device)
    q, k, v = (random(seeded(i), 2, n, 8, dtype=dtype).to(device).requires_grad_() for i, n in enumerate((5, 4, 4)))
    with poisoned_memory():
        output, lse = sparse_attn(q, k, v, values, ends, return_lse=True)
        grads = torch.autograd.grad((output, lse), (q, k, v), (torch.ones_like(output), torch.ones_like(lse)))
    for dead in (0, 2, 4):
        assert not output[:, dead].any() and (lse[:, dead] == -math.inf).all() and not grads[0][:, dead].any()
    assert not grads[1][:, 3].any() and not grads[2][:, 3].any()
    assert all(torch.isfinite(x).all() for x in grads)


def test_each_row_has_an_origin_of_its_own(device: str):
    """Scores of thousands, of either sign, in other rows of the same call."""
    q = torch.tensor([[3e3], [-3e3], [1.0]], device=device)
    k = torch.tensor([[1.0], [1.001], [0.9]], device=device)
    v = torch.eye(3, device=device)
    index = TokenIndex.from_mask(torch.ones(3, 3, dtype=torch.bool))
    output = sparse_attn(q, k, v, index, scale=1.0)
    torch.testing.assert_close(output, (q @ k.T).softmax(-1))


@pytest.mark.parametrize("size", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (2, 2, 5, 0)])
def test_without_sequences_heads_or_tokens(device: str, size: tuple[int, ...]):
    batch, heads, queries, keys = size
    q, k, v = (torch.randn(batch, heads, n, 3, device=device, requires_grad=True) for n in (queries, keys, keys))
    values, ends = torch.zeros(0, dtype=torch.int64), torch.zeros(queries, dtype=torch.int64)
    output, lse = sparse_attn(q, k, v, values, ends, return_lse=True)
    assert output.shape == q.shape and not output.any() and (lse == -math.inf).all()
    scores = sparse_matmul_vo(q, k, values, ends)
    assert scores.shape == (batch, heads, 0)
    for x, grad in zip((q, k, v), torch.autograd.grad(output.sum() + scores.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("lists", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_gradcheck(device: str, lists: tuple[int, int]):
    case = make_case(random_pairs(seeded(), 7, 6, *lists, repeated=True), 2, 2, head_dim=3, value_dim=5)
    index = case.index.to(device)
    inputs = [leaf(x, device) for x in (case.q, case.k, case.v)]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = sparse_attn(q, k, v, index, return_lse=True)
        return output, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(attention, inputs)
    assert torch.autograd.gradcheck(lambda q, k: tuple(tensors_in(sparse_matmul(q, k, index))), inputs[:2])


def raw_arguments(case: Case, device: str, dtype: torch.dtype) -> dict[str, list[tuple]]:
    index = case.index.to(device)
    q, k, v = (x.to(device, dtype) for x in (case.q, case.k, case.v))
    rows, lists = (index.row_offsets, index.columns), (index.batch, index.heads)
    forward = (q, k, v, *rows, *lists, 0.5)
    output, lse, statistics = torch.ops.ds_sparse.token_attention_forward(*forward)
    scores = torch.ops.ds_sparse.token_matmul_sdd(q, k, *rows, *lists)
    backward = (q, k, v, output, statistics, *rows, *index.by_key, *lists, 0.5)
    return {
        "token_matmul_sdd": [(q, k, *rows, *lists)],
        "token_matmul_dsd": [(scores, k, *rows, None, *lists), (scores, q, *index.by_key, *lists)],
        "token_attention_forward": [forward],
        "token_attention_backward": [(output, None, *backward), (output, lse.nan_to_num(0, 0, 0), *backward)],
    }


@pytest.mark.parametrize("dtype", GRAPH_DTYPES, ids=str)
@pytest.mark.parametrize(
    "lists",
    [
        (1, 3),
        *(pytest.param(x, marks=pytest.mark.slow_on_cpu("lists a head are checked")) for x in ((1, 1), (2, 1))),
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_opcheck(device: str, operator: str, lists: tuple[int, int], dtype: torch.dtype):
    case = make_case(random_pairs(seeded(), 9, 7, *lists), 2, 3)
    for arguments in raw_arguments(case, device, dtype)[operator]:
        torch.library.opcheck(getattr(torch.ops.ds_sparse, operator).default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_into_one_graph(device: str, backend: str):
    case = make_case(random_pairs(seeded(), 19, 17), 2, 3)
    index = case.index.to(device).prepared()
    inputs = [leaf(x.float(), device) for x in (case.q, case.k, case.v)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sparse_attn(q * 2, k, v, index) * 2, sparse_matmul(q, k, index)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    results, expected = compiled(*inputs), run(*inputs)
    torch.testing.assert_close(results, expected)
    found, wanted = (torch.autograd.grad(x.square().sum() + y.exp().sum(), inputs) for x, y in (results, expected))
    torch.testing.assert_close(found, wanted)


def test_compiles_for_any_batch(device: str):
    index = make_case(random_pairs(seeded(), 19, 17), 2, 3).index.to(device).prepared()

    def run(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return sparse_attn(q, k, k, index), sparse_matmul(q, k, index), gather_attention(q, k, k, index)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for batch in (2, 4, 5):
        inputs = [random(seeded(i), batch, 3, n, 8, dtype=torch.float32).to(device) for i, n in enumerate((19, 17))]
        torch.testing.assert_close(compiled(*inputs), run(*inputs))


def test_under_compile_an_index_that_would_have_to_be_made_is_asked_for(device: str):
    values, ends = torch.tensor([0, 1], device=device), torch.tensor([1, 2], device=device)
    x = torch.randn(2, 4, device=device)
    compiled = torch.compile(sparse_attn, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="build a TokenIndex before"):
        compiled(x, x, x, values, ends)


def results_of(case: Case, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [leaf(x.to(dtype), device) for x in (case.q, case.k, case.v)]
    output = sparse_attn(*inputs, case.index)
    scores = sparse_matmul(*inputs[:2], case.index)
    grads = torch.autograd.grad((output.float().square().sum(), scores.float().square().sum()), inputs)
    return [output, scores, *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_every_time_and_with_any_number_of_threads(device: str, dtype: torch.dtype):
    case = make_case(random_pairs(seeded(), 300, 280, density=0.3), 1, 3, head_dim=72)
    threads = torch.get_num_threads()
    with deterministic_algorithms():
        first = results_of(case, device, dtype)
        try:
            for number in (threads, 1, 2, 3):
                torch.set_num_threads(number)
                for x, y in zip(first, results_of(case, device, dtype), strict=True):
                    assert torch.equal(x, y), f"{number} threads"
        finally:
            torch.set_num_threads(threads)


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


@pytest.mark.parametrize(
    ("lists", "head_dim", "value_dim", "dtype"),
    [
        ((1, 1), 64, 64, torch.float32),
        ((1, 2), 8, 130, torch.bfloat16),
        ((2, 1), 1, 20, torch.float32),
        *(
            pytest.param(*case, marks=pytest.mark.slow_on_cpu("other pairs of the same lists and dtypes"))
            for case in (
                ((1, 1), 64, 64, torch.bfloat16),
                ((1, 2), 8, 130, torch.float32),
                ((2, 1), 1, 20, torch.bfloat16),
            )
        ),
    ],
    ids=str,
)
def test_long_lines_among_short_ones(
    device: str, lists: tuple[int, int], head_dim: int, value_dim: int, dtype: torch.dtype
):
    case = make_case(with_long_lines(seeded(), lists), head_dim=head_dim, value_dim=value_dim)
    check_attention(case, dtype, device, ("tokens_first", "tokens_first"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_long_lines(device: str, dtype: torch.dtype):
    pairs = with_long_lines(seeded())
    case = make_case(pairs, 1, 2, head_dim=40)
    check_scores(case, dtype, device, "tokens_first", by_pairs=True)


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


def test_backward_takes_some_heads_at_a_time(device: str):
    """Two of these heads have as many pairs as it keeps numbers of."""
    pairs = random_pairs(seeded(), 200, 180, density=0.8)
    assert 2**16 / 3 < len(pairs.lists[0]) < 2**16 / 2
    case = make_case(pairs, 1, 5, head_dim=4)
    inputs = [leaf(x, device) for x in (case.q, case.k, case.v)]
    found = torch.autograd.grad(sparse_attn(*inputs, case.index).square().sum(), inputs)
    exact = [leaf(x, "cpu") for x in (case.q, case.k, case.v)]
    expected = torch.autograd.grad(reference.token_attention(*exact, pairs.counts).square().sum(), exact)
    torch.testing.assert_close([x.cpu() for x in found], list(expected))


def test_autocast_casts_the_operands(device: str):
    case = make_case(random_pairs(seeded(), 9, 7))
    q, k, v = leaf(case.q.float(), device), leaf(case.k.half(), device), leaf(case.v.float(), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        output, scores = sparse_attn(q, k, v, case.index), sparse_matmul(q, k, case.index)
    cast = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(output, sparse_attn(*cast, case.index))
    assert torch.equal(scores, sparse_matmul(*cast[:2], case.index))
    found = torch.autograd.grad((output.float().square().sum(), scores.float().sum()), (q, k, v))
    assert [x.dtype for x in found] == [torch.float32, torch.float16, torch.float32] and all(x.any() for x in found)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert sparse_attn(*(x.double() for x in (q, k, v)), case.index).dtype == torch.float64


def test_meta_tensors_give_shapes():
    index = TokenIndex.from_mask(torch.ones(9, 7, dtype=torch.bool))
    q, k, v = (torch.empty(2, 3, n, d, device="meta", dtype=torch.bfloat16) for n, d in ((9, 4), (7, 4), (7, 5)))
    output, lse = sparse_attn(q, k, v, index, return_lse=True)
    assert (output.shape, output.dtype, lse.shape, lse.dtype) == (
        (2, 3, 9, 5), torch.bfloat16, (2, 3, 9), torch.float32
    )  # fmt: skip
    assert sparse_matmul(q, k, index).shape == (2, 3, 63)


def test_second_derivatives_are_refused():
    x = random(seeded(), 5, 4).requires_grad_()
    index = TokenIndex.from_mask(torch.ones(5, 5, dtype=torch.bool))
    (grad,) = torch.autograd.grad(sparse_attn(x, x, x, index).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has first derivatives only"):
        grad.sum().backward()


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


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_graphs_repeat_it(gpu: str):
    case = make_case(random_pairs(seeded(), 70, 60, heads=2), head_dim=64)
    index = case.index.to(gpu).prepared()
    inputs = [leaf(x.bfloat16(), gpu) for x in (case.q, case.k, case.v)]

    def run() -> tuple[torch.Tensor, ...]:
        output, scores = (
            sparse_attn(*inputs, index),
            torch.cat([x.flatten() for x in sparse_matmul(*inputs[:2], index)]),
        )
        return output, scores, *torch.autograd.grad((output.sum() + scores.sum(),), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in inputs:
            x.mul_(-0.5)
    graph.replay()
    for mine, wanted in zip(captured, run(), strict=True):
        assert torch.equal(mine, wanted)


def spoil(case: Case, operator: str, position: int, spoiled: torch.Tensor) -> tuple:
    arguments = list(raw_arguments(case, "cpu", torch.float32)[operator][-1])
    arguments[position] = spoiled
    return tuple(arguments)


FULL = make_case(Pairs((ONES[:2, :2].nonzero(),), 1, 1, 2, 2), head_dim=4)
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
        getattr(torch.ops.ds_sparse, operator)(*spoil(FULL, operator, position, torch.tensor(spoiled, dtype=INTS)))


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
    arguments = spoil(FULL, operator, position, spoiled)
    if sentence == "values has to be contiguous":
        arguments = (torch.zeros(4, 2)[:, 0][None].expand(1, 4), *arguments[1:])
    with pytest.raises(RuntimeError, match=sentence):
        getattr(torch.ops.ds_sparse, operator)(*arguments)


@pytest.mark.parametrize("lists", [(2, 1), (1, 2), (0, 1)])
def test_lists_of_other_heads_or_sequences_are_refused(lists: tuple[int, int]):
    arguments = raw_arguments(FULL, "cpu", torch.float32)["token_matmul_sdd"][0]
    with pytest.raises(RuntimeError, match="for 1; it has to be 1 or as many"):
        torch.ops.ds_sparse.token_matmul_sdd(*arguments[:4], *lists)


@pytest.mark.gpu
def test_on_a_gpu_a_capture_does_not_make_what_is_missing(gpu: str):
    index = make_case(random_pairs(seeded(), 70, 60)).index.to(gpu)
    refused = torch.cuda.graph(torch.cuda.CUDAGraph())
    with (
        pytest.raises(RuntimeError, match=r"cannot be made while a CUDA graph is captured; pass index.prepared\(\)"),
        refused,
    ):
        _ = index.by_key


def test_a_list_a_head_compiles_where_all_sizes_are_symbolic(device: str):
    mask = torch.rand(3, 40, 40, generator=seeded()) < 0.3
    index = TokenIndex.from_mask(mask).to(torch.device(device)).prepared()
    compiled = torch.compile(lambda *x: sparse_attn(*x, index), fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3, 5):
        inputs = [random(seeded(), batch, 3, 40, 24, dtype=torch.float32).to(device) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), sparse_attn(*inputs, index))
