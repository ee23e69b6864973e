"""The rates of this machine, measured on the spot by short runs of `ds_sparse bench`."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ..bench.command import measure
from .rates import Rates
from .results import from_files
from .training import complete_rates

CASES = {
    "cuda": "fixed-16,longformer-16,bigbird-16,bigbird-32,bigbird-64,longformer-64,longformer-128,random-64,"
    "bigbird-64-d128,longformer-64-d128,longformer-128-d128",
    "cpu": "fixed-16,longformer-16,longformer-128",
}
"""Of the table of `ds_sparse bench attention`: small and large blocks, few and many of them."""

BERT_LENGTHS = {"cuda": "8192,16384", "cpu": "1024"}
PEERS = {"cuda": "ds_sparse,cudnn", "cpu": "ds_sparse,sdpa"}
SHORT = {"cuda": ["--repeats", "3", "--seconds", "1"], "cpu": ["--repeats", "1", "--seconds", "1"]}

RUNS = "attention", "bert", "bert with labelled tokens", "bert with dropout"


def measured_rates(device: str) -> Rates:
    """Measures attention, and steps of BERT, on a CPU those of a small one; some minutes. Progress and tables go to
    standard error.

    Args:
        device: 'cuda' or 'cpu'.

    Raises:
        ValueError: a run failed; its sentence is on standard error.
    """
    bert = [*SHORT[device], "--peers", "none,sdpa,longformer-64", "--seq-len", BERT_LENGTHS[device], "--device", device]
    runs = [
        ("attention", [*SHORT[device], "--cases", CASES[device], "--peers", PEERS[device], "--device", device]),
        ("bert", bert),
        ("bert", [*bert, "--labelled-only"]),
        ("bert", [*bert, "--dropout", "0.1"]),
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        files = []
        for name, (operation, arguments) in zip(RUNS, runs, strict=True):
            file = Path(folder) / f"{name}.json"
            if measure(operation, [*arguments, "--json", str(file)]) or not file.exists():
                raise ValueError(f"ds_sparse bench {operation} failed here, so that there are no rates for a plan.")
            files.append(file)
        return here(complete_rates(from_files(files)))


def here(rates: Rates) -> Rates:
    return replace(rates, sources=tuple(f"measured here: {source}" for source in rates.sources))
