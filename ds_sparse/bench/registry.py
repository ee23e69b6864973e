"""What an operation, a peer and a result of `ds_sparse bench` consist of.

A program adds operations, or peers of an operation, before it calls the command line: `OPERATIONS["bert"] = "a line"`,
`MODULES["bert"] = "benchmarks.bert"`, `operation("attention").peers["fa4"] = build`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .machine import DIRECTIONS

if TYPE_CHECKING:
    from .markdown import Table

BF16_ON_A_GPU = {"cpu": ["fp32"], "cuda": ["bf16"]}
"""Dtypes that a device measures, if an operation has no others."""

SECONDS = {"cpu": 60, "cuda": 60}
"""The time after which no new round of a case begins, if an operation has no other."""

MODULES: dict[str, str] = {}
"""Modules of operations that are not in this package."""


def operation(name: str) -> Any:
    """The `OPERATION` of a module: an `Operation`, or anything else with its `add`, `measure`, `restore`, `report` and
    `tables`."""
    return import_module(MODULES.get(name, f"{__package__}.{name}")).OPERATION


def as_given(x: Tensor) -> Tensor:
    return x


def tokens_first(x: Tensor) -> Tensor:
    """(B, H, T, D) with the memory order (B, T, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class Peer:
    """Whoever computes a case: `call(*inputs)`, and what to know of it.

    Attributes:
        inputs: of the call; None: those of the problem.
        beside: the name of the peer that does the same job densely; "" if there is none.
        dense: it computes every score, whatever the structure says.
        no_backward: why it cannot be differentiated; "" if it can.
        arranged: from an input of the problem to what `call` takes, such as `tokens_first`.
        as_row: from what `call` takes or returns to the shape of the problem's inputs.
        lengths: of the documents that it computes, from the row's start; None: all of the case.
        filled: the part of the scores in the blocks that are computed that is live; None where it is not known.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] | None = None
    beside: str = ""
    dense: bool = False
    no_backward: str = ""
    arranged: Callable[[Tensor], Tensor] = as_given
    as_row: Callable[[Tensor], Tensor] = as_given
    lengths: tuple[int, ...] | None = None
    filled: float | None = None


Build = Callable[[Any], Peer]
"""Makes a peer for a problem, or raises the reason why there is none."""


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


@dataclass(frozen=True)
class Density:
    """The live part of a case's scores, which is all that most operations say of it."""

    density: float


Numbers = Callable[[Any, "Peer | None", Row, Mapping[tuple[str, str], float]], dict[str, Any]]


@dataclass(frozen=True)
class Operation:
    """An entry of the registry.

    Attributes:
        description: of help.
        dtypes, seconds: what a device measures by default, and after how long no round of a case begins.
        case, about: dataclasses of a case, and of what it comes to; both stand in each row of the JSON.
        problem: from a case, a device and the options to operands, with `verify(name, peer)`.
        peers: builders by name.
        ours: peers that are ds_sparse's; where one of them has no time the run has failed.
        options: adds those of this operation alone.
        cases, names: what to measure, and which peers; ValueError says what is wrong with the options.
        abouts: from a problem and its peers to `about`.
        numbers: those of a row that only this operation has, from problem, peer, row and all medians.
        lines: a table of the results of one shape.
        summary: paragraphs below all tables.
        pages: tables for a page, by name.
        key: the JSON's word for a row's name.
        fields: what the JSON has of a `Row`, besides name, direction, milliseconds, rounds and reason.
        trains: forward is that of training, which keeps what backward needs.
        shape: cases of one shape, which follow one another, are one table; by default each is its own.
        rates: the rates of a GPU are measured and printed before anything else.
        packages: those whose versions are printed.
    """

    name: str
    description: str
    case: type
    problem: Callable[[Any, torch.device, argparse.Namespace], Any]
    peers: dict[str, Build]
    ours: tuple[str, ...]
    options: Callable[[argparse.ArgumentParser], None]
    cases: Callable[[argparse.Namespace], list[Any]]
    names: Callable[[argparse.Namespace], list[str]]
    numbers: Numbers
    lines: Callable[[list[Result]], Iterator[str]]
    pages: Callable[[list[Result], argparse.Namespace], dict[str, Table]]
    fields: tuple[str, ...]
    summary: Callable[[list[Result], argparse.Namespace], Iterable[Iterable[str]]] = lambda results, args: ()
    about: type = Density
    abouts: Callable[[Any, Mapping[str, Peer]], Any] = lambda problem, peers: Density(problem.size.density)
    dtypes: Mapping[str, list[str]] = field(default_factory=lambda: BF16_ON_A_GPU)
    key: str = "peer"
    directions: tuple[str, ...] = DIRECTIONS
    trains: bool = False
    shape: Callable[[Any], Hashable] | None = None
    rates: bool = False
    seconds: Mapping[str, int] = field(default_factory=lambda: SECONDS)
    packages: list[str] = field(default_factory=list)

    def add(self, parser: argparse.ArgumentParser) -> None:
        from .command import add_shared

        parser.description = self.description
        add_shared(parser, self.dtypes, self.seconds)
        self.options(parser)

    def measure(self, args: argparse.Namespace, device: torch.device) -> int:
        from .run import measure

        return measure(self, args, device)

    def restore(self, rows: Sequence[dict[str, Any]]) -> list[Result]:
        from .runs import restore

        return restore(self, rows)

    def report(self, results: Iterable[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
        from .run import by_shape, report

        return report(self, by_shape(self, results, lambda result: result.case), args)

    def tables(self, results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
        return {name: table for name, table in self.pages(results, args).items() if table.rows}
