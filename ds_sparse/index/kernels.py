"""The operators that the native libraries have, and the devices that they serve."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import _ops
from .._ops import add_op_namespace_prefix
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
    "attention_sinks_forward",
    "attention_sinks_backward",
    "decode_attention_forward",
)
SELECTION_OPERATORS = (
    "selected_attention_forward",
    "selected_attention_backward",
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
    "index_documents",
    "index_bits_of_documents",
    "index_limits",
    "index_tile_spans",
    "index_plan",
    "index_fill",
)
"""Builders of indices, which `index.build` and `index.packed` call."""

HOPPER_OPERATORS = (
    "transpose",
    "token_tiles_forward",
    "token_tiles_backward",
    "packed_attention_forward",
    "packed_attention_backward",
)
"""Faster ways of others, for one kind of GPU."""

GPU_OPERATORS = ("block_maxima", "choose_blocks")
"""What `select_blocks` runs on a GPU; on a CPU it is plain PyTorch."""

OPERATORS = BLOCK_OPERATORS + SELECTION_OPERATORS + WINDOW_OPERATORS + TOKEN_OPERATORS


def missing_kernels(device_type: str, operators: Sequence[str] = OPERATORS) -> list[str]:
    """Operators, of those given, that have no kernel for a device type such as "cuda"; empty where all of them run."""
    has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, device_type.upper()
    return [name for name in operators if not has_kernel(add_op_namespace_prefix(name), key)]


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
