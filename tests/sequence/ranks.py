"""Runs a program of `programs` on several ranks, and reads what its cases report."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]


@functools.cache
def reports(program: str, ranks: int) -> dict[str, str]:
    """The report of each case, "ok" where it passed, and all that was printed, under ""."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(PROGRAMS / program)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *start], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {"": done.stdout}
    for text in done.stdout.split("\n=== ")[1:]:
        name, _, report = text.partition("\n")
        found[name] = report
    return found


def assert_passed(program: str, ranks: int, case: str) -> None:
    report = reports(program, ranks)[case]
    assert report.startswith("ok"), report


def cases_of(program: str) -> list[str]:
    """The names of a program's cases, by its text: it is not imported."""
    lines = (PROGRAMS / program).read_text().splitlines()
    return [after.removeprefix("def ").partition("(")[0] for line, after in pairwise(lines) if line == "@case"]
