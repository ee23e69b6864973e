"""The longest sequence that a step fits into memory with: tries, each in processes of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from .machine import GIB
from .rank_processes import rows_of
from .sequence_rank import Task
from .sequence_results import Case, Row

WITHIN = 1 / 16
"""Part of the longest length by which the shortest that does not fit is longer, at most."""

LENGTHS = 1024
"""Lengths are multiples of this."""

SPARED = 0.05
"""Part of the memory that is not aimed at, and as much again after each length that did not fit."""


@dataclass
class Bracket:
    """What is known of the longest length.

    Attributes:
        room: GiB of a GPU.
        fitted: GiB at the highest by length.
        failed: lengths that did not fit.
    """

    room: float
    fitted: dict[int, float] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)

    def add(self, case: Case, row: Row) -> None:
        if row.peak_gib is not None:
            self.fitted[case.seq_len] = row.peak_gib
        else:
            self.failed.append(case.seq_len)

    def next_length(self) -> int | None:
        """What to try next: where a line through the two longest meets the memory, else twice the longest, or the
        middle. None where the longest is known, or nothing fitted."""
        if not self.fitted:
            return None
        longest, failed = max(self.fitted), min(self.failed, default=None)
        if failed is not None and failed <= longest * (1 + WITHIN) + LENGTHS:
            return None
        least = longest * (1 + WITHIN) + LENGTHS
        most = 4 * longest if failed is None else failed / (1 + WITHIN)
        aimed = min(max(self._aimed(), least), most) if least < most else (longest + most * (1 + WITHIN)) / 2
        return int(aimed) // LENGTHS * LENGTHS

    def _aimed(self) -> float:
        longest = max(self.fitted)
        if len(self.fitted) > 1:
            before = sorted(self.fitted)[-2]
            a_token = (self.fitted[longest] - self.fitted[before]) / (longest - before)
            room = self.room * (1 - SPARED * (1 + len(self.failed)))
            if a_token > 0:
                return longest + (room - self.fitted[longest]) / a_token
        return (longest + min(self.failed)) / 2 if self.failed else 2 * longest


def tries(task: Task, measured: Mapping[Case, Row], seconds: float, device: torch.device) -> Iterator[tuple[Case, Row]]:
    """Looks for the longest sequence of a task; none begins after so many seconds.

    Args:
        task: of any length.
        measured: rows of the task's other lengths, from which the search sets out.
        device: a GPU of the kind that all ranks have.
    """
    begin, room = time.monotonic(), torch.cuda.get_device_properties(device).total_memory / GIB
    bracket = Bracket(room)
    for case, row in measured.items():
        bracket.add(case, row)
    while (length := bracket.next_length()) is not None and time.monotonic() - begin < seconds:
        case = replace(task.case, seq_len=length)
        for _, row in rows_of([replace(task, case=case, alone=None, only_tries=True)], device):
            bracket.add(case, row)
            yield case, row
