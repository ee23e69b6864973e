"""Tables as lines of text: what operations print alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .machine import in_three_digits
from .registry import Result, Row


def columns(
    result: Result, width: int, heading: str, cell: Callable[[Row | None], str], directions: Sequence[str]
) -> Iterator[str]:
    """A line a peer that was measured, and a column a direction, whose cells are as wide as `heading`."""
    yield " " * width + " ".join(f"{direction:>{len(heading)}}" for direction in directions)
    yield " " * width + " ".join([heading] * len(directions))
    for name in result.measured:
        cells = (f"{cell(result.row(name, direction)):>{len(heading)}}" for direction in directions)
        yield f"{name:{width}}{' '.join(cells)}".rstrip()


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if x < 999.5 else in_three_digits(x)


def share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def lacking(result: Result, width: int) -> Iterator[str]:
    """A line for each peer and reason why it has no time."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        if row.reason:
            missing.setdefault((row.name, row.reason), []).append(row.direction)
    for (name, reason), these in missing.items():
        yield f"{name:{width}}  no {in_words(these, result)}: {reason}"


def lacking_together(result: Result) -> Iterator[str]:
    """A line for each reason, with all whom it concerns."""
    missing: dict[str, dict[str, list[str]]] = {}
    for row in result.rows:
        if row.reason:
            missing.setdefault(row.reason, {}).setdefault(row.name, []).append(row.direction)
    for reason, concerned in missing.items():
        for these in dict.fromkeys(map(tuple, concerned.values())):
            names = ", ".join(name for name, lacks in concerned.items() if tuple(lacks) == these)
            yield f"{names}: no {in_words(these, result)}: {reason}"


def in_words(lacks: Sequence[str], result: Result) -> str:
    """Directions without a time."""
    return "time" if len(lacks) == len({row.direction for row in result.rows}) else " or ".join(lacks)
