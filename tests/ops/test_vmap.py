"""Every operation under torch.func's transforms: what they give equals separate calls and autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count

import pytest
import torch
from helpers import random, seeded
from torch.func import grad, jacrev, vjp, vmap

from ds_sparse import (
    BlockIndex,
    MatMul,
    Softmax,
    TokenIndex,
    WindowIndex,
    block_sparse_attention,
    gather_attention,
    masked_attention,
    sparse_attn,
    sparse_matmul,
    sparse_matmul_vo,
    unwindow_matmul,
    window_attention,
    window_matmul,
    window_softmax,
)
from ds_sparse.ops import _library

OPERATORS = _library.OPERATORS

SAMPLES, BATCH, HEADS, TOKENS = 3, 2, 2, 16
LAYOUT = torch.tensor([[[1, 0], [1, 1]], [[0, 1], [1, 1]]])
SEEN = torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=seeded(1)) < 0.6
PADDING = torch.rand(BATCH, TOKENS, generator=seeded(2)) < 0.8

QUERY = (BATCH, HEADS, TOKENS, 8)
BIAS = (BATCH, HEADS, TOKENS, TOKENS)
VALUES = (BATCH, int(LAYOUT.sum()), 8, 8)
BAND = (BATCH, HEADS, TOKENS, 7)

Operation = tuple[Callable, list[tuple[int, ...]]]


def of_blocks(device: str) -> dict[str, Operation]:
    # Moved layouts are new tensors: their indices are built while a transform is at work.
    layout, padding = LAYOUT.to(device), PADDING.to(device)

    def attention(**options) -> Callable:
        return lambda q, k, v, *rpe: block_sparse_attention(q, k, v, layout, rpe=rpe[0] if rpe else None, **options)

    def with_lse(q, k, v):
        output, lse = block_sparse_attention(q, k, v, layout, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    def softmax(values, bias, mask):
        return Softmax(layout, 8)(values, 0.3, rpe=bias, attn_mask=mask)

    grouped = [(1, 2, TOKENS, 20), *[(1, 1, TOKENS, 20)] * 2]
    return {
        "attention": (attention(key_padding_mask=padding), [QUERY] * 3),
        "attention, causal, with rpe": (attention(causal=True), [*[QUERY] * 3, BIAS]),
        "attention, shared rpe": (attention(), [*[QUERY] * 3, (1, 1, TOKENS, TOKENS)]),
        "attention, grouped heads of another size": (attention(), grouped),
        "attention with lse": (with_lse, [QUERY] * 3),
        "sdd": (lambda a, b: MatMul(layout, 8, "sdd", trans_b=True)(a, b), [QUERY] * 2),
        "dsd": (lambda p, v: MatMul(layout, 8, "dsd")(p, v), [VALUES, QUERY]),
        "dds": (lambda x, p: MatMul(layout, 8, "dds", trans_a=True)(x, p), [QUERY, VALUES]),
        "softmax": (softmax, [VALUES, BIAS[1:], BIAS[2:]]),
    }


def of_windows(device: str) -> dict[str, Operation]:
    padding, several = PADDING.to(device), torch.tensor([3, 1])
    index = WindowIndex.build(TOKENS, [3, 2], True, [3], [1, 2], device=device)
    return {
        "window_matmul": (lambda a, b: window_matmul(a, b.mT, 3), [QUERY] * 2),
        "unwindow_matmul": (lambda p, v: unwindow_matmul(p, v, 3), [BAND, QUERY]),
        "window_softmax": (lambda s: window_softmax(s, several, key_padding_mask=padding), [BAND]),
        "window_attention": (lambda q, k, v: window_attention(q, k, v, 3, key_padding_mask=padding), [QUERY] * 3),
        "window_attention in an order": (lambda q, k, v: window_attention(q, k, v, index), [QUERY] * 3),
    }


def of_pairs(device: str) -> dict[str, Operation]:
    def index(seen: torch.Tensor) -> TokenIndex:
        return TokenIndex.from_mask(seen).to(device)

    seen, shared, of_heads, of_batch = SEEN.to(device), index(SEEN[0, 0]), index(SEEN[0]), index(SEEN[:, :1])
    every = index(SEEN)
    values, offsets = shared.csr()
    backwards = shared.pairs().flip(0)

    def joined(lists: object) -> torch.Tensor:
        return lists if isinstance(lists, torch.Tensor) else torch.cat([joined(x) for x in lists], -1)

    def with_lse(q, k, v):
        output, lse = sparse_attn(q, k, v, of_heads, return_lse=True)
        return output.sum(-1) + lse.to(output.dtype)

    return {
        "sparse_attn": (lambda q, k, v: sparse_attn(q, k, v, values, offsets), [QUERY] * 3),
        "sparse_attn, a list a head, with lse": (with_lse, [QUERY] * 3),
        "sparse_attn, a list a sequence": (lambda q, k, v: sparse_attn(q, k, v, of_batch), [QUERY] * 3),
        "sparse_attn, a list a sequence and head": (lambda q, k, v: sparse_attn(q, k, v, every), [QUERY] * 3),
        "sparse_matmul": (lambda q, k: sparse_matmul(q, k, backwards), [QUERY] * 2),
        "sparse_matmul, lists": (lambda q, k: joined(sparse_matmul(q, k, every)), [QUERY] * 2),
        "sparse_matmul_vo": (lambda q, k: sparse_matmul_vo(q, k, values, offsets), [QUERY] * 2),
        "masked_attention": (lambda q, k, v: masked_attention(q, k, v, seen), [QUERY] * 3),
        "gather_attention": (lambda q, k, v: gather_attention(q, k, v, values, offsets), [QUERY] * 3),
        "gather_attention, a list a head": (lambda q, k, v: gather_attention(q, k, v, of_heads), [QUERY] * 3),
    }


@cache
def operations(device: str) -> dict[str, Operation]:
    return of_blocks(device) | of_windows(device) | of_pairs(device)


@pytest.fixture(params=list(operations("cpu")))
def operation(device: str, request: pytest.FixtureRequest) -> Operation:
    return operations(device)[request.param]


def inputs(device: str, shapes: list[tuple[int, ...]], *lead: int) -> tuple[torch.Tensor, ...]:
    dtype = torch.float64 if device == "cpu" else torch.float32
    rng = seeded()
    return tuple(random(rng, *lead, *shape, dtype=dtype).to(device) for shape in shapes)


def number(call: Callable) -> Callable:
    """A loss of a call's result."""
    return lambda *given: call(*given).sin().sum()


