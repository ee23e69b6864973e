"""The longest sequence that a step of BERT fits with, each attention by itself, each try in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.models.bert import make_step
from benchmarks.models.bert_results import Case, Row
from benchmarks.models.longest_sequence import Bracket, tries
from benchmarks.models.own_processes import FORKSERVER, Failure, results_of
from ds_sparse.bench.cases import EAGER
from ds_sparse.bench.machine import GIB, wall_ms

FIRST, FIRST_EAGER = 32768, 4096
"""The length that is tried first; that of attention whose memory grows with its square."""


def longest_tries(
    case: Case, names: Sequence[str], seconds: float, device: torch.device
) -> Iterator[tuple[Case, list[Row]]]:
    """Looks for the longest sequence of each attention for so many seconds at most.

    Args:
        case: of any length, a try.
        device: a GPU.
    """
    for name in names:
        bracket = Bracket.of(device, FIRST_EAGER if name == EAGER else FIRST)
        for tried, row in tries(bracket, partial(attempt, name, case, device), seconds):
            yield tried, [row]


def attempt(name: str, case: Case, device: torch.device, seq_len: int, left: float) -> tuple[Case, Row]:
    """A step in a process of its own, which is ended after the seconds that are left."""
    case = replace(case, seq_len=seq_len)
    # Imports take most of a short try; those of this module touch no GPU.
    (row,) = results_of(rows_of, [(name, case, device)], [left], FORKSERVER, [__name__])
    return case, Row(name, reason=row.reason) if isinstance(row, Failure) else row


def rows_of(name: str, case: Case, device: torch.device) -> Iterator[Row]:
    """The row of a single step."""
    step = make_step(name, case, device)
    milliseconds = wall_ms(step, device)
    peak = torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None
    yield Row(name, milliseconds, peak, 1)
