"""NativeSparseAttention against its statement, in float64 and under what training wraps around it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import random, seeded
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ds_sparse import NativeSparseAttention, reference

SIZES: dict[str, int] = {"block": 16, "k": 3, "length": 8, "stride": 4, "window": 10, "first": 1, "local": 1}
DEPTH = 8


def module(heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64, **sizes: int):
    torch.manual_seed(0)
    made = NativeSparseAttention(heads, key_heads, DEPTH, **SIZES | sizes).to(dtype)
    for parameter in (made.gate_weight, made.gate_bias):
        torch.nn.init.normal_(parameter)
    return made


def operands(tokens: int, heads: int = 4, key_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key and value, and key and value of the window."""
    of_each = heads, *[key_heads] * 4
    rng = seeded(tokens)
    return [random(rng, 2, n, tokens, DEPTH, dtype=dtype).requires_grad_() for n in of_each]


def padded(tokens: int) -> Tensor:
    """The end of one sequence and the start of the other are padding."""
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[0, -(tokens // 3) :] = keep[1, : tokens // 4 + 1] = False
    return keep


def stated(made: NativeSparseAttention, given: list[Tensor], keep: Tensor | None, **more: Any) -> Tensor:
    """The module's parameters in plain PyTorch, and the statement."""
    query, key, value, *of_window = given
    length, stride = made.length, made.stride

    def compressed(by: Any, x: Tensor) -> Tensor:
        begins = range(0, x.shape[2] - length + 1, stride)
        keys = [by.mlp((x[:, :, i : i + length] + by.position).flatten(2)) for i in begins]
        return torch.stack(keys, 2) if keys else x[:, :, :0]

    gates = torch.sigmoid(torch.einsum("bhtd,hdg->bhtg", query, made.gate_weight) + made.gate_bias)
    return reference.nsa(
        query, key, value, compressed(made.compress_key, key), compressed(made.compress_value, value), *of_window,
        more.pop("gates", gates), made.block, made.k, length, stride, made.window, made.first, made.local,
        key_padding_mask=keep, **more,
    )  # fmt: skip


def assert_stated(made: NativeSparseAttention, given: list[Tensor], keep: Tensor | None = None, **more: Any) -> None:
    """Output, and the gradients of operands, parameters and gates."""
    names = dict(zip(("window_key", "window_value"), given[3:], strict=True))
    found = made(*given[:3], **names, key_padding_mask=keep, **more)
    expected = stated(made, given, keep, **more)
    torch.testing.assert_close(found, expected)
    leaves = [*given, *made.parameters(), *(x for x in more.values() if isinstance(x, Tensor))]
    weight = random(seeded(1), *found.shape)
    ours, theirs = (
        torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
        for x in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 11, 12, 48, 61])
def test_output_and_all_gradients_are_those_of_the_statement(tokens: int, heads: tuple[int, int]):
    """Lengths without a compressed key, with one, and that end within a stride."""
    assert_stated(module(*heads), operands(tokens, *heads))


@pytest.mark.parametrize("tokens", [5, 12, 61])
def test_padding_is_not_seen_and_not_compressed(tokens: int):
    assert_stated(module(), operands(tokens), padded(tokens))


def test_what_padding_holds_reaches_nothing():
    made, given, keep = module(), operands(61)[:3], padded(61)
    rows = keep[:, None, :, None]
    spoiled = [given[0], *(torch.where(rows, x, torch.nan) for x in given[1:])]
    results = []
    for query, key, value in (given, spoiled):
        made.zero_grad()
        output = made(query, key, value, key_padding_mask=keep)
        output.masked_fill(~rows, 0).sum().backward()
        results.append([output.masked_fill(~rows, 0), *(parameter.grad for parameter in made.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "sizes",
    [{"length": 4}, {"length": 12}, {"stride": 1, "length": 3}, {"stride": 16, "length": 16}, {"window": 1},
     {"window": 100}, {"first": 0, "local": 0}, {"k": 20}],
    ids=str,
)  # fmt: skip
def test_sizes(sizes: dict[str, int]):
    assert_stated(module(**sizes), operands(50))


@pytest.mark.parametrize(
    ("borders", "length", "compiled"),
    [
        *((borders, length, False) for length in (8, 16, 24)
          for borders in ([0, 90], [0, 64, 90], [0, 1, 17, 17, 60, 90], [0, 7, 14, 21], [0, 3], [0, 15, 31, 48])),
        ([0, 1, 17, 17, 60, 90], 16, True),
    ],
    ids=str,
)  # fmt: skip
def test_packed_documents_are_separate_calls(borders: list[int], length: int, compiled: bool):
    """Also where no document has a compressed key, and where some are empty."""
    torch._dynamo.reset()
    made, given = module(length=length, stride=8), [x[:1] for x in operands(borders[-1])]
    call: Any = torch.compile(made, fullgraph=True, backend="aot_eager") if compiled else made

    def of(x: list[Tensor], call: Any = made, **more: Any) -> Tensor:
        return call(*x[:3], window_key=x[3], window_value=x[4], **more)

    found = of(given, call, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    documents = [[x[:, :, begin:end] for x in given] for begin, end in pairwise(borders) if begin < end]
    expected = torch.cat([of(one) for one in documents], 2)
    torch.testing.assert_close(found, expected)
    weight, leaves = random(seeded(1), *found.shape), [*given, *made.parameters()]
    ours, theirs = (torch.autograd.grad((x * weight).sum(), leaves) for x in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"stride": 1, "length": 3}, {"stride": 16, "length": 16}], ids=str)
def test_later_queries_get_what_the_whole_sequence_gets(sizes: dict[str, int], mask: bool):
    """One token and some, before the first compressed key is there, inside of a stride and at its ends; with gradients
    of keys that are cached. Keys behind the queries are not seen."""
    made, given, keep = module(**sizes), operands(61), padded(61) if mask else None
    names = {"window_key": given[3], "window_value": given[4]}
    whole = made(*given[:3], **names, key_padding_mask=keep)
    for begin, end in [(0, 1), (6, 7), (7, 8), (11, 12), (60, 61), (0, 5), (3, 30), (20, 61), (44, 50)]:
        for keys in (end, 61):
            query, *others = given[0][:, :, begin:end], *(x[:, :, :keys] for x in given[1:])
            more = {"window_key": others[2], "window_value": others[3], "query_offset": begin}
            found = made(query, *others[:2], **more, key_padding_mask=None if keep is None else keep[:, :keys])
            torch.testing.assert_close(found, whole[:, :, begin:end])
            weight, leaves = random(seeded(1), *found.shape), [*given, *made.parameters()]
            ours, theirs = (
                torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True)
                for x in (found, whole[:, :, begin:end])
            )
            torch.testing.assert_close(ours, theirs)


def test_one_compiled_graph_serves_all_positions():
    torch._dynamo.reset()
    counter, made = CompileCounterWithBackend("aot_eager"), module().eval()
    compiled, (query, key, value, *_) = torch.compile(made, backend=counter, fullgraph=True), operands(61)
    with torch.no_grad():
        whole = made(query, key, value)
        for end in range(30, 61):
            one = compiled(query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end], query_offset=end - 1)
            torch.testing.assert_close(one, whole[:, :, end - 1 : end])
    assert counter.frame_count == 2, "one of the first length, and one of all others"


