"""topk_attention: lists of keys, by both ways in which they are walked, beside what they mean, and refusals."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.cases import Draw
from fuzz.compare import hold
from fuzz.selections import attention_case, lists
from helpers import leaf, random, seeded
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import reference, selected_attention, topk_attention
from ds_sparse.ops import topk_operators

OPERATORS = (
    "selected_attention_forward", "selected_attention_backward", "token_attention_forward", "token_attention_backward",
)  # fmt: skip
WAYS = {"pairs": 10**6, "products": 1}
"""From how many heads on that share keys and list these are gathered."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(topk_operators, "LEAST_TOGETHER", WAYS[request.param])
    return request.param


def operands(
    tokens: int = 50, heads: int = 4, key_heads: int = 2, keys: int | None = None, of_value: int = 16, batch: int = 2,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:  # fmt: skip
    before = batch, key_heads, tokens if keys is None else keys
    shapes = {"query": (batch, heads, tokens, 16), "key": (*before, 16), "value": (*before, of_value)}
    return {name: random(seeded(i), *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def named(*shape: int, most: int = 60) -> torch.Tensor:
    """Numbers in any order, some twice, some none, some beyond 50 keys."""
    return torch.randint(-1, most, shape, generator=seeded(5), dtype=torch.int32)


def results(function: Any, *given: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and lse, and the gradients of query, key, value and sinks."""
    *three, numbers, granularity = given
    leaves = [*three, *([options["sinks"]] if "sinks" in options else [])]
    output, lse = function(*three, numbers, granularity, return_lse=True, **options)
    loss = output.double().sin().sum() + lse[lse > -math.inf].double().cos().sum()
    return [output, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(24))
def test_random_calls(device: str, seed: int):
    hold(lists(Draw(f"topk/{seed}/{device}", device), 1.0), device)


@pytest.mark.parametrize("granularity", [1, 2, 4, 8, 16, 64, 128])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.usefixtures("way")
def test_the_statement_of_reference(granularity: int, heads: int, key_heads: int):
    """In float64: with lists for all heads, for those of a group and for each, sinks, lse and all gradients."""
    given = [leaf(x, "cpu") for x in operands(150, heads, key_heads).values()]
    for of_heads in {1, key_heads, heads}:
        numbers = named(of_heads % 2 + 1, of_heads, 150, 7, most=150 // granularity + 3)
        for options in ({"causal": True, "sinks": leaf(random(seeded(1), heads), "cpu")}, {"scale": -0.4}):
            call = *given, numbers, granularity
            found, expected = (
                results(function, *call, **options) for function in (topk_attention, reference.selected_attention)
            )
            torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("granularity", [1, 4, 16])
@pytest.mark.parametrize("of_value", [8, 24])
def test_value_may_have_another_head_size(device: str, granularity: int, of_value: int):
    tensors = operands(of_value=of_value, dtype=torch.float32)
    case = attention_case(tensors, named(2, 2, 50, 9), granularity, causal=True, function=topk_attention)
    hold(case, device)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_latent_of_all_heads(device: str, dtype: torch.dtype):
    """As in DeepSeek's DSA: the value is a part of the only key head, and one list is for all heads."""
    query, latent = (random(seeded(i), 70, heads, 72, dtype=dtype) for i, heads in enumerate((32, 1)))
    scores = torch.rand(70, 70, generator=seeded(3)).masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -1)
    numbers = scores.topk(20).indices

    def call(query: torch.Tensor, latent: torch.Tensor, function: Any) -> list[torch.Tensor]:
        query, latent = query.requires_grad_(), latent.requires_grad_()
        given = query, latent, latent[..., :64]
        if function is topk_attention:
            output, lse = topk_attention(*given, numbers.to(query.device), causal=True, return_lse=True)
        else:
            rows = (x.transpose(0, 1)[None] for x in given)
            attended = reference.selected_attention(*rows, numbers[None, None], 1, causal=True, return_lse=True)
            output, lse = (x[0].transpose(0, 1) for x in attended)
        return [output, lse, *torch.autograd.grad(output.sin().sum() + lse.cos().sum(), (query, latent))]

    found = call(query.to(device), latent.to(device), topk_attention)
    expected = call(query.double(), latent.double(), reference)
    tolerance = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=tolerance, atol=tolerance)
    assert found[0].dtype == dtype and found[1].dtype == torch.float32


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("granularity", [1, 4, 16])
def test_order_doubles_and_what_is_none(device: str, granularity: int):
    """Numbers below 0, beyond the keys and ahead of a causal query name nothing, and nothing is an error."""
    given = [leaf(x, device) for x in operands(dtype=torch.float32).values()]
    count = -(-50 // granularity)
    numbers = named(2, 2, 50, 6, most=count)
    own = torch.arange(50)[:, None] // granularity
    only = torch.where(numbers <= own, numbers, -1)
    beyond = torch.tensor([count, 2**31 - 1, -(2**31), -7, count + 1, 2**30], dtype=torch.int32)
    order = torch.rand(2, 2, 50, 18, generator=seeded()).argsort(-1)
    messy = torch.cat([numbers, numbers, beyond.expand_as(numbers)], -1).gather(-1, order)
    expected = results(topk_attention, *given, only.to(device), granularity, causal=True)
    for x in (messy, messy.long()):
        torch.testing.assert_close(
            results(topk_attention, *given, x.to(device), granularity, causal=True), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("granularity", [1, 4, 16])
def test_rows_without_a_key(device: str, granularity: int):
    given = [leaf(x, device) for x in operands(dtype=torch.float32).values()]
    numbers = torch.zeros(2, 2, 50, 3, dtype=torch.int32, device=device)
    numbers[:, 1, 7], numbers[0, :, 40:] = -1, 99
    empty = torch.zeros(2, 4, 50, dtype=torch.bool, device=device)
    empty[:, 2:, 7] = empty[0, :, 40:] = True
    output, lse, *grads = results(topk_attention, *given, numbers, granularity)
    assert torch.equal(lse == -math.inf, empty) and not output[empty].any() and not grads[0][empty].any()
    assert all(x.isfinite().all() for x in grads)
    sinks = torch.arange(4.0, device=device)
    output, lse = topk_attention(*given, numbers, granularity, sinks=sinks, return_lse=True)
    assert torch.equal(lse[empty], sinks[:, None].expand(2, 4, 50)[empty]) and not output[empty].any()
    nothing = torch.full_like(numbers, -1)
    output, lse, *grads = results(topk_attention, *given, nothing, granularity)
    assert not output.any() and (lse == -math.inf).all() and not any(x.any() for x in grads)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("granularity", [1, 4, 32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("borders", [[0, 50], [0, 16, 48, 50], [0, 1, 20, 20, 49, 50]], ids=str)
def test_packed_documents_are_separate_calls(device: str, granularity: int, causal: bool, borders: list[int]):
    """In both forms; numbers count from a document's start, and those beyond its end are none."""
    packed = [leaf(x[0].transpose(0, 1), device) for x in operands(batch=1, dtype=torch.float32).values()]
    options: dict[str, Any] = {"causal": causal, "sinks": leaf(random(seeded(7), 4, dtype=torch.float32), device)}
    numbers = named(50, 2, 12, most=50 // granularity + 2).to(device)
    cu_seqlens = torch.tensor(borders, device=device)
    found = results(topk_attention, *packed, numbers, granularity, cu_seqlens=cu_seqlens, **options)

    def in_a_row(query, key, value, numbers, *rest, **options):
        rows = (x.transpose(0, 1)[None] for x in (query, key, value, numbers))
        return tuple(x[0].transpose(0, 1) for x in topk_attention(*rows, *rest, cu_seqlens=cu_seqlens.int(), **options))

    def one_by_one(*given, **options):
        parts = [slice(first, end) for first, end in pairwise(borders) if first < end]
        each = [topk_attention(*(x[part] for x in given[:4]), granularity, **options) for part in parts]
        return tuple(map(torch.cat, zip(*each, strict=True)))

    for other in (in_a_row, one_by_one):
        expected = results(other, *packed, numbers, granularity, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cu_seqlens", [[0, 30], [0, 40, 20, 50], [3, 50], [0, 80]], ids=str)
@pytest.mark.parametrize("granularity", [1, 16])
def test_borders_that_do_not_fit(device: str, granularity: int, cu_seqlens: list[int]):
    """An error where the host knows them, NaN where they are on a GPU."""
    row = [x[0].transpose(0, 1) for x in operands(batch=1, dtype=torch.float32).values()]
    borders, numbers = torch.tensor(cu_seqlens), named(50, 2, 3)
    with pytest.raises(ValueError, match="cu_seqlens"):
        topk_attention(*row, numbers, granularity, cu_seqlens=borders)
    if device == "cuda":
        given = [x.to(device) for x in (*row, numbers)]
        assert topk_attention(*given, granularity, cu_seqlens=borders.to(device)).isnan().all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("granularity", [1, 4, 16])
@pytest.mark.parametrize("at", [[45, 45], [45, 12]], ids=str)
def test_new_queries_of_cached_keys(device: str, granularity: int, at: list[int]):
    """Are the last rows of the whole call; sequences may be of other lengths."""
    tensors, numbers = operands(dtype=torch.float32), named(2, 2, 50, 9, most=50 // granularity)
    given = [x.to(device) for x in tensors.values()]
    whole = topk_attention(*given, numbers.to(device), granularity, causal=True)
    query, own = (torch.stack([x[i, :, n : n + 5] for i, n in enumerate(at)]) for x in (tensors["query"], numbers))
    offset = at[0] if at[0] == at[1] else torch.tensor(at, device=device)
    new = topk_attention(query.to(device), *given[1:], own.to(device), granularity, causal=True, query_offset=offset)
    for i, n in enumerate(at):
        torch.testing.assert_close(new[i], whole[i, :, n : n + 5])


@pytest.mark.parametrize("offset", [2**31 - 1, [2**31 - 1, 49]], ids=str)
def test_queries_far_behind_the_keys_see_all(device: str, offset: int | list[int]):
    given, numbers = [x.to(device) for x in operands().values()], named(2, 2, 50, 9).to(device)
    offset = torch.tensor(offset, device=device) if isinstance(offset, list) else offset
    found = topk_attention(*given, numbers, causal=True, query_offset=offset)
    torch.testing.assert_close(found, topk_attention(*given, numbers))


def test_lists_of_one_dimension_less_are_of_all_heads(device: str):
    row = [x[0].transpose(0, 1).to(device) for x in operands(batch=1).values()]
    numbers = named(50, 1, 8).to(device)
    assert torch.equal(topk_attention(*row, numbers[:, 0]), topk_attention(*row, numbers))


@pytest.mark.usefixtures("way")
def test_a_few_tokens_at_a_time_are_all_together(device: str, monkeypatch: pytest.MonkeyPatch):
    given = [leaf(x, device) for x in operands().values()]
    numbers = named(2, 2, 50, 9).to(device)
    expected = results(topk_attention, *given, numbers, 4, causal=True)
    monkeypatch.setattr(topk_operators, "MOST_GATHERED", {"cpu": 10000, "cuda": 10000})
    monkeypatch.setattr(topk_operators, "MOST_PAIRS", 1)
    torch.testing.assert_close(results(topk_attention, *given, numbers, 4, causal=True), expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("granularity", [1, 4, 16])
@pytest.mark.usefixtures("way")
def test_a_graph_chooses_the_keys_itself(device: str, packed: bool, granularity: int):
    """In one graph for several lengths, with gradients; nothing is built before."""
    torch._dynamo.reset()

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None):
        firsts = key[:, :, : key.shape[2] // granularity * granularity : granularity]
        numbers = (query.unflatten(1, (2, 2)).sum(2) @ firsts.mT).topk(3).indices
        return topk_attention(query, key, value, numbers, granularity, causal=True, cu_seqlens=cu_seqlens)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (70, 90, 121):
        given = [leaf(x, device) for x in operands(tokens, batch=1 if packed else 2, dtype=torch.float32).values()]
        cu_seqlens = torch.tensor([0, 20, 41, tokens], device=device) if packed else None
        found, expected = (call(*given, cu_seqlens) for call in (compiled, step))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), given) for x in (found, expected)))


@pytest.mark.usefixtures("way")
def test_transforms(device: str):
    """Keys chosen inside of a transform, samples of vmap; other lists for each sample are refused."""
    query, key, value = (x.to(device) for x in operands().values())

    def loss(query: torch.Tensor) -> torch.Tensor:
        numbers = query.sum(1, keepdim=True).topk(5).indices
        return topk_attention(query, key, value, numbers, 4, causal=True).sin().sum()

    expected = query.clone().requires_grad_()
    torch.testing.assert_close(grad(loss)(query), torch.autograd.grad(loss(expected), expected)[0])
    numbers = named(3, 2, 2, 50, 6).to(device)
    samples = torch.stack([query, query + 1, query * 2])
    found = vmap(lambda q: topk_attention(q, key, value, numbers[0], 4))(samples)
    torch.testing.assert_close(found[1], topk_attention(samples[1], key, value, numbers[0], 4))
    with pytest.raises(ValueError, match="topk_idxs is another one for each sample of torch.vmap; give one for"):
        vmap(lambda x: topk_attention(query, key, value, x, 4))(numbers)


def test_numbers_that_are_changed_before_backward_are_an_error(device: str):
    """Their gradients would be those of other keys."""
    given = [leaf(x, device) for x in operands().values()]
    numbers = named(2, 2, 50, 6).to(device)
    output = topk_attention(*given, numbers)
    numbers.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Largest(TorchDispatchMode):
    """The largest tensor that an operator returns, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = operator(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(given):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return given


@pytest.mark.usefixtures("way")
def test_nothing_is_as_large_as_tokens_times_keys(monkeypatch: pytest.MonkeyPatch):
    """Nor as all lists written out, in the operators."""
    monkeypatch.setattr(topk_operators, "MOST_PAIRS", 2**15)
    monkeypatch.setattr(topk_operators, "MOST_GATHERED", {"cpu": 2**17})
    x = SimpleNamespace(**operands(4096, 1, 1, batch=1, dtype=torch.float32), granularity=4, scale=0.25)
    x.topk_idxs = named(1, 1, 4096, 64, most=1024)
    x.limits = torch.stack([torch.zeros(4096), torch.arange(1, 4097)], -1).int()[None]
    with Largest() as largest:
        x.output, x.grad_lse, x.rows = topk_operators.run_forward(x)
        x.grad_output = x.output
        topk_operators.run_backward(x)
    assert largest.bytes < 4096 * 4096 // 16


def test_blocks_are_those_of_selected_attention(device: str):
    given = [x.to(device, torch.float32) for x in operands(batch=1).values()]
    numbers = named(1, 2, 50, 2, most=4).to(device)
    for causal in (False, True):
        expected = selected_attention(*given, numbers, 16, causal=causal, return_lse=True)
        found = topk_attention(*given, numbers, 16, causal=causal, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


REFUSED = [
    (TypeError, r"topk_idxs is torch\.float32; it has to be an int32 or int64 tensor", {"topk_idxs": torch.zeros(1)}),
    (TypeError, "topk_idxs is list; it has to be an int32 or int64 tensor", {"topk_idxs": [0]}),
    (ValueError, r"topk_idxs has shape \(50, 2\); for 50 tokens of 4 heads, and 2 heads of keys, it has to be "
     r"\(2 or 1, 2 or 4 or 1, 50, k\)", {"topk_idxs": torch.zeros(50, 2).int()}),
    (ValueError, r"topk_idxs has shape \(50, 3, 2\); .* it has to be \(50, 2 or 4 or 1, k\)", {
        "query": torch.zeros(50, 4, 16), "key": torch.zeros(50, 2, 16), "value": torch.zeros(50, 2, 16),
        "topk_idxs": torch.zeros(50, 3, 2).int(),
    }),
    (ValueError, r"topk_idxs has shape \(2, 2, 50, 0\)", {"topk_idxs": torch.zeros(2, 2, 50, 0).int()}),
    (ValueError, "topk_idxs is on meta and query on cpu; move it there",
     {"topk_idxs": torch.zeros(2, 2, 50, 2, dtype=torch.int64, device="meta")}),
    (ValueError, "granularity is 3; it has to be 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024 keys",
     {"granularity": 3}),
    (ValueError, "granularity is True; it has to be", {"granularity": True}),
    (ValueError, r"granularity is 4\.0; it has to be", {"granularity": 4.0}),
    (ValueError, "granularity is 2048; it has to be", {"granularity": 2048}),
    (ValueError, "query_offset is -1; it is the position of the first query", {"query_offset": -1}),
    (TypeError, "query_offset is None; it has to be an integer", {"query_offset": None}),
    (ValueError, r"sinks has shape \(2,\); it has to be \(4,\)", {"sinks": torch.zeros(2)}),
    (TypeError, "sinks is a list; it has to be a tensor", {"sinks": [0.0] * 4}),
    (ValueError, "scale is inf; it has to be finite", {"scale": math.inf}),
    (TypeError, "scale is 'a'; it has to be a number", {"scale": "a"}),
    (ValueError, r"Shapes are query \(2, 4, 50, 16\), key \(2, 3, 50, 16\), value \(2, 3, 50, 16\); query's heads have "
     "to be a multiple of key's", {"key": torch.zeros(2, 3, 50, 16), "value": torch.zeros(2, 3, 50, 16)}),
    (ValueError, "head sizes of query and key, have to be equal",
     {"key": torch.zeros(2, 2, 50, 8), "value": torch.zeros(2, 2, 50, 16)}),
    (ValueError, "those of key and value equal", {"value": torch.zeros(2, 2, 49, 16)}),
    (ValueError, "there has to be at least one token",
     {"key": torch.zeros(2, 2, 0, 16), "value": torch.zeros(2, 2, 0, 16)}),
    (ValueError, r"all have to be \(T, heads, D\), or all", {"query": torch.zeros(50, 4, 16)}),
    (ValueError, r"key is torch\.float64 and query torch\.float32", {"key": torch.zeros(2, 2, 50, 16).double()}),
    (ValueError, r"Tensors are torch\.int32", {
        "query": torch.zeros(2, 4, 50, 16).int(), "key": torch.zeros(2, 2, 50, 16).int(),
        "value": torch.zeros(2, 2, 50, 16).int(),
    }),
    (ValueError, "packed documents are one row", {"cu_seqlens": torch.tensor([0, 50])}),
    (ValueError, "query_offset is given for packed documents",
     {"cu_seqlens": torch.tensor([0, 50]), "query_offset": 1}),
    (TypeError, "cu_seqlens is list; it has to be an int32 or int64 tensor", {"cu_seqlens": [0, 50]}),
    (TypeError, "query is a list; it has to be a tensor", {"query": [0]}),
]  # fmt: skip


@pytest.mark.parametrize("granularity", [4, 16])
@pytest.mark.parametrize(("error", "sentence", "changed"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_in_words(
    error: type[Exception], sentence: str, changed: dict[str, Any], granularity: int
):
    given: dict[str, Any] = operands(dtype=torch.float32)
    given |= {"topk_idxs": torch.zeros(2, 2, 50, 2, dtype=torch.int64), "granularity": granularity}
    with pytest.raises(error, match=sentence):
        topk_attention(**given | changed)
