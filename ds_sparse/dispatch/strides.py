"""How tensors lie in memory, as kernels ask."""

from __future__ import annotations

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.functional import pad


def is_aligned(x: torch.Tensor) -> bool:
    """Tells if x begins at a multiple of 16 bytes. Traced tensors have no address; kernels look at it when the graph
    runs. Those that torch.func's transforms wrap have that of what is wrapped."""
    if torch.compiler.is_compiling():
        return True
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return isinstance(x, FakeTensor) or x.data_ptr() % 16 == 0


def readable_in_boxes(x: torch.Tensor) -> bool:
    """Tells if Hopper's copy engine reads x, (B, H, tokens, D) in 16 bits, in place."""
    *outer, last = x.stride()
    if last != 1:
        return False
    for size, stride in zip(x.shape, outer):
        if size != 1 and (stride <= 0 or stride % 8):
            return False
    return is_aligned(x)


def is_readable(x: torch.Tensor) -> bool:
    """Tells if attention's kernels read x, (B, H, T, D) or (B, H, T, g, D), in place."""
    *outer, last = x.stride()
    if last != 1 or x.shape[-1] % 8:
        return False
    for stride in outer:
        if stride % 8:
            return False
    return is_aligned(x)


def readable(x: torch.Tensor) -> torch.Tensor:
    """x (B, H, T, D) or (B, H, T, g, D); or a copy with D padded to a multiple of 8 by zeros, laid out as kernels read
    it."""
    if x.shape[-1] % 8:
        x = pad(x, (0, -x.shape[-1] % 8))
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)
