"""What the program prints of the cost of checksums: each part of a save and of a load, with its share."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow("times saves and loads for six seconds")
def test_each_part_of_a_save_and_of_a_load_is_timed():
    program = Path(__file__).with_name("time_checkpoints.py")
    done = subprocess.run(
        [sys.executable, program, "--mib", "1", "--times", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(save|load) +(\D+?) +([\d.]+) s +[\d.]+ s/GiB +([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("save", "writing"), ("save", "checksums"), ("save", "waiting for the disk"), ("save", "all"),
        ("load", "checksums"), ("load", "all"),
    ]  # fmt: skip
    for what in ("save", "load"):
        *parts, whole = (float(seconds) for row_of, _, seconds, _ in rows if row_of == what)
        assert all(parts) and sum(parts) <= whole + 0.01
