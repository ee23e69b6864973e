"""Kernels of the CPU in every instruction set that this machine has; the choice is made once a process."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_sparse import block_sparse_attention, native
from ds_sparse.tools import hardware

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
SETTINGS = ("ATEN_CPU_CAPABILITY", "DS_SPARSE_CPU")
"""Environment variables on which the choice depends."""
FORKS = """
import json, os, signal, sys
import hypothesis, pytest, torch._dynamo, ds_sparse.ops, ds_sparse.reference

for line in sys.stdin:
    code, environment, output = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # ends it where it hangs, with the status -14
        os.environ.update(environment)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = 1
        try:
            exec(code, {})
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException as error:
            print(error)
        sys.stdout.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported all and chosen nothing: forked, it is a new one in no time."""


class Forks:
    """Runs code in an environment, each time in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.output = process, folder / "output"

    def __call__(self, code: str, **environment: str) -> tuple[int, str]:
        """The status in which it ends, and what it prints."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps([code, environment, str(self.output)]), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline()), self.output.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Forks(process, tmp_path_factory.mktemp("forks"))
        process.communicate()


CHOICE = """
from ds_sparse import native
print(native.instruction_set())
"""
WIDE = "cpu-64 or 128 or 255 or 400"
"""In the names of tests with the largest blocks, heads and windows."""


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(f"not ({WIDE})", id="small"),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow("small ones run the same kernels")),
    ],
)
@pytest.mark.parametrize("name", native.INSTRUCTION_SETS)
def test_every_instruction_set(name: str, which: str, run: Forks):
    if name == native.instruction_set():
        pytest.skip("all other tests use it")
    status, output = run(CHOICE, DS_SPARSE_CPU=name)
    chosen = output.splitlines()[-1] if output else "nothing"  # below warnings
    assert status == 0 and chosen in (name, ""), output
    if not chosen:
        pytest.skip("this machine does not run it")
    tests = [str(HERE / test) for test in TESTS]
    arguments = ["-q", "-k", f"cpu and ({which})", "-p", "no:cacheprovider", *tests]
    status, output = run(f"import pytest\nraise SystemExit(pytest.main({arguments}))", DS_SPARSE_CPU=name)
    assert status == 0 and " passed" in output, output


CALL = f"""
import torch
from ds_sparse import block_sparse_attention
{CHOICE}
x = torch.ones(1, 1, 16, 16)
block_sparse_attention(x, x, x, torch.ones(1, 1, dtype=torch.bool), block=16)
"""


def test_pytorchs_variable_bounds_it(run: Forks):
    assert run(CALL, ATEN_CPU_CAPABILITY="default") == (0, "portable\n")


@pytest.mark.skipif("amx_bf16" in hardware.features(), reason="tiles are chosen here")
def test_pairs_are_chosen_on_amds_chips_alone(run: Forks):
    """Elsewhere fp32 is faster; they still run there by name."""
    status, output = run(CHOICE)
    expected = "avx512_bf16" in hardware.features() and hardware.processor().startswith("AMD")
    assert status == 0 and (output == "avx512_bf16\n") == expected, output


def test_a_name_that_does_not_run_is_refused(run: Forks):
    status, output = run(CALL, DS_SPARSE_CPU="sse9")
    assert status == 1 and "DS_SPARSE_CPU is 'sse9', and this machine runs portable" in output


def test_scores_of_bf16_are_not_rounded():
    """957, which bf16 has no bits for, comes out of whole numbers exactly."""
    query = torch.full((1, 1, 64, 64), 3.0, dtype=torch.bfloat16)
    key, value, layout = torch.full_like(query, 5.0), torch.ones_like(query), torch.ones(4, 4, dtype=torch.bool)
    key[..., 0] = 4.0
    _, lse = block_sparse_attention(query, key, value, layout, block=16, scale=1.0, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, 957 + math.log(64)), rtol=1e-6, atol=0)


@pytest.mark.slow("compiles the kernels of tiles")
@pytest.mark.skipif("avx512_bf16" not in hardware.features(), reason="no AVX512-BF16 here, which tiles' kernels have")
def test_tiles_multiply_exactly_what_packing_gives_them(tmp_path: Path):
    """AMX's tile registers in plain C++, as tiles.h has them for machines without."""
    program = tmp_path / "tiles"
    of_tiles = SETUP["INSTRUCTION_SETS"][SETUP["BF16_KERNELS"]]["amx_bf16"]
    flags = [*SETUP["CPU_FLAGS"], *of_tiles, f"-I{ROOT / 'csrc'}", "-DDS_SPARSE_ISA=emulated"]
    flags.append("-DDS_SPARSE_EMULATE_TILES")
    compiler = [SETUP["find_cxx"](), *flags, "-o", program, HERE / "tiles.cpp"]
    built = subprocess.run(compiler, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
