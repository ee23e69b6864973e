"""The longest sequence that a step fits into memory with: which lengths are tried, and what they say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from benchmarks.models.reasons import took_too_long
from ds_sparse.bench.machine import GIB

Tried = tuple[Any, Any]
"""A case that has `seq_len`, and its row, which has `peak_gib` and `reason`."""

WITHIN = 1 / 16
"""Part of the longest length by which the shortest that does not fit is longer, at most."""

LENGTHS = 1024
"""Lengths are multiples of this."""

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


def require_gpu(device: torch.device) -> None:
    """Raises ValueError where no memory could be filled."""
    if device.type == "cpu":
        raise ValueError("--longest: a CPU's memory is not filled by trying; measure on a GPU, with --device cuda.")


def tries(bracket: Bracket, attempt: Callable[[int, float], Tried], seconds: float) -> Iterator[Tried]:
    """Looks for the longest sequence; no try begins after so many seconds, or after one that took too long.

    Args:
        bracket: what is known, from which the search sets out.
        attempt: `attempt(seq_len, left)`, a case of that length and its row, with `left` of the seconds.
    """
    begin = time.monotonic()
    while (length := bracket.next_length()) is not None and (left := begin + seconds - time.monotonic()) > 0:
        case, row = attempt(length, left)
        yield case, row
        if took_too_long(row.reason):
            return
        bracket.add(length, row.peak_gib)


def is_near(longest: int, failed: int | None) -> bool:
    """True if no length between one that fits and one that does not is worth a try."""
    return failed is not None and failed <= longest * (1 + WITHIN) + LENGTHS


class Longest(NamedTuple):
    """The longest sequence that fits, and the shortest that does not; None where none was found that does not."""

    case: Any
    row: Any
    failed: int | None

    @property
    def is_known(self) -> bool:
        """False where longer ones were left to try."""
        return is_near(self.case.seq_len, self.failed)

    @property
    def at_least(self) -> str:
        """Words before its length, and before all that follows from it."""
        return "" if self.is_known else "at least "

    @property
    def tokens(self) -> str:
        return f"{self.at_least}{self.case.seq_len:,}"

    @property
    def said(self) -> str:
        """The length in words, with how the search ended."""
        ended = "" if self.is_known else ", where the search's time was over"
        return f"{self.tokens} tokens{ended}" + ("" if self.failed is None else f"; {self.failed:,} do not fit")


def of_any_length(case: Any) -> Any:
    """The settings that cases share which differ in length alone."""
    return replace(case, seq_len=0)


def longest_of(tried: Iterable[Tried], key: Callable[[Any], Any]) -> dict[tuple[Any, Any], Longest]:
    """The longest sequence of rows of the same key, in cases that differ in length alone, by what they share; of none
    where nothing fits."""
    groups: dict[tuple[Any, Any], list[Tried]] = {}
    for case, row in tried:
        groups.setdefault((of_any_length(case), key(row)), []).append((case, row))
    found = {}
    for shared, pairs in groups.items():
        failed = [case.seq_len for case, row in pairs if row.reason and not took_too_long(row.reason)]
        fitted = [(case, row) for case, row in pairs if not row.reason]
        if fitted:
            found[shared] = Longest(*max(fitted, key=lambda one: one[0].seq_len), min(failed, default=None))
    return found
