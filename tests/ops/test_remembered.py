"""Calls that are remembered: one that is like another is not checked again, and one that differs in anything is."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import leaf, random, seeded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sparse import (
    BlockIndex,
    MatMul,
    PackedIndex,
    Softmax,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    force_implementation,
    sparse_attn,
    window_attention,
)
from ds_sparse.index import cache
from ds_sparse.index.master_layout import MasterLayout
from ds_sparse.ops import attention, remembered

OPERATORS = ("block_attention_forward", "window_attention_forward", "token_attention_forward", "matmul_sdd")

HEADS, TOKENS, BLOCK = 2, 32, 16
SHAPE = (1, HEADS, TOKENS, 16)
LAYOUT = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]])
PADDING = torch.arange(TOKENS)[None] < 20
CU_SEQLENS = torch.tensor([0, 12, TOKENS], dtype=torch.int32)
PAIRS = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attention", "matmul", "softmax", "token", "window_attention"):
        monkeypatch.setattr(sys.modules[f"ds_sparse.ops.{name}"], "_known", remembered.Remembered())


def of_kinds(device: str) -> dict[str, tuple[Call, list[tuple[int, ...]]]]:
    """Calls of each kind, and the shapes of their operands."""
    layout, padding, pairs, cu_seqlens = (x.to(device) for x in (LAYOUT, PADDING, PAIRS, CU_SEQLENS))
    index = BlockIndex.build(layout, BLOCK)
    packed = PackedIndex.build(layout, cu_seqlens, BLOCK)
    window = WindowIndex.build(TOKENS, 5, causal=True, device=device)
    dilated = WindowIndex.build(TOKENS, 5, dilation=2, device=device)
    tokens = TokenIndex.from_mask(pairs)
    values, offsets = tokens.csr()
    scores = (1, int(LAYOUT.sum()), BLOCK, BLOCK)
    bias = random(seeded(3), 1, 1, TOKENS, TOKENS).to(device, torch.float32)
    master = MasterLayout(LAYOUT.bool(), BLOCK)
    sdd, dsd = MatMul(index, BLOCK, "sdd", trans_b=True), MatMul(index, BLOCK, "dsd")
    dds, row = MatMul(index, BLOCK, "dds", trans_b=True), (TOKENS, HEADS, 16)
    probs = Softmax(index, BLOCK)
    three, packed_three = [SHAPE] * 3, [row] * 3
    return {
        "index": (lambda *x: block_sparse_attention(*x, index), three),
        "causal": (lambda *x: block_sparse_attention(*x, index, causal=True, return_lse=True)[1], three),
        "layout": (lambda *x: block_sparse_attention(*x, layout, scale=0.5), three),
        "layout of modules": (lambda *x: block_sparse_attention(*x, master, causal=True), three),
        "padding": (lambda *x: block_sparse_attention(*x, index, key_padding_mask=padding), three),
        "bias": (lambda *x: block_sparse_attention(*x[:3], index, rpe=bias, sinks=x[3]), [*three, (HEADS,)]),
        "another head size": (lambda *x: block_sparse_attention(*x, index), [(1, HEADS, TOKENS, 12)] * 3),
        "packed": (lambda *x: block_sparse_attention(*x, packed, return_lse=True)[1], three),
        "packed, tokens first": (
            lambda *x: block_sparse_attention(*x, layout, block=BLOCK, cu_seqlens=cu_seqlens),
            packed_three,
        ),
        "packed row": (
            lambda *x: block_sparse_attention(
                *x, layout, block=BLOCK, cu_seqlens=cu_seqlens, document_layout="row"
            ),
            three,
        ),
        "window": (lambda *x: window_attention(*x, window, key_padding_mask=padding), three),
        "dilated window": (lambda *x: window_attention(*x, dilated), three),
        "window of a number": (lambda *x: window_attention(*x, 5, causal=True), three),
        "pairs": (lambda *x: sparse_attn(*x, tokens), three),
        "pairs of lists": (lambda *x: sparse_attn(*x, values, offsets, return_lse=True)[1], [SHAPE[1:]] * 3),
        "pairs of documents": (lambda *x: sparse_attn(*x, tokens, cu_seqlens=cu_seqlens), packed_three),
        "sdd": (sdd, [SHAPE, SHAPE]),
        "dsd": (dsd, [scores, SHAPE]),
        "dds": (dds, [(1, HEADS, 8, TOKENS), scores]),
        "softmax": (lambda x: probs(x, 0.5, causal=True), [scores]),
    }  # fmt: skip


KINDS = tuple(of_kinds("cpu"))


def operands(device: str, shapes: list[tuple[int, ...]] | None = None) -> list[torch.Tensor]:
    given = random(seeded(), len(shapes or [SHAPE] * 3), 1 << 12)
    return [
        leaf(x[: torch.Size(shape).numel()].view(shape).float(), device)
        for x, shape in zip(given, shapes or [SHAPE] * 3)
    ]


def never(*call: Any) -> None:
    raise AssertionError("The call is not remembered.")


def test_layouts_and_documents_of_several_kinds_take_turns(monkeypatch: pytest.MonkeyPatch):
    given = operands("cpu")
    calls = [
        *({"layout": torch.ones(blocks, blocks, dtype=torch.bool)} for blocks in (1, 2, 4)),
        *({"layout": LAYOUT, "cu_seqlens": torch.tensor([0, edge, TOKENS]), "block": BLOCK} for edge in (12, 20)),
    ]
    expected = [block_sparse_attention(*given, **call) for call in calls]
    monkeypatch.setattr(remembered.Remembered, "keep", never)
    for call, output in zip(calls, expected):
        assert torch.equal(block_sparse_attention(*given, **call), output)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_is_like_another_gives_the_same_bits_unchecked(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    call, shapes = of_kinds(device)[name]
    given = operands(device, shapes)
    first = call(*given)
    expected = first, *torch.autograd.grad(first.sin().sum(), given)
    with torch.no_grad():
        call(*given)
    monkeypatch.setattr(remembered.Remembered, "keep", never)
    for _ in range(2):
        result = call(*given)
        found = result, *torch.autograd.grad(result.sin().sum(), given)
        assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        result = call(*given)
    assert torch.equal(result, expected[0])
    assert not result.requires_grad


WRONG = {
    "dtype of one": (lambda x: {"key": x.double()}, r"key is torch\.float64 and query torch\.float32"),
    "shape": (lambda x: {"value": x[:, :, 1:]}, "those of key and value equal"),
    "tokens": (lambda x: {"query": x[:, :, :15]}, "The layout has 2 x 2 blocks"),
    "heads": (lambda x: dict.fromkeys(("query", "key", "value"), x[:, :1]), "query has 1 heads and the layout 2"),
    "block": (lambda x: {"block": 32}, "The layout has 2 x 2 blocks|block is 32, and the index was built for"),
    "no block": (lambda x: {"block": 17}, "block is 17; attention takes|block is 17, and the index was built for"),
    "scale": (lambda x: {"scale": float("nan")}, "scale is nan; it has to be finite"),
    "no scale": (lambda x: {"scale": "1"}, "scale is '1'; it has to be a number"),
    "dropout": (lambda x: {"dropout_p": 1.0}, r"dropout_p is 1\.0; it has to be 0 or more and below 1"),
    "mask": (lambda x: {"key_padding_mask": torch.ones(1, 31).bool()}, r"key_padding_mask has shape \(1, 31\)"),
    "mask of numbers": (lambda x: {"key_padding_mask": torch.ones(1, 32).int()}, r"key_padding_mask is torch\.int32"),
    "sinks": (lambda x: {"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
    "sparse": (lambda x: {"value": x.detach().to_sparse()}, "value is a tensor of layout torch.sparse_coo"),
    "no tensor": (lambda x: {"query": [1]}, "query is a list; it has to be a tensor"),
    "documents": (lambda x: {"document_layout": "row"}, "there are no packed documents"),
    "no layout": (lambda x: {"layout": [[1]]}, "A layout is a torch tensor of 0s and 1s, got list"),
    "layout": (lambda x: {"layout": torch.ones(3, 2, 2)}, "query has 2 heads and the layout 3"),
    "sparse layout": (lambda x: {"layout": LAYOUT.to_sparse()}, "A layout is a dense tensor of 0s and 1s"),
    "values of a layout": (lambda x: {"layout": LAYOUT * 2}, "A layout holds only 0 and 1"),
    "index": (lambda x: {"layout": BlockIndex.build(torch.ones(3, 2, 2), BLOCK)}, "and the layout 3"),
}


@pytest.mark.parametrize("layout", [LAYOUT, BlockIndex.build(LAYOUT, BLOCK)], ids=["layout", "index"])
@pytest.mark.parametrize("case", WRONG)
def test_a_call_that_differs_is_checked(case: str, layout: Any):
    change, sentence = WRONG[case]
    (x,) = operands("cpu", [SHAPE])
    valid = {"query": x, "key": x, "value": x, "layout": layout, "key_padding_mask": PADDING}
    for _ in range(2):
        block_sparse_attention(**valid)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=sentence):
            block_sparse_attention(**(valid | change(x)))
    block_sparse_attention(**valid)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda x: window_attention(x, x, x, True), "window_size is True; it has to be an integer"),
        (lambda x: window_attention(x, x, x, 1.0), "window_size is 1.0; it has to be an integer"),
        (lambda x: window_attention(x, x, x, -1), "window_size is -1; it has to be 0 or more"),
        (lambda x: window_attention(x, x, x, WindowIndex.build(31, 1)), "The WindowIndex is for 31 tokens"),
        (lambda x: sparse_attn(x, x, x, TokenIndex.from_mask(PAIRS[:31])), "The lists are for 31 query"),
        (lambda x: sparse_attn(x, x, x, TokenIndex.from_mask(PAIRS), torch.ones(32)), "leave offsets out"),
        (lambda x: MatMul(LAYOUT, BLOCK, "sdd")(x, x), "must match size of tensor B"),
        (lambda x: Softmax(LAYOUT, BLOCK)(x), r"x has shape \(1, 2, 32, 16\)"),
    ],
)
def test_other_operations_check_a_call_that_differs(call: Call, sentence: str):
    (x,) = operands("cpu", [SHAPE])
    for _ in range(2):
        window_attention(x, x, x, 1)
        sparse_attn(x, x, x, TokenIndex.from_mask(PAIRS))
        MatMul(LAYOUT, BLOCK, "sdd", trans_b=True)(x, x)
    with pytest.raises((ValueError, TypeError), match=sentence):
        call(x)


def test_operands_that_lie_otherwise_give_the_same(device: str):
    query, key, value = operands(device)
    index = BlockIndex.build(LAYOUT.to(device), BLOCK)
    expected = [block_sparse_attention(query, key, value, index) for _ in range(2)][1]
    turned = query.detach().transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.empty(*SHAPE[:3], 33, device=device)[..., :16].copy_(query.detach())
    moved = torch.empty(query.numel() + 1, device=device)[1:].view(SHAPE).copy_(query.detach())
    for other in (turned, apart, moved, torch.nn.Parameter(query.detach())):
        for _ in range(2):
            torch.testing.assert_close(block_sparse_attention(other, key, value, index), expected)


@pytest.mark.parametrize("name", ["sdd", "dsd", "dds"])
def test_gradients_of_a_product_may_lie_anywhere(device: str, name: str):
    call, shapes = of_kinds(device)[name]
    dtype = torch.float32 if device == "cpu" else torch.float16  # which has kernels that read some places alone
    given = [leaf(x.detach().to(dtype), device) for x in operands(device, shapes)]
    grad = torch.randn_like(call(*given))
    expected = torch.autograd.grad(call(*given), given, grad)
    turned = grad.mT.contiguous().mT
    moved = torch.empty(grad.numel() + 1, device=device, dtype=dtype)[1:].view(grad.shape).copy_(grad)
    for other in (grad, turned, moved, torch.zeros_like(grad), grad[:, :, :1].expand_as(grad)):
        wanted = expected if torch.equal(other, grad) else torch.autograd.grad(call(*given), given, other.clone())
        torch.testing.assert_close(torch.autograd.grad(call(*given), given, other), wanted)


def test_what_is_written_into_a_layout_counts(device: str):
    layout, given = torch.ones(HEADS, 2, 2, dtype=torch.bool, device=device), operands(device)
    for _ in range(2):
        block_sparse_attention(*given, layout)
    layout[:, 0, 1] = False
    found = block_sparse_attention(*given, layout)
    assert torch.equal(found, block_sparse_attention(*given, layout.clone()))
    numbers = torch.ones(HEADS, 2, 2, device=device)
    for _ in range(2):
        block_sparse_attention(*given, numbers)
    numbers[0, 0, 0] = 2
    with pytest.raises(ValueError, match="A layout holds only 0 and 1"):
        block_sparse_attention(*given, numbers)


def test_an_implementation_that_is_forced_later_is_asked():
    (x,) = operands("cpu", [SHAPE])
    for _ in range(2):
        block_sparse_attention(x, x, x, LAYOUT)
    with force_implementation("hopper"), pytest.raises(ValueError, match="'hopper', which force_implementation names"):
        block_sparse_attention(x, x, x, LAYOUT)
    block_sparse_attention(x, x, x, LAYOUT)


@pytest.mark.parametrize("name", ["index", "packed", "window", "pairs", "sdd"])
def test_autocast_casts_what_was_remembered_without(device: str, name: str):
    call, shapes = of_kinds(device)[name]
    given = operands(device, shapes)
    for _ in range(2):
        assert call(*given).dtype == torch.float32
        with torch.autocast(device, torch.bfloat16):
            assert name == "packed" or call(*given).dtype == torch.bfloat16
            call(*(x.bfloat16() for x in given))
            with pytest.raises(ValueError, match="dtype"):
                call(given[0].double(), *given[1:])


def test_a_mask_may_require_a_gradient_only_where_none_is_recorded():
    given, mask = operands("cpu"), torch.zeros(1, TOKENS, requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            assert not block_sparse_attention(*given, LAYOUT, key_padding_mask=mask).requires_grad
        with pytest.raises(ValueError, match="key_padding_mask requires a gradient"):
            block_sparse_attention(*given, LAYOUT, key_padding_mask=mask)
    assert block_sparse_attention(*given, LAYOUT, key_padding_mask=mask.detach()).requires_grad


class Recorded(TorchDispatchMode):
    """Keeps the arguments of an operator's calls."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.calls = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.__name__.startswith(self.name):
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def test_deterministic_algorithms_are_asked_for_at_each_backward():
    given = operands("cpu")
    with Recorded("block_attention_backward") as recorded:
        for wanted in (False, False, True, False):
            output = block_sparse_attention(*given, LAYOUT)
            torch.use_deterministic_algorithms(wanted)
            try:
                output.sum().backward()
            finally:
                torch.use_deterministic_algorithms(False)
    assert [call[-2] for call in recorded.calls] == [False, False, True, False]


