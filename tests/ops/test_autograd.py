"""Where derivatives end: second ones, and those in forward mode, are sentences that name the operation."""

from __future__ import annotations

import pytest
import torch
from helpers import random, seeded
from public_operations import NATIVE, inputs, operations
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap

from ds_sparse import TokenIndex, gather_attention, jagged_attention, torch_sparse_attention

PUBLIC = {
    "attention": "block_sparse_attention",
    "sdd": "MatMul",
    "dsd": "MatMul",
    "dds": "MatMul",
    "softmax": "Softmax",
}


def named(name: str) -> str:
    """The public name of one of the operations."""
    first = name.split(",")[0].split(" ")[0]
    return PUBLIC.get(first, first).removesuffix("_vo")


@pytest.mark.parametrize("name", NATIVE)
def test_second_derivatives_are_refused(name: str):
    call, shapes = operations("cpu")[name]
    given = [x.requires_grad_() for x in inputs("cpu", shapes)]
    for loss in (call(*given).sin().sum(), call(*given).sum()):
        # Of a plain sum what comes into backward is constant, while the gradient is not.
        gradients = torch.autograd.grad(loss, given, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{named(name)} has first derivatives only.*without create_graph=True"):
            sum(x.square().sum() for x in gradients).backward()


@pytest.mark.parametrize("name", ["attention", "softmax", "sdd", "window_matmul", "sparse_attn"])
def test_second_derivatives_by_transforms_are_refused(name: str):
    call, shapes = operations("cpu")[name]
    given = inputs("cpu", shapes)

    def penalty(*given: torch.Tensor) -> torch.Tensor:
        return grad(lambda *given: call(*given).sum())(*given).square().sum()

    samples = [x[None] for x in given]
    for transformed in (lambda: grad(penalty, 1)(*given), lambda: vmap(grad(penalty, 1))(*samples)):
        with pytest.raises(RuntimeError, match=f"{named(name)} has first derivatives only"):
            transformed()


@pytest.mark.parametrize("name", NATIVE)
def test_forward_mode_is_refused(name: str):
    call, shapes = operations("cpu")[name]
    given = inputs("cpu", shapes)
    sentence = f"{named(name)} has no derivatives in forward mode.*Use torch.func.vjp or jacrev"
    with pytest.raises(NotImplementedError, match=sentence):
        jvp(call, given, given)
    with pytest.raises(NotImplementedError, match=sentence):
        vmap(lambda *given: jvp(call, given, given))(*(x[None] for x in given))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=sentence):
        call(*given[:-1], forward_ad.make_dual(given[-1], given[-1]))


def test_what_jacfwd_and_hessian_come_upon_is_the_same():
    call, shapes = operations("cpu")["attention"]
    given = inputs("cpu", shapes)
    for transformed in (jacfwd(call), hessian(lambda *given: call(*given).sum())):
        with pytest.raises(NotImplementedError, match="block_sparse_attention has no derivatives in forward mode"):
            transformed(*given)


STEPS = [jagged_attention, torch_sparse_attention]


@pytest.mark.parametrize("step", STEPS)
def test_steps_whose_second_derivatives_pytorch_gets_wrong_refuse_them(step):
    index = TokenIndex.from_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    q, k, v = (random(seeded(i), 1, 4, 8).requires_grad_() for i in range(3))
    with pytest.raises(RuntimeError, match=f"{step.__name__} has first derivatives only"):
        torch.autograd.grad(step(q, k, v, index).sum(), q, create_graph=True)
    assert torch.autograd.gradgradcheck(lambda *given: gather_attention(*given, index), (q, k, v))


@pytest.mark.parametrize("step", STEPS)
def test_steps_that_transforms_do_not_take_say_so(step):
    index = TokenIndex.from_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    q = random(seeded(), 1, 4, 8)
    with pytest.raises(
        RuntimeError, match=f"{step.__name__} is made of .* which torch.func's transforms .* sparse_attn"
    ):
        grad(lambda q: step(q, q, q, index).sum())(q)