def test_scale_and_gates_of_the_caller():
    gates = random(seeded(3), 2, 4, 30, 3).requires_grad_()
    given, made = operands(30), module()
    names = dict(zip(("window_key", "window_value"), given[3:], strict=True))
    found = made(*given[:3], **names, scale=0.3, gates=gates)
    expected = stated(made, given, None, scale=0.3, gates=gates)
    torch.testing.assert_close(found, expected)
    weight = random(seeded(1), *found.shape)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), [gates, *given]) for x in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_the_window_has_key_and_value_where_it_has_none_of_its_own():
    made, (query, key, value, *_) = module(), operands(40)
    torch.testing.assert_close(made(query, key, value), stated(made, [query, key, value, key, value], None))


def test_gates_are_a_half_at_first():
    torch.manual_seed(0)
    fresh = NativeSparseAttention(4, 2, DEPTH, **SIZES).double()
    given = operands(40)[:3]
    torch.testing.assert_close(fresh(*given), fresh(*given, gates=torch.full((2, 4, 40, 3), 0.5)))


def test_tokens_inside_heads_and_heads_inside_tokens_are_alike():
    made, given = module(), operands(61)[:3]
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in given]
    found, expected = made(*turned), made(*given)
    torch.testing.assert_close(found, expected)
    ours, theirs = (
        torch.autograd.grad(output.square().sum(), [*leaves, *made.parameters()])
        for output, leaves in ((found, turned), (expected, given))
    )
    torch.testing.assert_close(ours, theirs)


