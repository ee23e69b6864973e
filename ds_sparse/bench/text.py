"""Tables as lines of text: what operations print alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .machine import in_three_digits
from .runs import Result, Row


class Column(NamedTuple):
    """write: what a row has there; `width` characters, right-aligned."""

    heading: str
    width: int
    write: Callable[[Row], str]


def milliseconds_in(width: int) -> Column:
    return Column("ms", width, lambda row: in_three_digits(row.milliseconds))


def table(
    result: Result, width: int, columns: Sequence[Column], directions: Sequence[str], dash: str = ">"
) -> Iterator[str]:
    """A line a peer that was measured, in its columns for each direction; a dash, which `dash` aligns, for a direction
    that was not."""
    heading = " ".join(f"{column.heading:>{column.width}}" for column in columns)
    nothing = f"{'-':>{columns[0].width}}" if dash == "<" else "-"

    def cells(row: Row | None) -> str:
        if row is None:
            return f"{nothing:{dash}{len(heading)}}"
        return " ".join(f"{column.write(row):>{column.width}}" for column in columns)

    yield " " * width + " ".join(f"{direction:>{len(heading)}}" for direction in directions)
    yield " " * width + " ".join([heading] * len(directions))
    for name in result.measured:
        yield f"{name:{width}}{' '.join(cells(result.row(name, direction)) for direction in directions)}".rstrip()


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if x < 999.5 else in_three_digits(x)


def share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def lacking(result: Result, width: int = 0) -> Iterator[str]:
    """A line for each peer, in `width` characters, and reason why it has no time; without a width a line for each
    reason, with all whom it concerns."""
    lacks: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        if row.reason:
            lacks.setdefault((row.reason, row.name), []).append(row.direction)
    concerned: dict[tuple[str, str], list[str]] = {}
    directions = len({row.direction for row in result.rows})
    for (reason, name), these in lacks.items():
        concerned.setdefault((reason, "time" if len(these) == directions else " or ".join(these)), []).append(name)
    for (reason, what), names in concerned.items():
        for name in [f"{name:{width}}  no" for name in names] if width else [f"{', '.join(names)}: no"]:
            yield f"{name} {what}: {reason}"
