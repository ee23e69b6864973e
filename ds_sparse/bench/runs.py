"""A run of `ds_sparse bench`: what was measured, where and when, as it is printed and as its JSON holds it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from .floors import Ceilings
from .registry import Operation, Result, Row

Kind = TypeVar("Kind")
Fields = dict[str, Any]
"""A row of the JSON: a case's fields, and what was measured of one peer in one direction."""

WIDTH = 120
"""Characters of a printed line."""

NEEDED = ("operation", "arguments", "machine", "torch", "commit", "date", "ceilings", "rows")
"""Keys that each JSON has."""

OF_ALL = ("direction", "milliseconds", "rounds", "reason")
"""Fields of a `Row` that the JSON of every operation has."""


@dataclass(frozen=True)
class Run:
    """One call of `ds_sparse bench`.

    Attributes:
        arguments: those after the operation, but for `--json`.
        conditions: what the numbers depend on besides the case: machine, versions, commit, date; perhaps a note.
        ceilings: rates of a GPU by dtype; empty on a CPU.
        rows: so far.
    """

    operation: str
    arguments: list[str]
    conditions: dict[str, str]
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    rows: list[Fields] = field(default_factory=list)

    @property
    def command(self) -> str:
        return shlex.join(["ds_sparse", "bench", self.operation, *self.arguments])

    def heading(self) -> Iterator[str]:
        """Lines above the tables."""
        yield self.command
        yield ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        for name, ceilings in self.ceilings.items():
            yield f"measured here in {name}: {ceilings.in_words()}"

    def add(self, rows: Sequence[Fields], path: str | None) -> None:
        """Adds rows of one more case and writes all, so that what was measured outlives what interrupts the rest."""
        self.rows.extend(rows)
        if path is not None:
            ceilings = {name: asdict(rates) for name, rates in self.ceilings.items()}
            about = {"operation": self.operation, "arguments": self.arguments, **self.conditions, "ceilings": ceilings}
            unfinished = f"{path}.unfinished"
            with open(unfinished, "w", encoding="utf-8") as file:
                json.dump(about | {"rows": self.rows}, file, indent=1)
            os.replace(unfinished, path)


def read(path: str) -> Run:
    """A run from its JSON.

    Raises:
        ValueError: what is there is no such JSON; the sentence says what it lacks.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ValueError(f"{path} is not JSON; give what ds_sparse bench OPERATION --json has written.") from None
    lacking = [name for name in NEEDED if not isinstance(data, dict) or name not in data]
    if lacking:
        raise ValueError(
            f"{path} has no {', '.join(lacking)}; give what this version of ds_sparse bench has written with --json."
        )
    own = ("operation", "arguments", "ceilings", "rows")
    try:
        return restored(Run, data | {"conditions": {name: data[name] for name in data if name not in own}})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def without_json(arguments: list[str]) -> list[str]:
    """All but `--json` and its file, which do not matter to what is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json")
    return parser.parse_known_args(arguments)[1]


def record(operation: Operation, result: Result) -> list[Fields]:
    """The rows of a result with its case, flat, as they go into the JSON."""
    about = asdict(result.case) | asdict(result.about)
    kept = (*operation.fields, *OF_ALL)
    return [about | {operation.key: row.name} | {name: getattr(row, name) for name in kept} for row in result.rows]


def restore(operation: Operation, rows: Sequence[Fields]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """

    def of_case(row: Fields) -> tuple[Any, Any]:
        return restored(operation.case, row), restored(operation.about, row)

    def measured(row: Fields) -> Row:
        known = {name: row[name] for name in (*operation.fields, *OF_ALL) if name in row}
        return restored(Row, known | ({"name": row[operation.key]} if operation.key in row else {}))

    groups = groupby(rows, key=of_case)
    return [Result(case, about, [measured(row) for row in group]) for (case, about), group in groups]


def restored(kind: type[Kind], row: Mapping[str, Any]) -> Kind:
    """A dataclass from a row that has its fields, among others.

    Raises:
        ValueError: a field that is missing, or of another type.
    """
    try:
        return adapter(cast(Any, kind)).validate_python(row)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        where = ".".join(map(str, mistake["loc"]))
        raise ValueError(f"{where} of a {kind.__name__.lower()}: {mistake['msg']}.") from None


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def show(*lines: str) -> None:
    """Prints an empty line and these. Sentences that are too long are wrapped; tables are narrower."""
    print()
    for line in lines:
        wrapped = [line]
        if len(line) > WIDTH:
            wrapped = textwrap.wrap(
                line, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
            )
        print(*wrapped, sep="\n")
    sys.stdout.flush()
