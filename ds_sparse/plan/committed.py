"""The rates that are committed, so that a plan need not take them from the results again, which takes ten seconds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..bench.runs import restored
from .rates import Rates
from .results import H200

FILE = Path(__file__).with_name("h200.json")
"""Written by website/plan_table.py from the results of `results.COMMITTED`."""

MEMORY_GIB = {H200: 139.0}
"""GiB of a machine's GPU as torch tells them, where no GPU is here to be asked."""


def committed_rates() -> Rates:
    """Those of an H200."""
    return restored(Rates, json.loads(FILE.read_text(encoding="utf-8")))


def written(rates: Rates) -> str:
    """The text of the file that has these rates, in as many digits as mean something."""
    return json.dumps(_rounded(asdict(rates)), indent=1) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(of_key) for key, of_key in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
