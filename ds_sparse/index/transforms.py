"""Builds cached objects outside torch modes: an index outlives the call that makes it, so it is made outside inference
mode, fake tensors, torch.func's transforms and graphs of torch.compile, of tensors that have values."""

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


def outside_transforms(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function that makes something that is kept: it runs outside inference mode, FakeTensorMode and
    torch.func's transforms. Its tensors go through `unwrap_functorch` before."""

    @outside_of_graphs
    @wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        refuse_jit_trace()
        with torch.inference_mode(False), unset_fake_temporarily(), torch._C._DisableFuncTorch():
            return make(*args, **kwargs)

    return made


def outside_transforms_or_traced(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """`outside_transforms` of what waits for no device, and is part of a graph where torch.compile traces."""
    outside = outside_transforms(make)

    @wraps(make)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        return make(*args, **kwargs) if torch.compiler.is_compiling() else outside(*args, **kwargs)

    return made


def least_of(a: int, b: int) -> int:
    """The smaller one, of sizes that may be symbols, which the comparison of `min` would tie to what they are now.
    Dynamo traces it as this, and of PyTorch 2.11 cannot trace `torch.sym_min` of numbers."""
    return min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)


def in_a_thread(make: Callable[[], _Made]) -> _Made:
    """Runs `make` in a thread of its own: free of the caller's modes (fake tensors, export) and of the memory pool that
    torch.compile's CUDA graphs take theirs from, which the result would outlive."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def as_it_is(run: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function that torch.compile leaves as it is, with all that it calls, where a graph has ended around
    it. Otherwise each function would be compiled alone, with graphs of an index that is built once."""
    private: Any = eval_frame
    if hasattr(private, "set_code_exec_strategy"):  # else more is compiled than need be, and no less
        skip = private._FrameAction.SKIP
        private.set_code_exec_strategy(run.__code__, private._FrameExecStrategy(skip, skip))
    return run


def outside_of_graphs(make: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function at which torch.compile ends its graph, an error with fullgraph=True.
    `torch.compiler.disable` would import all of torch.compile, which takes seconds."""
    not_traced: Any = as_it_is(make)
    not_traced._torchdynamo_disable = True
    not_traced._torchdynamo_disable_msg = "ds_sparse builds an index outside of graphs; build it before."
    return make


@outside_transforms
def made_outside(make: Callable[[], _Made]) -> _Made:
    """What `make` makes, as of a function that `outside_transforms` decorates."""
    return make()


def while_traced(run: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Decorates a function that runs once while torch.compile traces, and is no part of the graph, as
    `torch.compiler.assume_constant_result` does, which would import all of torch.compile."""
    run_once: Any = run
    run_once._dynamo_marked_constant = True
    return run


def refuse_jit_trace() -> None:
    """Raises RuntimeError inside of torch.jit.trace, whose record would hold for one length and could not be saved."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace cannot record ds_sparse: what it recorded would be of these lengths alone, and could not "
            "be saved. Use torch.compile, or torch.export to save a program."
        )


def unwrap_functorch(name: str, x: torch.Tensor, needs_values: bool = True) -> torch.Tensor:
    """x without the wrappers of torch.func.grad and vjp. Raises ValueError where x is another for each sample of
    torch.vmap, or has no values and `needs_values`."""
    if torch.compiler.is_compiling():
        # Nothing is made there.
        return x
    x = _ungraded(x)
    if is_batchedtensor(x):
        raise ValueError(f"{name} is another one for each sample of torch.vmap; give one for all, with in_dims None.")
    if needs_values:
        refuse_without_values(name, x)
    return x


def refuse_samples(who: str, *operands: torch.Tensor) -> None:
    """Raises ValueError in torch.vmap, where what `who` chooses would be another for each sample."""
    if not torch.compiler.is_compiling() and any(is_batchedtensor(_ungraded(x)) for x in operands):
        raise ValueError(
            f"{who} is called under torch.vmap, and would choose other blocks for each sample; put samples into the "
            "batch."
        )


def _ungraded(x: torch.Tensor) -> torch.Tensor:
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    return x


def refuse_without_values(name: str, x: torch.Tensor) -> None:
    """Raises ValueError where x is on the meta device, or a fake tensor outside of a trace."""
    if x.is_meta:
        raise ValueError(f"{name} is on the meta device, where it has no values; make it on the CPU.")
    if isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
        raise ValueError(
            f"{name} is a fake tensor, which has no values; make it, or the index of it, outside of FakeTensorMode."
        )
