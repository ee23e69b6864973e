"""Some thousand spoiled calls; `python tests/fuzz/operators.py --seconds 600 --seed 7` for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("operators.py")


def test_no_call_of_an_operator_ends_the_process():
    command = [sys.executable, PROGRAM, "--cases", "4000", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "case 1/0" in done.stdout, done.stderr
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, f"{last}: ended with {done.returncode}\n{done.stderr}"
    assert "4000 calls of 18 operators" in last
