"""Runs a program of `programs` on several ranks, and reads what its cases report."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import without_launcher

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


@functools.cache
def reports(program: str, ranks: int, device: str, part: str = "all") -> dict[str, str]:
    """The report of each case, "ok" where it passed, and all that was printed, under "". On "cuda" each rank has a GPU;
    skipped with the reason where there are fewer. `part` leaves out the slow cases, "quick", or the others, "slow"."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs, and there are {torch.cuda.device_count()}")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = without_launcher() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        start = [str(PROGRAMS / program), device, str(ranks), part]
    else:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(PROGRAMS / program)]
        start += [device]
    done = subprocess.run(
        [sys.executable, *start], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {"": done.stdout}
    for text in done.stdout.split("\n=== ")[1:]:
        name, _, report = text.partition("\n")
        found[name] = report
    return found


def assert_passed(program: str, ranks: int, case: str, device: str = "cpu", part: str = "all") -> None:
    report = reports(program, ranks, device, part)[case]
    assert report.startswith("ok"), report


def cases_of(program: str, device: str = "cpu") -> list[str]:
    """The names of a program's cases on a device, by its text: it is not imported."""
    return [name for _, name in _marked(program, ("@case", f"@case_on_{device}", "@slow_case"))]


def quick_and_slow_cases_of(*programs: str) -> list:
    """Program, case and the part of the program that it is in, of all cases on the CPU; marked slow where the program
    says so."""
    found = []
    for program in programs:
        for line, name in _marked(program, ("@case", "@case_on_cpu", "@slow_case")):
            label = name if len(programs) == 1 else f"{program}-{name}"
            if line.startswith("@slow_case"):
                why = ast.literal_eval(line.removeprefix("@slow_case"))
                found.append(pytest.param(program, name, "slow", marks=pytest.mark.slow(why), id=label))
            else:
                found.append(pytest.param(program, name, "quick", id=label))
    return found


def _marked(program: str, marks: tuple[str, ...]) -> list[tuple[str, str]]:
    """The line of the mark, and the name of the function after it."""
    return [
        (line, after.removeprefix("def ").partition("(")[0])
        for line, after in pairwise((PROGRAMS / program).read_text().splitlines())
        if line.partition("(")[0] in marks
    ]
