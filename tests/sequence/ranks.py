"""Runs a program of `programs` on several ranks, and reads what its cases report."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


@functools.cache
def reports(program: str, ranks: int, device: str) -> dict[str, str]:
    """The report of each case, "ok" where it passed, and all that was printed, under "". On "cuda" each rank has a GPU;
    skipped with the reason where there are fewer."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs, and there are {torch.cuda.device_count()}")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(PROGRAMS / program)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, *start, device], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {"": done.stdout}
    for text in done.stdout.split("\n=== ")[1:]:
        name, _, report = text.partition("\n")
        found[name] = report
    return found


def assert_passed(program: str, ranks: int, case: str, device: str = "cpu") -> None:
    report = reports(program, ranks, device)[case]
    assert report.startswith("ok"), report


def cases_of(program: str, device: str = "cpu") -> list[str]:
    """The names of a program's cases on a device, by its text: it is not imported."""
    lines, marks = (PROGRAMS / program).read_text().splitlines(), ["@case", f"@case_on_{device}"]
    return [after.removeprefix("def ").partition("(")[0] for line, after in pairwise(lines) if line in marks]
