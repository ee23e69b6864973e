"""selected_attention: what tokens may choose, beside other operations of the same meaning, and refusals."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from fuzz.cases import Draw
from fuzz.compare import hold
from fuzz.selections import attention, attention_case
from helpers import OPERAND_VIEWS, as_view, deterministic_algorithms, leaf, random, seeded
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import block_sparse_attention, reference, selected_attention

OPERATORS = ("selected_attention_forward", "selected_attention_backward")


def operands(
    tokens: int = 70, heads: int = 4, key_heads: int = 2, keys: int | None = None, depth: int = 16, batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:  # fmt: skip
    of_keys = batch, key_heads, tokens if keys is None else keys, depth
    shapes = {"query": (batch, heads, tokens, depth), "key": of_keys, "value": of_keys}
    return {name: random(seeded(i), *shape, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def chosen_blocks(*shape: int, columns: int, seed: int = 5) -> torch.Tensor:
    """Blocks in any order, some twice, some none."""
    return torch.randint(-1, columns, shape, generator=seeded(seed))


def run(device: str, *given: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Output and lse of selected_attention, and the gradients of query, key and value."""
    leaves = [leaf(x, device) for x in given[:3]]
    on = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    output, lse = selected_attention(*leaves, given[3].to(device), **on, return_lse=True)
    loss = output.float().sin().sum() + lse[lse > -math.inf].sum()
    return [output, lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 2), (12, 2), (16, 1), (48, 1)], ids=str)
def test_blocks_and_groups(device: str, heads: int, key_heads: int, block: int, dtype: torch.dtype):
    """Heads of a group see the same, or all heads do, or each its own."""
    tensors = operands(2 * block + 5, heads, key_heads, batch=1, dtype=dtype)
    for of_heads in {1, key_heads, heads}:
        chosen = chosen_blocks(1, of_heads, 2 * block + 5, 2, columns=3)
        hold(attention_case(tensors, chosen, block, causal=of_heads == key_heads), device)


@pytest.mark.parametrize("block", [256, 512, 1024])
def test_large_blocks(device: str, block: int):
    tensors = operands(2 * block + 5, 2, 1, batch=1, dtype=torch.float32)
    hold(attention_case(tensors, chosen_blocks(1, 2, 2 * block + 5, 2, columns=3), block, causal=True), device)


