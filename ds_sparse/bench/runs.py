"""A run of `ds_sparse bench`: what was measured, where and when, as it is printed and as its JSON holds it."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from ..tools.files import add_force
from . import command_of
from .floors import Ceilings

Kind = TypeVar("Kind")
Fields = dict[str, Any]
"""A row of the JSON: a case's fields, and what was measured of one peer in one direction."""

WIDTH = 120
"""Characters of a printed line."""

NEEDED = ("operation", "arguments", "machine", "torch", "commit", "date", "ceilings", "rows")
"""Keys that each JSON has."""


@dataclass(frozen=True)
class Row:
    """One peer in one direction; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        dense: the peer that does the same job densely.
        to_dense, to_ours, to_floor: the time over that of `dense`, of ds_sparse, and over `floor_ms`.
        floor_ms: what nothing of this machine can pass; `bound` says by what.
        l2_floor_ms: what bringing the operands from L2 takes.
        tflops: FLOPs of live blocks alone, 4 D a score forward and 10 D backward, a second.
        tokens_per_second: documents' tokens, without padding.
        of_unpacked: live scores a second over those of the batch without documents.
        preparation_s: seconds to build, compile and verify the peer.
        operators: those that take most of its time, if they were asked for.
    """

    name: str
    direction: str
    milliseconds: float | None = None
    dense: str = ""
    to_dense: float | None = None
    to_ours: float | None = None
    to_floor: float | None = None
    floor_ms: float | None = None
    l2_floor_ms: float | None = None
    bound: str = ""
    tflops: float | None = None
    tokens_per_second: float | None = None
    of_unpacked: float | None = None
    preparation_s: float | None = None
    operators: list[str] = field(default_factory=list)
    rounds: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Density:
    """The live part of a case's scores, which is all that most operations say of it."""

    density: float


@dataclass(frozen=True)
class Result:
    """A case, measured. case, about: of the operation's types."""

    case: Any
    about: Any
    rows: list[Row]

    def row(self, name: str, direction: str) -> Row | None:
        """The row of a peer that was measured."""
        found = (row for row in self.rows if (row.name, row.direction) == (name, direction) and not row.reason)
        return next(found, None)

    @property
    def measured(self) -> list[str]:
        """Peers with a time, in order."""
        return list(dict.fromkeys(row.name for row in self.rows if not row.reason))

    @property
    def rounds(self) -> int:
        return max((row.rounds for row in self.rows), default=0)

    def by_direction(self, number: str) -> dict[str, float]:
        """A number of the rows that is the same for all peers, such as `floor_ms`."""
        return {row.direction: getattr(row, number) for row in self.rows if getattr(row, number) is not None}

    def fastest(self, direction: str, but: Collection[str]) -> Row | None:
        """The fastest of the others."""
        others = [row for name in self.measured if name not in but and (row := self.row(name, direction))]
        return min(others, key=lambda row: row.milliseconds, default=None)


@dataclass(frozen=True)
class Run:
    """One call of `ds_sparse bench`.

    Attributes:
        arguments: those after the operation, but for `--json`.
        conditions: what the numbers depend on besides the case: machine, versions, commit, date; perhaps a note.
        ceilings: rates of a GPU by dtype; empty on a CPU.
    """

    operation: str
    arguments: list[str]
    conditions: dict[str, str]
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    rows: list[Fields] = field(default_factory=list)

    @property
    def command(self) -> str:
        return shlex.join([*command_of(self.operation).split(), *self.arguments])

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
    """All but `--json` with its file and `--force`, which do not matter to what is measured."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json")
    add_force(parser)
    return parser.parse_known_args(arguments)[1]


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