def test_dropout_draws_anew_at_each_call(device: str):
    given = operands(device)
    first, second, third = (block_sparse_attention(*given, LAYOUT.to(device), dropout_p=0.5) for _ in range(3))
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.parametrize("name", KINDS)
def test_transforms_and_modes_take_what_is_remembered(name: str):
    call, shapes = of_kinds("cpu")[name]
    given = operands("cpu", shapes)
    for _ in range(2):
        expected = call(*given)
    (grad,) = torch.autograd.grad(expected.sin().sum(), given[:1])
    found = torch.func.grad(lambda x: call(x, *given[1:]).sin().sum())(given[0].detach())
    torch.testing.assert_close(found, grad)
    with torch.inference_mode():
        torch.testing.assert_close(call(*given), expected)
        torch.testing.assert_close(call(*(x.clone() for x in given)), expected)
    torch.testing.assert_close(call(*given), expected)
    if name not in ("packed", "packed, tokens first", "packed row", "pairs of documents"):  # one row
        found = torch.func.vmap(lambda x: call(x, *(y.detach() for y in given[1:])))(given[0].detach()[None])
        torch.testing.assert_close(found[0], expected)


def test_what_has_no_values_is_not_taken_for_what_has():
    index, given = BlockIndex.build(LAYOUT, BLOCK), operands("cpu")
    for _ in range(2):
        assert block_sparse_attention(*(x.to("meta") for x in given), index).is_meta
        expected = block_sparse_attention(*given, index)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            result = block_sparse_attention(*(fake.from_tensor(x) for x in given), index)
            assert (result.shape, result.device, type(result).__name__) == (
                expected.shape,
                expected.device,
                "FakeTensor",
            )

    class Own(torch.Tensor):
        pass

    assert type(block_sparse_attention(*(x.detach().as_subclass(Own) for x in given), index)) is Own