def test_it_learns():
    """The mean of all values so far: only compressed keys lead so far back."""
    torch.manual_seed(0)
    made = NativeSparseAttention(2, 1, 16, **SIZES)
    query, key, value = (torch.randn(4, heads, 64, 16) for heads in (2, 1, 1))
    optimizer, losses = torch.optim.Adam(made.parameters(), 0.02), []
    for _ in range(20):
        loss = (made(query, key, value) - value.cumsum(2) / torch.arange(1, 65)[:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_heads": 3}, "num_heads is 3 and num_key_heads 2; the first has to be a multiple of the second"),
        ({"block": 48}, "block is 48; it has to be one of 16, 32"),
        ({"k": 1}, "k is 1, and first=1 and local=1 choose 2 blocks; give k=2 or more"),
        ({"stride": 5}, "stride is 5, length 8 and block 16; both have to be multiples of the stride"),
        ({"length": 0}, "length is 0; it has to be an integer of 1 or more"),
        ({"stride": 4.0}, "stride is 4.0; it has to be an integer of 1 or more"),
        ({"window": "3"}, "window is '3'; it has to be an integer of 1 or more"),
        ({"window": 0}, "window is 0; it has to be an integer of 1 or more"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(more: dict[str, int], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        NativeSparseAttention(**{"num_heads": 4, "num_key_heads": 2, "head_dim": DEPTH} | SIZES | more)


def test_what_is_not_computed_is_a_sentence():
    made, (query, key, value, *_) = module(), operands(20)
    for more, sentence in (
        ({"causal": False}, "causal is False, and NativeSparseAttention is for causal models"),
        ({"cu_seqlens": torch.tensor([0, 20])}, "query has 2 sequences; packed documents are one row"),
        ({"cu_seqlens": torch.tensor([0, 20]), "key_padding_mask": padded(20)}, "key_padding_mask is given for packed"),
        ({"query_offset": 3}, "query_offset is 3, for 20 queries among 20 keys"),
        ({"key_padding_mask": torch.ones(2, 21)}, r"key_padding_mask has shape \(2, 21\)"),
        ({"key_padding_mask": torch.ones(2, 20, dtype=torch.int64)}, "key_padding_mask is torch.int64"),
        ({"gates": torch.ones(2, 4, 20, 1)}, r"gates have shape .*; they have to be \(2, 4, 20, 3\)"),
        ({"gates": torch.ones(3, 4, 20, 3)}, "gates have shape"),
    ):
        with pytest.raises(ValueError, match=sentence):
            made(query, key, value, **more)
    with pytest.raises(TypeError, match="in a window it has to be an integer, the same for all sequences"):
        made(query, key, value, query_offset=torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="stride is 4; of packed documents it has to be a power of two, 8 or more"):
        made(query[:1], key[:1], value[:1], cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="query_offset is given for packed"):
        module(stride=8)(query[:1, :, 16:], key[:1], value[:1], query_offset=16, cu_seqlens=torch.tensor([0, 20]))
    with pytest.raises(ValueError, match=r"the module was built for query \(batch, 4, tokens, 8\)"):
        made(query[:, :2], key, value)
    with pytest.raises(TypeError, match="key"):
        made(query, [1.0], value)
