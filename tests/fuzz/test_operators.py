"""Some thousand spoiled calls; `python tests/fuzz/operators.py --seconds 600 --seed 7` for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("operators.py")


@pytest.mark.parametrize(
    ("first", "cases"),
    [(0, 1000), pytest.param(1000, 3000, marks=pytest.mark.slow("the first thousand run always"))],
)
def test_no_call_of_an_operator_ends_the_process(first: int, cases: int):
    command = [sys.executable, PROGRAM, "--first", str(first), "--cases", str(cases), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"case 1/{first}\n" in done.stdout, done.stderr
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, f"{last}: ended with {done.returncode}\n{done.stderr}"
    assert f"{cases} calls of 31 operators" in last