def test_a_trace_takes_nothing_that_is_remembered():
    index, given = BlockIndex.build(LAYOUT, BLOCK), operands("cpu")
    expected = [block_sparse_attention(*given, index) for _ in range(2)][1]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: block_sparse_attention(*x, index), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*given), expected) and torch.equal(compiled(*given), expected)


def test_an_index_is_let_go():
    index, given = BlockIndex.build(LAYOUT, BLOCK), operands("cpu")
    block_sparse_attention(*given, index)
    (known,) = attention._known._found.values()
    assert list(known.walks) == [index]
    there = weakref.ref(index)
    del index
    gc.collect()
    assert there() is None and not known.walks


@pytest.mark.parametrize("offset", [None, TOKENS - 1], ids=["whole", "a new token"])
def test_an_index_of_a_call_in_a_capture_is_not_let_go(offset: int | None, monkeypatch: pytest.MonkeyPatch):
    """On the CPU, where an index has no event, but one that stands in for it."""
    index, (query, key, value) = BlockIndex.build(LAYOUT, BLOCK), (x.detach() for x in operands("cpu"))
    query = query if offset is None else query[:, :, :1]
    block_sparse_attention(query, key, value, index, query_offset=offset)
    monkeypatch.setattr(remembered.Remembered, "keep", never)
    monkeypatch.setattr(cache, "captured", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(index._ready, "_event", object())
    block_sparse_attention(query, key, value, index, query_offset=offset)
    assert cache.captured == {index}


def test_many_others_push_out_what_is_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "MOST", 3)
    given = operands("cpu")
    for number in range(8):
        block_sparse_attention(*given, LAYOUT, scale=1.0 + number)
    assert len(attention._known._found) <= 3


def test_threads_share_what_is_remembered():
    given, index = [x.detach() for x in operands("cpu")], BlockIndex.build(LAYOUT, BLOCK)
    expected = [block_sparse_attention(*given, index, scale=1.0 + n) for n in range(4)]
    attention._known._found.clear()

    def attend(number: int) -> bool:
        return torch.equal(block_sparse_attention(*given, index, scale=1.0 + number % 4), expected[number % 4])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(attend, range(200)))
