"""What a tensor holds, for a later look whether it still does: also after writes that PyTorch does not count, such as
those through `x.numpy()`, `x.data` and memory that another library shares."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import c_char
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .lasting import lasting

COMPARED_ON_GPU = os.environ.get("DS_SPARSE_CHECK_LAYOUTS", "") not in ("", "0")
"""Whether the values of tensors on a GPU are compared, too, for which each look waits."""


class Contents:
    """What a tensor held when this was made.

    On the CPU all values are compared at each look: in 2 µs those of 64 x 64 bools, in 2 ms those of 16 million. A look
    at a GPU would wait for it: there PyTorch's count of changes in place tells, and with DS_SPARSE_CHECK_LAYOUTS=1 in
    the environment, which is for finding mistakes, the values as well.

    Raises:
        ValueError: `can_tell` is False.
    """

    @lasting
    def __init__(self, x: Tensor):
        if not can_tell(x):
            raise ValueError("Nothing tells whether this tensor is changed.")
        self._form = _form(x)
        self._version = None if x.is_cpu else x._version
        self._bytes = bytearray(memoryview(_memory(x))) if x.is_cpu else None
        self.copy: Tensor | None = None
        if self._bytes:
            self.copy = torch.frombuffer(self._bytes, dtype=torch.uint8)
        elif COMPARED_ON_GPU and not x.is_cpu:
            self.copy = x.detach().clone()

    def are_of(self, x: Tensor, capturing: Callable[[], bool]) -> bool:
        """Whether x holds the same. While a CUDA graph is captured, as `capturing` says, no values of a GPU are looked
        at."""
        if self._form != _form(x):
            return False
        if self._bytes is not None:
            return self._bytes == _memory(x)
        if self._version != x._version:
            return False
        return self.copy is None or capturing() or torch.equal(self.copy, x)


def can_tell(x: Tensor) -> bool:
    """Whether a change of x can be seen: not where it has no memory, nor on a GPU if it was made in inference mode,
    which counts no changes."""
    return not isinstance(x, FakeTensor) and (x.is_cpu or not x.is_inference())


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _memory(x: Tensor) -> Any:
    """The bytes of a tensor on the CPU in order, its own memory where they lie so. Python compares such a buffer with a
    bytearray as fast as memory is read."""
    x = x if x.is_contiguous() else _in_order(x)
    buffer: Any = (c_char * x.nbytes).from_address(x.data_ptr())
    buffer.owner = x  # a copy lasts as long as the buffer
    return buffer


@lasting
def _in_order(x: Tensor) -> Tensor:
    """A contiguous copy, without what an expanded view repeats."""
    with unset_fake_temporarily(), torch.no_grad():
        return x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())].contiguous()
