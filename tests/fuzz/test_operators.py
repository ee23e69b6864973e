"""Ten seconds of spoiled calls; `python tests/fuzz/operators.py SECONDS SEED` for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("operators.py")


def test_no_call_of_an_operator_ends_the_process():
    done = subprocess.run([sys.executable, PROGRAM, "10", "1"], capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, (
        f"{last} ended with {done.returncode}; {PROGRAM} {last.split()[1]} prints it\n{done.stderr}"
    )
    assert "calls of" in last