@pytest.mark.parametrize("depth", [8, 20, 64, 128, 136, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(device: str, depth: int, causal: bool):
    tensors = operands(100, depth=depth, dtype=torch.bfloat16)
    hold(attention_case(tensors, chosen_blocks(2, 2, 100, 3, columns=7), 16, causal=causal), device)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(device: str, seed: int):
    hold(attention(Draw(f"selected/{seed}/{device}", device), 1.0), device)


def test_many_tokens_of_many_blocks(device: str):
    """Bits of several words, and lists longer than what one thread takes."""
    tokens = 700 if device == "cpu" else 3000
    chosen = chosen_blocks(1, 1, tokens, 40, columns=-(-tokens // 16))
    hold(attention_case(operands(tokens, 4, 1, batch=1), chosen, 16, causal=True), device)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads", "block"), [(16, 4, 64), (12, 12, 64), (4, 2, 512)], ids=str)
def test_heads_that_choose_alone(device: str, heads: int, key_heads: int, block: int, causal: bool):
    """Their rows are gathered, of all heads at once or, with the first of these sizes, in parts; but not where the
    position of the first query is a tensor."""
    if device == "cpu":
        pytest.skip("rows are gathered on a GPU")
    tokens = 16000 if heads == 16 else 3000
    given = operands(tokens, heads, key_heads, depth=128, dtype=torch.bfloat16)
    chosen = chosen_blocks(2, key_heads, tokens, 16 if heads == 16 else 5, columns=-(-tokens // block))
    keep = torch.rand(2, tokens, generator=seeded(7)) < 0.9
    more: dict[str, Any] = {"block": block, "causal": causal, "key_padding_mask": keep}
    found = run(device, *given.values(), chosen, **more)
    expected = run(device, *given.values(), chosen, **more, query_offset=torch.zeros(2, dtype=torch.int64))
    for x, y in zip(found, expected, strict=True):
        same = x == y  # infinities, too
        error = (x.float() - y.float()).abs().masked_fill(same, 0).max()
        assert error <= 0.02 * y.float().abs().masked_fill(y.isinf(), 0).max()


@pytest.mark.gpu
def test_more_rows_than_are_gathered(device: str):
    """Of as many tokens, heads that choose alone walk tiles of neighbouring tokens, as where the first query's position
    is a tensor."""
    if device == "cpu":
        pytest.skip("rows are gathered on a GPU")
    tokens = 2**17
    given = operands(tokens, 1, 1, batch=1, dtype=torch.bfloat16)
    chosen = chosen_blocks(1, 1, tokens, 32, columns=tokens // 64)
    found = run(device, *given.values(), chosen, block=64)
    expected = run(device, *given.values(), chosen, block=64, query_offset=torch.zeros(1, dtype=torch.int64))
    assert torch.equal(found[0], expected[0])


def test_fp64():
    hold(attention_case(operands(dtype=torch.float64), chosen_blocks(2, 1, 70, 3, columns=5), 16), "cpu")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_any_order_and_doubles(device: str, dtype: torch.dtype):
    given, chosen = tuple(operands().values()), chosen_blocks(2, 2, 70, 3, columns=5)
    order = torch.rand(2, 2, 70, 3, generator=seeded()).argsort(-1)
    doubled = torch.cat([chosen.gather(-1, order), chosen[..., 1:]], -1)
    with deterministic_algorithms():
        expected, found = (run(device, *given, x, block=16) for x in (chosen, doubled.to(dtype)))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_blocks_ahead_of_a_causal_query_are_none(device: str):
    given, chosen = tuple(operands().values()), chosen_blocks(2, 2, 70, 4, columns=5)
    own = torch.arange(70)[:, None] // 16
    expected = run(device, *given, torch.where(chosen <= own, chosen, -1), block=16, causal=True)
    torch.testing.assert_close(run(device, *given, chosen, block=16, causal=True), expected)


def test_numbers_of_no_block(device: str):
    """Below 0 they are none; beyond the keys they are on a GPU, and in graphs, but an error where the host sees it."""
    given, chosen = tuple(operands().values()), chosen_blocks(2, 2, 70, 4, columns=5)
    expected = run(device, *given, chosen, block=16)
    below = torch.where(chosen < 0, torch.tensor([-1, -2, -5, -(2**31)]), chosen)
    torch.testing.assert_close(run(device, *given, below, block=16), expected)
    beyond = torch.where(chosen < 0, torch.tensor([5, 31, 32, 2**31 - 1]), chosen)
    if device == "cuda":
        torch.testing.assert_close(run(device, *given, beyond, block=16), expected)
        return
    with pytest.raises(
        ValueError,
        match=r"block_indices names block \d+ for token .* and the keys fill blocks up to number 4, of 16 each",
    ):
        run(device, *given, beyond, block=16)
    compiled = torch.compile(lambda x: selected_attention(*given, x, 16), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(beyond), expected[0])


def test_rows_without_a_key(device: str):
    """They chose nothing, what is ahead of them, or what is padding."""
    given, chosen = tuple(operands().values()), torch.zeros(2, 2, 70, 2, dtype=torch.int64)
    chosen[:, :, 40:] = 2
    chosen[:, 1, 5] = -1
    keep = torch.ones(2, 70, dtype=torch.bool)
    keep[1, :16] = False
    chosen[:, :, 30] = 2
    output, lse, *grads = run(device, *given, chosen, block=16, causal=True, key_padding_mask=keep)
    empty = torch.zeros(2, 4, 70, dtype=torch.bool)
    empty[:, 2:, 5] = empty[:, :, 30] = empty[1, :, :40] = True
    assert torch.equal(lse.cpu() == -math.inf, empty)
    assert not output[empty.to(device)].any() and not grads[0][empty.to(device)].any()
    assert output[~empty.to(device)].any(-1).all() and all(x.isfinite().all() for x in grads)
    sinks = torch.arange(4.0)
    output, lse, *_ = run(device, *given, chosen, block=16, causal=True, key_padding_mask=keep, sinks=sinks)
    assert torch.equal(lse.cpu()[empty], sinks[:, None].expand(2, 4, 70)[empty])
    assert not output[empty.to(device)].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_all_blocks_are_dense_attention(device: str, causal: bool, sinks: bool):
    given = [leaf(x, device) for x in operands().values()]
    more = {"sinks": torch.randn(4, generator=seeded()).to(device)} if sinks else {}
    chosen = torch.arange(5, device=device).expand(1, 1, 70, 5)
    found = selected_attention(*given, chosen, 16, causal=causal, return_lse=True, **more)
    layout = torch.ones(5, 5, device=device)
    expected = block_sparse_attention(*given, layout, block=16, causal=causal, return_lse=True, **more)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("borders", [[0, 70], [0, 16, 48, 70], [0, 1, 20, 20, 69, 70]], ids=str)
def test_packed_documents_are_separate_calls(device: str, borders: list[int], causal: bool, dtype: torch.dtype):
    """In both forms, with lse, sinks and all gradients; blocks beyond a document's end are none."""
    names = ("query", "key", "value", "sinks")
    packed = [leaf(x[0].transpose(0, 1).contiguous(), device) for x in operands(batch=1, dtype=dtype).values()]
    packed.append(leaf(random(seeded(7), 4, dtype=dtype), device))
    chosen, cu_seqlens = chosen_blocks(70, 2, 3, columns=6).to(device), torch.tensor(borders, device=device)
    options: dict[str, Any] = {"causal": causal, "return_lse": True}

    def loss(output: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return output.float().sin().sum() + lse.cos().sum()

    *three, sinks = packed
    found = selected_attention(*three, chosen, 16, cu_seqlens=cu_seqlens, sinks=sinks, **options)
    in_a_row = [x.transpose(0, 1)[None] for x in (*three, chosen)]
    of_row = selected_attention(*in_a_row, 16, cu_seqlens=cu_seqlens.int(), sinks=sinks, **options)
    for x, y in zip(found, of_row, strict=True):
        assert torch.equal(x, y[0].transpose(0, 1))
    results = []
    for first, end in pairwise(borders):
        if first < end:
            own = chosen[first:end].transpose(0, 1)[None]
            own = torch.where(own < -(-(end - first) // 16), own, -1)
            one = [x[first:end].transpose(0, 1)[None] for x in three]
            results.append([x[0].transpose(0, 1) for x in selected_attention(*one, own, 16, sinks=sinks, **options)])
    expected = tuple(map(torch.cat, zip(*results, strict=True)))
    wide = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found, expected, **wide)
    grads, of_each = (torch.autograd.grad(loss(*x), packed) for x in (found, expected))
    for name, x, y in zip(names, grads, of_each, strict=True):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **wide)


@pytest.mark.parametrize("cu_seqlens", [[0, 30], [0, 40, 20, 70], [3, 70], [0, 80]], ids=str)
def test_borders_that_do_not_fit(device: str, cu_seqlens: list[int]):
    """An error where the host knows them, NaN where they are on a GPU."""
    query, key, value = (x[0].transpose(0, 1) for x in operands(batch=1).values())
    chosen, borders = chosen_blocks(70, 2, 3, columns=5), torch.tensor(cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens"):
        selected_attention(query, key, value, chosen, 16, cu_seqlens=borders)
    if device == "cuda":
        given = [x.to(device) for x in (query, key, value, chosen)]
        assert selected_attention(*given, 16, cu_seqlens=borders.to(device)).isnan().all()


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("of_each", [False, True])
def test_new_queries_of_cached_keys(device: str, tokens: int, of_each: bool):
    """Are the last rows of the whole call; sequences may be of other lengths."""
    tensors, chosen = operands(90), chosen_blocks(2, 2, 90, 3, columns=6)
    whole = run(device, *tensors.values(), chosen, block=16, causal=True)
    at = [90 - tokens, 31] if of_each else [90 - tokens] * 2
    query, own = (
        torch.stack([x[i, :, first : first + tokens] for i, first in enumerate(at)]) for x in (tensors["query"], chosen)
    )
    offset = torch.tensor(at, dtype=torch.int32) if of_each else at[0]
    given = query, tensors["key"], tensors["value"], own
    output, lse, grad_query, *_ = run(device, *given, block=16, causal=True, query_offset=offset)
    for i, first in enumerate(at):
        rows = slice(first, first + tokens)
        torch.testing.assert_close(output[i], whole[0][i, :, rows])
        torch.testing.assert_close(lse[i], whole[1][i, :, rows])
        torch.testing.assert_close(grad_query[i], whole[2][i, :, rows])


@pytest.mark.parametrize("view", OPERAND_VIEWS)
def test_operands_in_any_strides(device: str, view: str):
    tensors = operands(40, depth=24, dtype=torch.bfloat16)
    viewed = {name: as_view(x, view) for name, x in tensors.items()}
    hold(attention_case(viewed, as_view(chosen_blocks(2, 2, 40, 2, columns=3), "transposed"), 16), device)


@pytest.mark.parametrize("padding", ["bool", "added", "of one", "nothing"])
def test_key_padding(device: str, padding: str):
    mask = torch.rand(2, 70, generator=seeded(3)) < 0.6
    if padding == "added":
        mask = torch.where(mask, torch.randn(2, 70, generator=seeded(4)), -math.inf)
    mask = mask[:1] if padding == "of one" else mask & False if padding == "nothing" else mask
    tensors = operands() | {"key_padding_mask": mask}
    hold(attention_case(tensors, chosen_blocks(2, 4, 70, 3, columns=5), 16, causal=True), device)


@pytest.mark.parametrize("causal", [False, True])
def test_the_statement_of_reference(causal: bool):
    """Also of documents, offsets and padding: what readers compare with."""
    tensors, chosen = operands(dtype=torch.float64), chosen_blocks(2, 2, 70, 3, columns=5)
    options: dict[str, Any] = {"causal": causal, "return_lse": True, "sinks": random(seeded(1), 4)}
    more = {"key_padding_mask": torch.rand(1, 70, generator=seeded()) < 0.7, "query_offset": torch.tensor([30, 2])}
    results = [
        call(*tensors.values(), chosen, 16, **options, **more)
        for call in (selected_attention, reference.selected_attention)
    ]
    torch.testing.assert_close(*results)
    row = [x[0].transpose(0, 1) for x in (*tensors.values(), chosen)]
    cu_seqlens = torch.tensor([0, 9, 9, 50, 70])
    results = [
        call(*row, 16, **options, cu_seqlens=cu_seqlens) for call in (selected_attention, reference.selected_attention)
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("packed", [False, True])
def test_a_graph_chooses_the_blocks_itself(device: str, packed: bool):
    """In one graph for several lengths, with gradients; nothing is built before."""
    torch._dynamo.reset()

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None):
        means = key[:, :, : key.shape[2] // 16 * 16].unflatten(2, (-1, 16)).mean(3)
        scores = query.unflatten(1, (2, 2)).sum(2) @ means.mT
        return selected_attention(query, key, value, scores.topk(2).indices, 16, causal=True, cu_seqlens=cu_seqlens)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (70, 90, 121):
        given = [leaf(x, device) for x in operands(tokens, batch=1 if packed else 2).values()]
        cu_seqlens = torch.tensor([0, 20, 41, tokens], device=device) if packed else None
        found, expected = (call(*given, cu_seqlens) for call in (compiled, step))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), given) for x in (found, expected)))
    assert counter.frame_count == 1


def test_transforms_of_what_chooses(device: str):
    """Blocks chosen inside of a transform; others for each sample are refused."""
    query, key, value = (x.to(device) for x in operands().values())

    def loss(query: torch.Tensor) -> torch.Tensor:
        scores = query.sum(1, keepdim=True)[..., :5]
        return selected_attention(query, key, value, scores.topk(2).indices, 16).sin().sum()

    expected = query.clone().requires_grad_()
    torch.testing.assert_close(grad(loss)(query), torch.autograd.grad(loss(expected), expected)[0])
    chosen = chosen_blocks(3, 2, 1, 70, 2, columns=5).to(device)
    with pytest.raises(ValueError, match="block_indices is another one for each sample of torch.vmap; give one for"):
        vmap(lambda x: selected_attention(query, key, value, x, 16))(chosen)


def test_samples_of_vmap_with_choices_of_sequences(device: str):
    given = [random(seeded(i), 3, *x.shape).to(device, torch.float32) for i, x in enumerate(operands().values())]
    offsets = torch.tensor([5, 60], device=device)
    for of_batch, of_heads in ((1, 2), (2, 1)):
        chosen = chosen_blocks(of_batch, of_heads, 70, 2, columns=5).to(device)
        for more in ({}, {"causal": True, "query_offset": offsets}):

            def call(q, k, v, chosen=chosen, more=more):
                return selected_attention(q, k, v, chosen, 16, **more)

            torch.testing.assert_close(vmap(call)(*given), torch.stack([call(*x) for x in zip(*given)]))
            of_values = vmap(grad(lambda v, q, k, call=call: call(q, k, v).sin().sum()))(given[2], *given[:2])
            for x, sample in zip(of_values, zip(*given), strict=True):
                value = sample[2].clone().requires_grad_()
                expected = torch.autograd.grad(call(*sample[:2], value).sin().sum(), value)
                torch.testing.assert_close(x, expected[0])


class Largest(TorchDispatchMode):
    """The largest tensor that an operator returns, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return results


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_as_large_as_tokens_times_keys(packed: bool):
    query, key, value = operands(2048, 1, 1, batch=1, depth=8, dtype=torch.bfloat16).values()
    more = {"cu_seqlens": torch.tensor([0, 1000, 2048])} if packed else {}
    chosen = chosen_blocks(1, 1, 2048, 2, columns=16)
    with Largest() as largest:
        selected_attention(query.requires_grad_(), key, value, chosen, 128, causal=True, **more).sum().backward()
    assert largest.bytes < 2048 * 2048 // 16


REFUSED = [
    (TypeError, r"block_indices is torch\.float32; it has to be an int32 or int64 tensor", {"chosen": torch.zeros(1)}),
    (TypeError, "block_indices is list; it has to be an int32 or int64 tensor", {"chosen": [0]}),
    (ValueError, r"block_indices has shape \(70, 2\); for 70 tokens of 4 heads, and 2 heads of keys, it has to be "
     r"\(2 or 1, 2 or 4 or 1, 70, k\)", {"chosen": torch.zeros(70, 2).int()}),
    (ValueError, r"block_indices has shape \(1, 2, 70, 2\); .* it has to be \(70, 2 or 4 or 1, k\)", {
        "query": torch.zeros(70, 4, 16), "key": torch.zeros(70, 2, 16), "value": torch.zeros(70, 2, 16),
        "cu_seqlens": torch.tensor([0, 70]), "chosen": torch.zeros(1, 2, 70, 2).int(),
    }),
    (ValueError, r"block_indices has shape \(2, 3, 70, 2\)", {"chosen": torch.zeros(2, 3, 70, 2).int()}),
    (ValueError, r"block_indices has shape \(2, 2, 70, 0\)", {"chosen": torch.zeros(2, 2, 70, 0).int()}),
    (ValueError, r"block_indices has shape \(2, 2, 69, 2\)", {"chosen": torch.zeros(2, 2, 69, 2).int()}),
    (ValueError, "block is 8; selected_attention takes 16, 32, 64, 128, 256, 512 and 1024", {"block": 8}),
    (ValueError, "block is 48; selected_attention takes 16, 32, 64, 128, 256, 512 and 1024", {"block": 48}),
    (ValueError, "query_offset is -1; it is the position of the first query", {"query_offset": -1}),
    (ValueError, "query_offset is -3; it is", {"query_offset": torch.tensor([4, -3])}),
    (ValueError, r"query_offset has shape \(3,\); it has to be an integer, or \(2,\)",
     {"query_offset": torch.zeros(3).int()}),
    (TypeError, r"query_offset is a tensor of torch\.float32", {"query_offset": torch.zeros(2)}),
    (TypeError, "query_offset is None; it has to be an integer", {"query_offset": None}),
    (ValueError, r"sinks has shape \(2,\); it has to be \(4,\)", {"sinks": torch.zeros(2)}),
    (ValueError, "key_padding_mask has shape", {"key_padding_mask": torch.ones(2, 69).bool()}),
    (ValueError, "scale is inf; it has to be finite", {"scale": math.inf}),
    (ValueError, "query has 4 heads and key 3", {"key": torch.zeros(2, 3, 70, 16), "value": torch.zeros(2, 3, 70, 16)}),
    (ValueError, r"Tensors are torch\.int32", {
        "query": torch.zeros(2, 4, 70, 16).int(), "key": torch.zeros(2, 2, 70, 16).int(),
        "value": torch.zeros(2, 2, 70, 16).int(),
    }),
    (ValueError, r"\(T, heads, head size\) is for packed documents; give their cu_seqlens",
     {"query": torch.zeros(70, 4, 16)}),
    (ValueError, "block_indices is on meta and query on cpu; move it there",
     {"chosen": torch.zeros(2, 2, 70, 2, dtype=torch.int64, device="meta")}),
    (ValueError, "packed documents are one row", {"cu_seqlens": torch.tensor([0, 70])}),
    (ValueError, "query_offset is given for packed documents",
     {"cu_seqlens": torch.tensor([0, 70]), "query_offset": 1}),
    (ValueError, "key_padding_mask is given for packed documents",
     {"cu_seqlens": torch.tensor([0, 70]), "key_padding_mask": torch.ones(2, 70).bool()}),
    (TypeError, "cu_seqlens is list; it has to be an int32 or int64 tensor", {"cu_seqlens": [0, 70]}),
    (TypeError, "query is a list; it has to be a tensor", {"query": [0]}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "sentence", "changed"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_fit_is_refused_in_words(error: type[Exception], sentence: str, changed: dict[str, Any]):
    given: dict[str, Any] = operands() | {"chosen": torch.zeros(2, 2, 70, 2, dtype=torch.int64), "block": 16} | changed
    options = {"block_indices": given.pop("chosen"), **given}
    with pytest.raises(error, match=sentence):
        selected_attention(**options)
