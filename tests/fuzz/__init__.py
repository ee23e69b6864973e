"""The attack on the operations: `python -m tests.fuzz --help`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of `helpers`, for python -m tests.fuzz
