"""Results of `ds_sparse bench` as tables for a page, in GitHub's Markdown.

Times are milliseconds. What another takes is how many times as long as ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any

from .machine import in_three_digits
from .runs import Result, Run

SHAPE = "B, H, T, D"
"""A column that is left out where all rows have the same."""

Pair = tuple[float | None, ...]
"""A number for each direction; None where there is none."""

Columns = Mapping[str, Callable[[Result], str]]
"""Columns of a line a case, by heading."""


@dataclass(frozen=True)
class Table:
    """Attributes:
    ways: what numbers with a slash between them are of.
    notes: sentences of numbers of the whole table.
    """

    heading: Sequence[str]
    rows: list[list[str]]
    ways: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    def in_markdown(self) -> str:
        shapes = {row[self.heading.index(SHAPE)] for row in self.rows} if SHAPE in self.heading else set()
        shown = [name != SHAPE or len(shapes) > 1 or len(self.rows) == 1 for name in self.heading]
        lines = [list(compress(row, shown)) for row in (self.heading, ["---"] * len(self.heading), *self.rows)]
        table = "\n".join("".join(f"| {cell} ".replace("  ", " ") for cell in cells) + "|" for cells in lines)
        ways = [f"Numbers with a slash are {' / '.join(self.ways)}."] if self.ways else []
        if not all(shown):
            ways = [" ".join([*ways, f"{SHAPE} are {shapes.pop()}."])]
        notes = ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join([table, *ways, *notes])


def sources(runs: Sequence[Run], links: Sequence[str] = ()) -> str:
    """Where and when runs were measured, a line each place, with their commands; links come after these."""
    commands: dict[str, list[str]] = {}
    for run, link in zip(runs, links or [""] * len(runs)):
        about = run.conditions
        driver = f", driver {about['driver']}" if "driver" in about else ""
        where = f"{about['machine']}{driver}, torch {about['torch']}, commit {about['commit']}, {about['date']}"
        where += f" ({about['note']})" if "note" in about else ""
        printed = f" ([printed]({link}))" if link else ""
        commands.setdefault(where, []).append(f"`{run.command}`{printed}")
    return "\n\n".join(f"{where}: {', '.join(said)}" for where, said in commands.items())


def pair(numbers: Iterable[float | None], write: Callable[[float], str] = in_three_digits) -> str:
    """`0.32 / 0.98`; nothing where there is no number at all."""
    texts = ["-" if number is None else write(number) for number in numbers]
    return " / ".join(texts) if set(texts) != {"-"} else ""


def ratio(number: float) -> str:
    return f"{number:.2f}" if number < 1.995 else f"{number:.1f}" if number < 9.95 else f"{number:.0f}"


def percent(part: float) -> str:
    return f"{part:.1%}".replace("%", " %") if part < 0.0995 else f"{part:.0%}".replace("%", " %")


def span(ratios: Iterable[float | None]) -> str:
    """`1.2 to 9.5`; nothing where there is none."""
    known = [number for number in ratios if number is not None]
    if not known:
        return ""
    ends = ratio(min(known)), ratio(max(known))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def spans(who: str, ours: str, pairs: Sequence[Pair], directions: Sequence[str]) -> Iterator[str]:
    """A sentence of all rows, which begins with who takes how many times as long as ours."""
    said = [f"{text} times as long {way}" for text, way in zip(map(span, zip(*pairs)), directions) if text]
    if said:
        yield f"{who} {', '.join(said)} as {ours}."


def milliseconds(result: Result, name: str, ways: Iterable[str]) -> Pair:
    return numbers(result, name, ways, "milliseconds")


def in_ms(name: str, ways: Sequence[str]) -> Callable[[Result], str]:
    """A column of a peer's times."""
    return lambda result: pair(milliseconds(result, name, ways))


def numbers(result: Result, name: str, ways: Iterable[str], of: str) -> Pair:
    """A number of a peer in each direction."""
    return tuple(None if row is None else getattr(row, of) for row in (result.row(name, way) for way in ways))


def over(theirs: Pair, ours: Pair) -> Pair:
    return tuple(x / y if x is not None and y is not None else None for x, y in zip(theirs, ours))


def takes(result: Result, name: str, ours: str, ways: Iterable[str]) -> Pair:
    """A peer's times over ours."""
    return over(*(milliseconds(result, who, ways) for who in (name, ours)))


def made_of(columns: Columns, results: Iterable[Result], ways: Sequence[str] = (), notes: Iterable[str] = ()) -> Table:
    """A line a case."""
    return Table(list(columns), [[write(result) for write in columns.values()] for result in results], ways, [*notes])


def beside(
    columns: Columns, results: Sequence[Result], ours: str, others: Mapping[str, str], ways: Sequence[str]
) -> Table:
    """A line a case: columns, and what each of `others`, by name, takes of the time of ours.

    others: from names to how they are written.
    """

    def time_of(name: str) -> Callable[[Result], str]:
        return lambda result: pair(takes(result, name, ours, ways), ratio)

    ratios = {f"{said} takes": time_of(name) for name, said in others.items()}
    notes = (notes_on(results, name, ours, ways, said) for name, said in others.items())
    return made_of({**columns, **ratios}, results, ways, chain(*notes))


def notes_on(results: Iterable[Result], name: str, ours: str, ways: Sequence[str], said: str = "") -> Iterator[str]:
    """A sentence on what a peer takes of the time of ours in all cases."""
    return spans(f"{said or f'`{name}`'} takes", f"`{ours}`", [takes(r, name, ours, ways) for r in results], ways)


def shape_of(result: Result) -> str:
    """The text of the column `SHAPE`."""
    case = result.case
    return f"{case.batch}, {case.heads}, {case.seq_len}, {case.head_dim}"


def also(values: Iterable[Any], value: Any) -> str:
    """A value of a case, where others have another."""
    return f", {value}" if len(set(values)) > 1 else ""
