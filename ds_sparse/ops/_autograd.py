"""Shared by the operations' autograd functions: `torch.func`'s transforms, and a sentence where gradients end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd import forward_ad

from ..dispatch import forced_implementation
from ..index.transforms import as_it_is


class Function(torch.autograd.Function):
    """An autograd function in the form that `torch.func.grad`, `vjp`, `vmap` and `jacrev` take: it has `setup_context`,
    and calls operators with rules for vmap (`_vmap`)."""

    generate_vmap_rule = True

    @classmethod
    @as_it_is
    def apply(cls, *args):
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return super(Function, _without_forward_mode(cls)).apply(*args)
        args = (*[unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args],)
        if torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return recorded(cls)(*args)
        return cls.forward(*args)


def recorded(function: type[Function]) -> Callable[..., Any]:
    """`apply` where something requires a gradient and no transform is at work, without binding arguments to forward's
    names, which takes a tenth of a small call's time."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # C++'s


@cache
def _without_forward_mode(function: type[Function]) -> type[Function]:
    """The function with a `jvp` that raises a sentence; torch.compile takes none that has one."""

    backward: Any = function.backward

    def jvp(ctx, *tangents):
        raise NotImplementedError(
            f"{backward.operation} has no derivatives in forward mode (torch.func.jvp, jacfwd, hessian; "
            "torch.autograd.forward_ad). Use torch.func.vjp or jacrev, or compute this part in plain PyTorch "
            "(ds_sparse.reference, or gather_attention for lists of tokens)."
        )

    return type(function.__name__, (function,), {"jvp": staticmethod(jvp)})


_SENTENCE = (
    "{} has first derivatives only, and here its gradient is differentiated again. Take the gradient without "
    "create_graph=True, detach it, or compute this part in plain PyTorch (ds_sparse.reference, or gather_attention for "
    "lists of tokens), which has derivatives of any order."
)


def first_derivatives_only(operation: str, output: Tensor) -> Tensor:
    """The output of an operation of whose parts PyTorch's second derivatives are missing or wrong: create_graph=True is
    refused."""

    def refuse(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(_SENTENCE.format(operation))

    if output.requires_grad:
        output.register_hook(refuse)
    return output


def differentiable_once(operation: str) -> Callable[[Callable], Callable]:
    """Decorates a `backward`: gradients of its gradients are an error, a sentence that names the operation."""
    sentence = _SENTENCE.format(operation)

    def decorated(backward: Callable) -> Callable:
        @wraps(backward)
        def once(ctx, *grads):
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *grads)
            with torch.no_grad():
                results = backward(ctx, *grads)
            results = results if isinstance(results, tuple) else (results,)
            own = [x for x in results if x is not None]
            # Gradients depend on what was saved too: a penalty on them would else be a constant, without a word.
            of = [x for x in (*grads, *ctx.saved_tensors) if x is not None]
            ends = iter(_End.apply(sentence, len(own), *own, *of))
            return tuple(None if x is None else next(ends) for x in results)

        once.operation = operation  # type: ignore[attr-defined]  # for `_without_forward_mode`
        return once

    return decorated


def named(name: str, function: Any) -> Any:
    """The autograd function under a name of its own, which profiles, `grad_fn` and PyTorch's sentences give."""
    for cls, own in ((function, name), (function._backward_cls, f"{name}Backward")):
        cls.__name__ = cls.__qualname__ = own
    return function


def product_function(
    name: str,
    operation: str,
    product: Callable[..., Tensor],
    of_first: Callable[..., Tensor],
    of_second: Callable[..., Tensor],
    read: Callable[..., Tensor] | None = None,
) -> Any:
    """Makes the autograd function of a product: of two operands, and a tuple of what says how they are multiplied.

    Args:
        name: of the function.
        operation: its name in sentences.
        product: gives the product of the operands and the rest.
        of_first, of_second: give the gradient of an operand, of that of the product, both operands, the rest, and the
            implementation that was forced.
        read: makes the gradient of the product as both read it, of that, the rest and the implementation.
    """

    class Product(Function):
        @staticmethod
        def forward(a, b, how):
            return product(a, b, *how)

        @staticmethod
        def setup_context(ctx, inputs, output):
            a, b, ctx.how = inputs
            ctx.forced = forced_implementation()
            ctx.save_for_backward(a, b)

        @staticmethod
        @differentiable_once(operation)
        def backward(ctx, grad: Tensor):
            forced, wanted = ctx.forced, ctx.needs_input_grad
            grad = grad if read is None else read(grad, *ctx.how, forced)
            call = grad, *ctx.saved_tensors, *ctx.how, forced
            grad_a = of_first(*call) if wanted[0] else None
            grad_b = of_second(*call) if wanted[1] else None
            return grad_a, grad_b, None

    return named(name, Product)


def differentiable_once_in(operation: str, *operands: Tensor | None) -> tuple[Any, ...]:
    """The operands of an operation that PyTorch's own make up here, which then ends where those with kernels end: no
    gradients of gradients, and none in forward mode."""
    if not torch.is_grad_enabled() or (_is_plain() and not any(x is not None and x.requires_grad for x in operands)):
        return operands
    return tuple(None if x is None else _operand_of(operation).apply(x) for x in operands)


def _is_plain() -> bool:
    """Tells if only `requires_grad` says what is differentiated: no transform, trace nor forward mode does."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return forward_ad._current_level < 0


@cache
def _operand_of(operation: str) -> type[Function]:
    class Operand(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @differentiable_once(operation)
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    return Operand


class _End(torch.autograd.Function):
    """The first `count` tensors, which depend on all of them and have no gradient but a sentence."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sentence: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.sentence = inputs[0]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(ctx.sentence)
