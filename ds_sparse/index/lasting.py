"""What outlives the call that makes it: made outside of the call's modes, of tensors that have values."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_gradtrackingtensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def lasting(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what makes something that is kept: outside of inference mode, of FakeTensorMode and of torch.func's
    transforms, as it outlives them. What it is made of is `plain`."""

    @outside_of_graphs
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


def in_a_thread(make: Callable[[], _Made]) -> _Made:
    """What `make` returns in a thread of its own: free of the caller's modes (fake tensors, export) and, as it outlives
    the call, of the memory pool that torch.compile's CUDA graphs take theirs from."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def as_it_is(run: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what is in no graph of its own: where a graph of torch.compile has ended around it, it and all that it
    calls run as they are. Otherwise each function would be compiled alone, with graphs of an index that is built once.
    """
    private: Any = eval_frame
    if hasattr(private, "set_code_exec_strategy"):  # else more is compiled than need be, and no less
        skip = private._FrameAction.SKIP
        private.set_code_exec_strategy(run.__code__, private._FrameExecStrategy(skip, skip))
    return run


def outside_of_graphs(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what torch.compile is not to trace: its graph ends there, which with fullgraph=True is an error.
    `torch.compiler.disable` would import all of torch.compile, which takes seconds."""
    not_traced: Any = as_it_is(make)
    not_traced._torchdynamo_disable = True
    not_traced._torchdynamo_disable_msg = "ds_sparse builds an index outside of graphs; build it before."
    return make


def while_traced(run: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates what runs once while torch.compile traces, and is no part of the graph. As
    `torch.compiler.assume_constant_result`, which would import all of torch.compile."""
    run_once: Any = run
    run_once._dynamo_marked_constant = True
    return run


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
