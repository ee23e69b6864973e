"""Devices and dtypes that the native libraries serve."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import _ops
from .._ops import add_op_namespace_prefix
from ..index.transforms import refuse_jit_trace
from ..layout import is_distributed
from ..tools.hardware import driver_problem, gpu_problem

CUDA_LIBRARY = getattr(_ops, "CUDA_LIBRARY", None) or Path(getattr(_ops, _ops.ops.name).__file__)
"""A build of kernel-builder has one library alone, a module of Python."""

BLOCK_OPERATORS = (
    "matmul_sdd",
    "matmul_dsd",
    "softmax_forward",
    "softmax_backward",
    "softmax_bias_backward",
    "block_attention_forward",
    "block_attention_backward",
    "block_attention_bias_backward",
)
WINDOW_OPERATORS = (
    "window_matmul",
    "unwindow_matmul",
    "window_softmax_forward",
    "window_softmax_backward",
    "window_attention_forward",
    "window_attention_backward",
)
TOKEN_OPERATORS = (
    "token_matmul_sdd",
    "token_matmul_dsd",
    "token_attention_forward",
    "token_attention_backward",
)
INDEX_OPERATORS = (
    "index_bits",
    "index_bits_of_blocks",
    "index_causal_bits",
    "index_plan",
    "index_fill",
)
"""Builders of indices, which `index.build` calls."""

HOPPER_OPERATORS = (
    "transpose",
    "token_tiles_forward",
    "token_tiles_backward",
    "packed_attention_forward",
    "packed_attention_backward",
)
"""Faster ways of others, for one kind of GPU."""

OPERATORS = BLOCK_OPERATORS + WINDOW_OPERATORS + TOKEN_OPERATORS
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def missing_kernels(device_type: str, operators: Sequence[str] = OPERATORS) -> list[str]:
    """Operators, of those given, that have no kernel for a device type such as "cuda"; empty where all of them run."""
    has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, device_type.upper()
    return [name for name in operators if not has_kernel(add_op_namespace_prefix(name), key)]


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


def check_dtype(x: torch.Tensor) -> None:
    """Raises ValueError for a dtype that no kernel takes."""
    if x.dtype not in DTYPES:
        raise ValueError(f"Tensors are {x.dtype}; they have to be float16, bfloat16, float32 or float64.")


def check_alike(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless the operands, by name, have the first one's device and dtype, and kernels take it."""
    (first_name, first), *others = tensors.items()
    for name, x in others:
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} and {first_name} on {first.device}; move it there.")
        if x.dtype != first.dtype:
            raise ValueError(f"{name} is {x.dtype} and {first_name} {first.dtype}; give all the same dtype.")
    check_dtype(first)


def require_kernel(operator: str, device: torch.device) -> None:
    """Raises RuntimeError with the way out where an operator of ours cannot run on the device."""
    if device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return
    if not missing_kernels(device.type, [operator]):
        if device.type == "cuda":
            _check_gpu(device)
        return
    if device.type == "cuda" and not CUDA_LIBRARY.exists():
        raise RuntimeError(
            f"Tensors are on {device}, and ds_sparse's CUDA library is not built; install nvcc and reinstall ds_sparse "
            "with DS_SPARSE_CUDA=1 set, or move model and data to the CPU."
        )
    raise RuntimeError(
        f"Tensors are on {device}, and {operator} has no {device.type} kernel yet; move model and data to the CPU."
    )


@functools.cache
def cuda_versions() -> tuple[int, int]:
    """Versions of the CUDA library's runtime, and the latest that the GPU driver serves; 12.8 is 12080."""
    library = ctypes.CDLL(str(CUDA_LIBRARY))
    return library.ds_sparse_cuda_runtime_version(), library.ds_sparse_cuda_driver_version()


@functools.cache
def has_machine_code(device: torch.device) -> bool:
    """Tells if the CUDA library has code that the GPU runs."""
    has_code = ctypes.CDLL(str(CUDA_LIBRARY)).ds_sparse_cuda_has_code_for_gpu
    has_code.restype = ctypes.c_bool
    with torch.cuda.device(device):
        return has_code()


def _check_gpu(device: torch.device) -> None:
    """Raises RuntimeError with the way out for a driver that is older than the library's major version of CUDA, and for
    a GPU of another kind than those that the library was compiled for."""
    problem = driver_problem(*cuda_versions())
    if problem is None and not has_machine_code(device):
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        problem = gpu_problem(str(device), capability, has_code=False)
    if problem:
        raise RuntimeError(str(problem))
