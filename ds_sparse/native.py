"""The native libraries: where they lie, and what loads them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

_FOLDER = Path(__file__).absolute().parent / "lib"  # a cache of a hub has links for files, which lead elsewhere
CPU_LIBRARY = _FOLDER / "libds_sparse_cpu.so"
CUDA_LIBRARY = _FOLDER / "libds_sparse_cuda.so"

NOT_BUILT = (
    f"ds_sparse's native library is not built ({CPU_LIBRARY.name} is missing); install the package with a C++ compiler "
    "present: `pip install --no-build-isolation -e .` in its folder."
)


def wanted() -> list[Path]:
    """The libraries that this torch can have: that of the CPU, and beside a torch with CUDA the other, if it is built.

    Raises:
        ImportError: that of the CPU is not built.
    """
    if not CPU_LIBRARY.exists():
        raise ImportError(NOT_BUILT)
    return [CPU_LIBRARY, *([CUDA_LIBRARY] if torch.version.cuda is not None and CUDA_LIBRARY.exists() else [])]


INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Instruction sets that kernels of the CPU are compiled for; each runs where a later one does. The environment variable
DS_SPARSE_CPU names the one to use; PyTorch's ATEN_CPU_CAPABILITY bounds the choice."""


@functools.cache
def instruction_set() -> str:
    """The one of `INSTRUCTION_SETS` that kernels use in this process; "" where DS_SPARSE_CPU names none that runs here.

    Raises:
        OSError: the CPU library is not built, or does not load.
    """
    told = ctypes.CDLL(str(CPU_LIBRARY)).ds_sparse_cpu_instruction_set
    told.restype = ctypes.c_char_p
    return told().decode()


def load(library: Path) -> None:
    """Registers the operators of a library with torch.

    Raises:
        ImportError: it does not load; says why, and what to do.
    """
    try:
        torch.ops.load_library(library)
    except OSError as error:
        why = error.__cause__ or error  # torch's own sentence names the file alone
        raise ImportError(
            f"ds_sparse's native library {library.name} does not load beside torch {torch.__version__}: {why}. Build "
            "ds_sparse again beside this torch; `ds_sparse report` says more."
        ) from why
