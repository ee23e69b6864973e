"""Some thousand spoiled calls; `python tests/fuzz/operators.py --seconds 600 --seed 7` for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("operators.py")


@pytest.mark.parametrize("cases", [1000, pytest.param(4000, marks=pytest.mark.slow("the first thousand run always"))])
def test_no_call_of_an_operator_ends_the_process(cases: int):
    command = [sys.executable, PROGRAM, "--cases", str(cases), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "case 1/0" in done.stdout, done.stderr
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, f"{last}: ended with {done.returncode}\n{done.stderr}"
    assert f"{cases} calls of 18 operators" in last
