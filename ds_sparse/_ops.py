"""Loads the native libraries, and names their operators.

`ops` and `add_op_namespace_prefix` are what the `_ops` module of Hugging Face's kernel-builder has. It puts that in the
place of this one (.ci/kernels): a build of its has one library, with its operators in a namespace of that build.
"""

from __future__ import annotations

from pathlib import Path

import torch

_FOLDER = Path(__file__).absolute().parent / "lib"  # a cache of a hub has links for files, which lead elsewhere
CPU_LIBRARY = _FOLDER / "libds_sparse_cpu.so"
CUDA_LIBRARY = _FOLDER / "libds_sparse_cuda.so"

if not CPU_LIBRARY.exists():
    raise ImportError(
        f"ds_sparse's native library is not built ({CPU_LIBRARY.name} is missing); install the package with a C++ "
        "compiler present: `pip install --no-build-isolation -e .` in its folder."
    )
torch.ops.load_library(CPU_LIBRARY)
if torch.version.cuda is not None and CUDA_LIBRARY.exists():
    torch.ops.load_library(CUDA_LIBRARY)

ops = torch.ops.ds_sparse


def add_op_namespace_prefix(op_name: str) -> str:
    """An operator's name with its namespace, as `torch.library` takes it."""
    return f"{ops.name}::{op_name}"
