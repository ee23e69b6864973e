"""Loads the native libraries, and names their operators.

`ops` and `add_op_namespace_prefix` are what the `_ops` module of Hugging Face's kernel-builder has. It puts that in the
place of this one (.ci/kernels): a build of its has one library, with its operators in a namespace of that build.
"""

from __future__ import annotations

import torch

from . import native

CPU_LIBRARY, CUDA_LIBRARY = native.CPU_LIBRARY, native.CUDA_LIBRARY
for _library in native.wanted():
    native.load(_library)

ops = torch.ops.ds_sparse


def add_op_namespace_prefix(op_name: str) -> str:
    """An operator's name with its namespace, as `torch.library` takes it."""
    return f"{ops.name}::{op_name}"
