"""What outlives the call that makes it: made outside of the call's modes, of tensors that have values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def lasting(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what makes something that is kept: outside of inference mode, of FakeTensorMode and of torch.func's
    transforms, as it outlives them. What it is made of is `plain`."""

    @wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        refuse_jit_trace()
        with torch.inference_mode(False), unset_fake_temporarily(), torch._C._DisableFuncTorch():
            return make(*args, **kwargs)

    return made


def refuse_jit_trace() -> None:
    """Raises RuntimeError inside of torch.jit.trace, whose record would hold for one length and could not be saved."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace cannot record ds_sparse: what it recorded would be of these lengths alone, and could not "
            "be saved. Use torch.compile, or torch.export to save a program."
        )


def outside_of_graphs(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what torch.compile is not to trace. `torch.compiler.disable` imports all of torch.compile, which takes
    seconds, so it is asked where that has been imported already."""

    @cache
    def disabled() -> Callable[_Given, _Made]:
        return torch.compiler.disable(make)

    @wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        return (disabled() if "torch._dynamo" in sys.modules else make)(*args, **kwargs)

    return made


def plain(name: str, x: torch.Tensor) -> torch.Tensor:
    """x without what torch.func.grad and vjp wrap around it.

    Raises:
        ValueError: x is another for each sample of torch.vmap, or has no values.
    """
    if torch.compiler.is_compiling():
        # Nothing is made there.
        return x
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    if is_batchedtensor(x):
        raise ValueError(f"{name} is another one for each sample of torch.vmap; give one for all, with in_dims None.")
    refuse_without_values(name, x)
    return x


def refuse_without_values(name: str, x: torch.Tensor) -> None:
    """Raises ValueError where x is on the meta device, or a fake tensor outside of a trace."""
    if x.is_meta:
        raise ValueError(f"{name} is on the meta device, where it has no values; make it on the CPU.")
    if isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
        raise ValueError(
            f"{name} is a fake tensor, which has no values; make it, or the index of it, outside of FakeTensorMode."
        )
