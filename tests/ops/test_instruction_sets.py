"""Kernels of the CPU in every instruction set that this machine has; the choice is made once a process."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_sparse import block_sparse_attention, hardware, native

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
TESTS = (
    "test_attention.py::test_every_block_and_dtype_with_every_option",
    "test_matmul.py::test_every_mode_transposition_and_dtype",
    "test_token.py::test_attention_of_every_head_size_and_dtype",
    "test_window.py::test_rows_of_several_tasks",
    "test_window.py::test_what_is_not_finite_stays_in_its_windows",
)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


CHOICE = """
from ds_sparse import native
print(native.instruction_set())
"""


@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_every_instruction_set(name: str):
    if name == native.instruction_set():
        pytest.skip("all other tests use it")
    if run(sys.executable, "-c", CHOICE, DS_SPARSE_CPU=name).stdout != f"{name}\n":
        pytest.skip("this machine does not run it")
    tests = [str(HERE / test) for test in TESTS]
    done = run(sys.executable, "-m", "pytest", "-q", "-k", "cpu", "-p", "no:cacheprovider", *tests, DS_SPARSE_CPU=name)
    assert done.returncode == 0, done.stdout


CALL = f"""
import torch
from ds_sparse import block_sparse_attention
{CHOICE}
x = torch.ones(1, 1, 16, 16)
block_sparse_attention(x, x, x, torch.ones(1, 1, dtype=torch.bool), block=16)
"""


def test_pytorchs_variable_bounds_it():
    done = run(sys.executable, "-c", CALL, ATEN_CPU_CAPABILITY="default")
    assert (done.returncode, done.stdout) == (0, "portable\n"), done.stderr


@pytest.mark.skipif("amx_bf16" in hardware.features(), reason="tiles are chosen here")
def test_pairs_are_chosen_on_amds_chips_alone():
    """Elsewhere fp32 is faster; they still run there by name."""
    done = run(sys.executable, "-c", CHOICE, ATEN_CPU_CAPABILITY="", DS_SPARSE_CPU="")
    expected = "avx512_bf16" in hardware.features() and hardware.processor().startswith("AMD")
    assert done.returncode == 0 and (done.stdout == "avx512_bf16\n") == expected, done.stderr


def test_a_name_that_does_not_run_is_refused():
    done = run(sys.executable, "-c", CALL, DS_SPARSE_CPU="sse9")
    assert "DS_SPARSE_CPU is 'sse9', and this machine runs portable" in done.stderr and done.returncode


def test_scores_of_bf16_are_not_rounded():
    """957, which bf16 has no bits for, comes out of whole numbers exactly."""
    query = torch.full((1, 1, 64, 64), 3.0, dtype=torch.bfloat16)
    key, value, layout = torch.full_like(query, 5.0), torch.ones_like(query), torch.ones(4, 4, dtype=torch.bool)
    key[..., 0] = 4.0
    _, lse = block_sparse_attention(query, key, value, layout, block=16, scale=1.0, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, 957 + math.log(64)), rtol=1e-6, atol=0)


@pytest.mark.skipif("avx512_bf16" not in hardware.features(), reason="no AVX512-BF16 here, which tiles' kernels have")
def test_tiles_multiply_exactly_what_packing_gives_them(tmp_path: Path):
    """AMX's tile registers in plain C++, as tiles.h has them for machines without."""
    program = tmp_path / "tiles"
    of_tiles = SETUP["INSTRUCTION_SETS"][SETUP["BF16_KERNELS"]]["amx_bf16"]
    flags = [*SETUP["CPU_FLAGS"], *of_tiles, f"-I{ROOT / 'csrc'}", "-DDS_SPARSE_ISA=emulated"]
    flags.append("-DDS_SPARSE_EMULATE_TILES")
    built = run(SETUP["find_cxx"](), *flags, "-o", program, HERE / "tiles.cpp")
    assert built.returncode == 0, built.stderr
    done = run(program)
    assert done.returncode == 0, done.stdout
