"""Cases one after another: which operation has which number, runs of them, and what they print."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from . import blocks, choosing, pairs, selections, windows
from .cases import Case, Draw
from .compare import Outcome, check
from .spoilt import planted

OPERATIONS = blocks.OPERATIONS | windows.OPERATIONS | pairs.OPERATIONS | selections.OPERATIONS | choosing.OPERATIONS
SHARES = {
    "block_sparse_attention": 6, "attention at an offset": 4, "packed attention": 3, "MatMul": 3, "Softmax": 3,
    "window_attention": 4, "sparse_attn": 3, "selected_attention": 4, "topk_attention": 3,
}  # fmt: skip
TURNS = [name for name in OPERATIONS for _ in range(SHARES.get(name, 2))]
"""An operation for each number, one round after another."""
PROGRESS = 30.0
"""Seconds between lines that say how far a run is."""


@dataclass
class Report:
    """What a run found: failing cases, and by operation the cases and the largest error over its bound."""

    device: str
    failures: list[str] = field(default_factory=list)
    cases: Counter[str] = field(default_factory=Counter)
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        rows = []
        for name, count in sorted(self.cases.items()):
            ratio, of = self.largest[name]
            rows.append(f"{name:24} {count:7} cases, largest error {ratio:.3f} of its bound: {of}")
        return [*rows, f"{self.cases.total()} cases on {self.device}, {len(self.failures)} failed"]


def operation_of(number: int) -> str:
    return TURNS[number % len(TURNS)]


def case_of(seed: int, number: int, device: str, skew: float = 0.0) -> Case:
    """skew: the share by which the operation is given another factor of scores than it is compared with."""
    draw = Draw(f"{seed}/{number}/{device}", device)
    poisoned, threads = draw.pick("poisoned memory", (True, False)), draw.pick("threads", (1,) * 9 + (3,))
    case = planted(draw, OPERATIONS[operation_of(number)](draw, 1 + skew))
    return replace(case, poisoned=poisoned, threads=threads)


def outcome_of(case: Case, device: str) -> Outcome:
    """An exception is a fault as well."""
    try:
        return check(case, device)
    except Exception as error:  # noqa: BLE001
        return Outcome([f"{type(error).__name__}: {error}"], math.inf, "")


def described(case: Case) -> str:
    return "; ".join(f"{name}: {value}" for name, value in case.words.items())


def run(
    seed: int,
    device: str,
    cases: float = math.inf,
    seconds: float = math.inf,
    operation: str | None = None,
    skew: float = 0.0,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
    failures: float = 20,
    first: int = 0,
) -> Report:
    """Runs cases from number `first` on until there are so many, or the seconds are over, or so many have failed."""
    report, start = Report(device), time.monotonic()
    said = start
    for number in numbers(operation, first):
        now = time.monotonic()
        if report.cases.total() >= cases or now - start >= seconds or len(report.failures) >= failures:
            break
        if now - said >= PROGRESS:
            said = now
            say(f"{report.cases.total()} cases after {now - start:.0f} s, {len(report.failures)} failed")
        name, case = operation_of(number), case_of(seed, number, device, skew)
        outcome = outcome_of(case, device)
        report.cases[name] += 1
        report.largest[name] = max(
            report.largest.get(name, (0.0, "")), (outcome.ratio, f"{outcome.of}, {seed}/{number}")
        )
        if outcome.faults:
            report.failures.append(told(case, outcome, seed, number, device))
            say(report.failures[-1])
    return report


def told(case: Case, outcome: Outcome, seed: int, number: int, device: str) -> str:
    """A failure in words, and the line that repeats it."""
    return "\n  ".join(
        [
            f"FAILED {case.operation}: {described(case)}",
            *outcome.faults,
            f"again: python -m tests.fuzz --device {device} --case {seed}/{number}",
        ]
    )


def numbers(operation: str | None, first: int = 0) -> Iterator[int]:
    number = first
    while True:
        if operation in (None, operation_of(number)):
            yield number
        number += 1


def repeat(seed: int, number: int, device: str, skew: float = 0.0) -> bool:
    """Runs one case and tells of it; whether it passed."""
    case = case_of(seed, number, device, skew)
    outcome = outcome_of(case, device)
    if outcome.faults:
        print(told(case, outcome, seed, number, device))
    else:
        print(f"passed {case.operation}: {described(case)}")
        print(f"  largest error {outcome.ratio:.3f} of its bound: {outcome.of}")
    return not outcome.faults
