"""The longest sequence that a step fits into memory with: which lengths are tried."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.models.results import LENGTHS, NO_RESULT, WITHIN, Case, Row, is_near
from ds_sparse.bench.machine import GIB

SPARED = 0.05
"""Part of the memory that is not aimed at, and as much again after each length that did not fit."""


@dataclass
class Bracket:
    """Knowledge of the longest length so far.

    Attributes:
        room: GiB of a GPU.
        fitted: GiB at the highest by length.
        failed: lengths that did not fit.
        first: the length to begin with where none is known; None where nothing is to be tried then.
    """

    room: float
    fitted: dict[int, float] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    first: int | None = None

    @classmethod
    def of(cls, device: torch.device, first: int | None = None) -> Bracket:
        """A GPU's memory, with nothing known."""
        return cls(torch.cuda.get_device_properties(device).total_memory / GIB, first=first)

    def add(self, seq_len: int, peak_gib: float | None) -> None:
        """A length with its GiB at the highest, or None where it did not fit."""
        if peak_gib is not None:
            self.fitted[seq_len] = peak_gib
        else:
            self.failed.append(seq_len)

    def next_length(self) -> int | None:
        """The length to try next: where a line through the two longest meets the memory, else twice the longest, or the
        middle. None where the longest is known, or nothing fits."""
        failed = min(self.failed, default=None)
        if not self.fitted:
            if self.first is None or failed is None:
                return self.first
            return failed // 2 // LENGTHS * LENGTHS or None
        longest = max(self.fitted)
        if is_near(longest, failed):
            return None
        least = longest * (1 + WITHIN) + LENGTHS
        most = 4 * longest if failed is None else failed / (1 + WITHIN)
        aimed = min(max(self._aimed(longest), least), most) if least < most else (longest + most * (1 + WITHIN)) / 2
        return int(aimed) // LENGTHS * LENGTHS

    def _aimed(self, longest: int) -> float:
        if len(self.fitted) > 1:
            before = sorted(self.fitted)[-2]
            a_token = (self.fitted[longest] - self.fitted[before]) / (longest - before)
            room = self.room * (1 - SPARED * (1 + len(self.failed)))
            if a_token > 0:
                return longest + (room - self.fitted[longest]) / a_token
        return (longest + min(self.failed)) / 2 if self.failed else 2 * longest


def tries(
    bracket: Bracket, attempt: Callable[[int, float], tuple[Case, Row]], seconds: float
) -> Iterator[tuple[Case, Row]]:
    """Looks for the longest sequence; no try begins after so many seconds, or after one that took too long.

    Args:
        bracket: what is known, from which the search sets out.
        attempt: `attempt(seq_len, left)`, a case of that length and its row, with `left` of the seconds.
    """
    begin = time.monotonic()
    while (length := bracket.next_length()) is not None and (left := begin + seconds - time.monotonic()) > 0:
        case, row = attempt(length, left)
        yield case, row
        if row.reason.startswith(NO_RESULT):
            return
        bracket.add(length, row.peak_gib)
