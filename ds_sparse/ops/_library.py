"""Tensors and dtypes that the native libraries serve."""

from __future__ import annotations

import math

import torch

from ..index.transforms import refuse_jit_trace
from ..layout import is_distributed

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_inputs(**given: torch.Tensor | None) -> None:
    """Refuses, in words that say what to do, what is no ordinary tensor: nested and sparse ones, those that are
    distributed over ranks, and other objects. None passes.

    Raises:
        TypeError: an object that is no tensor.
        ValueError: another kind of tensor.
        RuntimeError: inside of torch.jit.trace.
    """
    if torch.jit.is_tracing():
        refuse_jit_trace()
    for name, x in given.items():
        if x is None or (type(x) in _ORDINARY and x.layout is _STRIDED and not x.is_nested):
            continue
        _refuse_kinds(name, x)


_ORDINARY, _STRIDED = frozenset({torch.Tensor, torch.nn.Parameter}), torch.strided


def _refuse_kinds(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it has to be a tensor.")
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; give {name}.to_padded_tensor(0.0) and mask what that adds, or call once for "
            f"each sequence of {name}.unbind()."
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name} is a tensor of layout {x.layout}; give {name}.to_dense().")
    if is_distributed(x):
        raise ValueError(
            f"{name} is a DTensor, and operations work on one rank's tensors; distribute batch or heads, give "
            f"{name}.to_local(), and make the result a DTensor with DTensor.from_local()."
        )


def under_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands of an operation that autocast casts, where it is on; as PyTorch does, it leaves float64 alone."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_scale(scale: float) -> float:
    """The factor of scores as a number.

    Raises:
        TypeError: something else.
        ValueError: not finite; a tensor that requires a gradient.
    """
    if not isinstance(scale, (int, float)) and not hasattr(scale, "__float__"):
        raise TypeError(f"scale is {scale!r}; it has to be a number.")
    if isinstance(scale, torch.Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise ValueError("scale requires a gradient and has none here; multiply the queries by it, or detach it.")
    if not abs(scale) < math.inf:
        raise ValueError(f"scale is {scale}; it has to be finite.")
    return float(scale)


def shapes_of(**operands: torch.Tensor) -> str:
    """The shapes of operands by their names, for a sentence."""
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())


def check_softcap(softcap: float) -> float:
    """The soft cap of scores as a number.

    Raises:
        TypeError: no number.
        ValueError: below 0, or beyond what fp32 holds as a normal number.
    """
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap is {softcap!r}; it has to be a Python number, 0 for none: give float(softcap).")
    fp32 = torch.finfo(torch.float32)
    if softcap != 0 and not fp32.tiny <= softcap <= fp32.max:
        raise ValueError(f"softcap is {softcap}; it has to be 0, for none, or a number above it that fp32 holds.")
    return softcap


def check_device(name: str, x: torch.Tensor, device: torch.device, other: str = "query") -> None:
    """Raises ValueError for x on another device than what is called `other`."""
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and {other} on {device}; move it there.")


def check_floating(name: str, x: torch.Tensor) -> None:
    """Raises ValueError for an operand, besides those that a kernel multiplies, of a dtype that none takes."""
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} is {x.dtype}; it has to be float16, bfloat16, float32 or float64.")


def check_dtype(x: torch.Tensor) -> None:
    """Raises ValueError for a dtype that no kernel takes."""
    if x.dtype not in DTYPES:
        raise ValueError(f"Tensors are {x.dtype}; they have to be float16, bfloat16, float32 or float64.")


def check_alike(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless the operands, by name, have the first one's device and dtype, and kernels take it."""
    (first_name, first), *others = tensors.items()
    for name, x in others:
        check_device(name, x, first.device, first_name)
        if x.dtype != first.dtype:
            raise ValueError(f"{name} is {x.dtype} and {first_name} {first.dtype}; give all the same dtype.")
    check_dtype(first)
