"""Every operation under torch.func's transforms: what they give equals separate calls and autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from public_operations import BATCH, HEADS, QUERY, TOKENS, Operation, inputs, operations
from torch.func import grad, jacrev, vjp, vmap

from ds_sparse import BlockIndex, block_sparse_attention, sparse_attn, window_attention
from ds_sparse.index import kernels

OPERATORS = kernels.OPERATORS

SAMPLES = 3


@pytest.fixture(params=list(operations("cpu")))
def operation(device: str, request: pytest.FixtureRequest) -> Operation:
    return operations(device)[request.param]


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
    call, shapes = operation.call, operation.shapes
    given = inputs(device, shapes)
    every = tuple(range(len(given)))
    found = grad(number(call), every)(*given)
    close(found, by_autograd(call, given))
    # What was built in the transform is as good outside of it, and in the next one.
    close(by_autograd(call, given), found)
    _, pull = vjp(number(call), *given)
    close(pull(given[0].new_ones(())), found)


def test_gradients_of_each_sample(device: str, operation: Operation):
    call, shapes = operation.call, operation.shapes
    given = inputs(device, shapes, SAMPLES)
    every = tuple(range(len(given)))
    each = [by_autograd(call, tuple(x[i] for x in given)) for i in range(SAMPLES)]
    expected = [torch.stack(of_one) for of_one in zip(*each)]
    close(vmap(grad(number(call), every))(*given), expected)
    close(grad(lambda *given: vmap(number(call))(*given).sum(), every)(*given), expected)
    close(torch.unbind(vmap(call)(*given)), [call(*(x[i] for x in given)) for i in range(SAMPLES)])


def test_one_operand_a_sample_and_the_others_shared(device: str, operation: Operation):
    call, shapes = operation.call, operation.shapes
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
    call, shapes = operations(device)[name].call, operations(device)[name].shapes
    given = inputs(device, shapes, 2, SAMPLES)
    found = vmap(vmap(grad(number(call))), in_dims=1)(*(x.transpose(0, 1) for x in given))
    for i in range(2):
        close([found[i]], [vmap(grad(number(call)))(*(x[i] for x in given))])


@pytest.mark.parametrize("name", ["attention", "softmax", "dsd", "window_attention in an order", "sparse_attn"])
def test_jacobians(device: str, name: str):
    call, shapes = operations(device)[name].call, operations(device)[name].shapes
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
    """Attention whose output shows which pairs dropout left: uniform probabilities of values that are unit vectors."""
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