def by_autograd(call: Callable, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    given = [x.detach().requires_grad_() for x in given]
    return list(torch.autograd.grad(number(call)(*given), given))


def close(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **({"atol": 1e-4, "rtol": 1e-4} if one.is_cuda else {}))


def test_grad_is_autograds(device: str, operation: Operation):
    call, shapes = operation
    given = inputs(device, shapes)
    every = tuple(range(len(given)))
    found = grad(number(call), every)(*given)
    close(found, by_autograd(call, given))
    # What was built in the transform is as good outside of it, and in the next one.
    close(by_autograd(call, given), found)
    _, pull = vjp(number(call), *given)
    close(pull(given[0].new_ones(())), found)


def test_gradients_of_each_sample(device: str, operation: Operation):
    call, shapes = operation
    given = inputs(device, shapes, SAMPLES)
    every = tuple(range(len(given)))
    each = [by_autograd(call, tuple(x[i] for x in given)) for i in range(SAMPLES)]
    expected = [torch.stack(of_one) for of_one in zip(*each)]
    close(vmap(grad(number(call), every))(*given), expected)
    close(grad(lambda *given: vmap(number(call))(*given).sum(), every)(*given), expected)
    close(torch.unbind(vmap(call)(*given)), [call(*(x[i] for x in given)) for i in range(SAMPLES)])


def test_one_operand_a_sample_and_the_others_shared(device: str, operation: Operation):
    call, shapes = operation
    given = inputs(device, shapes)
    many = inputs(device, shapes, SAMPLES)
    for place in range(len(given)):
        dims = [None] * len(given)
        dims[place] = -1
        now = [*given]
        now[place] = many[place].movedim(0, -1)
        found = vmap(grad(number(call), place), tuple(dims))(*now)
        for i in range(SAMPLES):
            now[place] = many[place][i]
            close([found[i]], [by_autograd(call, tuple(now))[place]])


@pytest.mark.parametrize("name", ["attention, shared rpe", "sdd", "softmax", "window_softmax", "sparse_attn"])
def test_vmap_in_vmap(device: str, name: str):
    call, shapes = operations(device)[name]
    given = inputs(device, shapes, 2, SAMPLES)
    found = vmap(vmap(grad(number(call))), in_dims=1)(*(x.transpose(0, 1) for x in given))
    for i in range(2):
        close([found[i]], [vmap(grad(number(call)))(*(x[i] for x in given))])


@pytest.mark.parametrize("name", ["attention", "softmax", "dsd", "window_attention in an order", "sparse_attn"])
def test_jacobians(device: str, name: str):
    call, shapes = operations(device)[name]
    given = inputs(device, shapes)
    numbers = count()

    def some(x: torch.Tensor) -> torch.Tensor:
        return call(x, *given[1:]).flatten()[5::97]

    found = jacrev(some)(given[0])
    x = given[0].clone().requires_grad_()
    close(found, [torch.autograd.grad(some(x)[next(numbers)], x)[0] for _ in range(len(found))])


def test_a_layout_made_in_the_transform_is_as_any(device: str):
    given = inputs(device, [QUERY] * 3)

    def loss(q, k, v):
        layout = torch.ones(2, 2, dtype=torch.bool, device=device)
        return block_sparse_attention(q, k, v, layout, causal=True).sin().sum()

    index = BlockIndex.build(torch.ones(2, 2, dtype=torch.bool, device=device), 8)
    expected = by_autograd(lambda q, k, v: block_sparse_attention(q, k, v, index, causal=True), given)
    close(grad(loss, (0, 1, 2))(*given), expected)
    close([x[0] for x in vmap(grad(loss, (0, 1, 2)))(*(x[None] for x in given))], expected)


def test_what_samples_cannot_have_of_their_own_is_said(device: str):
    q, _, _ = inputs(device, [QUERY] * 3)
    layouts = torch.ones(SAMPLES, 2, 2, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="layout is another one for each sample of torch.vmap; give one for all"):
        vmap(lambda layout: block_sparse_attention(q, q, q, layout))(layouts)
    with pytest.raises(ValueError, match="values is another one for each sample"):
        vmap(lambda values: sparse_attn(q, q, q, values, torch.arange(1, TOKENS + 1, device=device)))(
            torch.zeros(SAMPLES, TOKENS, dtype=torch.int64, device=device)
        )
    with pytest.raises(ValueError, match="window_size is another one for each sample"):
        vmap(lambda window: window_attention(q, q, q, window))(torch.tensor([1, 2, 3]))


def drops(device: str) -> Callable:
    """Attention whose output shows which pairs dropout left: uniform probabilities of values that are the unit vectors."""
    eye = torch.eye(TOKENS, device=device).expand(BATCH, HEADS, -1, -1)
    zeros = torch.zeros(BATCH, HEADS, TOKENS, TOKENS, device=device)
    index = BlockIndex.build(torch.ones(2, 2, dtype=torch.bool, device=device), 8)
    return lambda x: block_sparse_attention(x + zeros, zeros, eye, index, dropout_p=0.5)


def test_dropout_follows_vmaps_randomness(device: str):
    call, given = drops(device), torch.zeros(SAMPLES, BATCH, HEADS, TOKENS, TOKENS, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(given)
    same = vmap(call, randomness="same")(given)
    assert all(torch.equal(x, same[0]) for x in same) and 0.3 < (same == 0).float().mean() < 0.7
    different = vmap(call, randomness="different")(given)
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])
    # Those that have no operand of their own, too.
    of_none = vmap(lambda _: call(given[0]), randomness="different")(torch.arange(SAMPLES, device=device))
    assert not torch.equal(of_none[0], of_none[1])


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_is_replayed_in_the_gradients_of_samples(device: str, randomness: str):
    # Of linear values the gradient is the probabilities themselves, dropped ones 0, so that output and gradient agree.
    index = BlockIndex.build(torch.ones(2, 2, dtype=torch.bool, device=device), 8)
    q, k, v = inputs(device, [QUERY] * 3, SAMPLES)

    def loss(v, q, k):
        return block_sparse_attention(q, k, v, index, dropout_p=0.4).sum()

    for transform in (vmap(grad(loss), randomness=randomness), grad(lambda *x: vmap(loss, 0, 0, randomness)(*x).sum())):
        torch.manual_seed(3)
        gradients = transform(v, q, k)
        torch.manual_seed(3)
        losses = vmap(loss, randomness=randomness)(v, q, k)
        close([(gradients * v).flatten(1).sum(1)], [losses])


def test_jacobians_of_dropout_replay_it(device: str):
    index = BlockIndex.build(torch.ones(2, 2, dtype=torch.bool, device=device), 8)
    q, k, v = inputs(device, [(1, 1, TOKENS, 8)] * 3)
    result, pull = vjp(lambda v: block_sparse_attention(q, k, v, index, dropout_p=0.4).flatten(), v)
    (rows,) = vmap(pull)(torch.eye(result.numel(), device=device, dtype=result.dtype))
    close([(rows * v).flatten(1).sum(1)], [result])
