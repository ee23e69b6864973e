"""An operation of the bench, and the one loop of all: a case's peers are built, verified against float64, and timed in
turns."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..tools.terminal import Terminal, wrong
from .command import SECONDS, add_shared
from .floors import Ceilings
from .machine import DIRECTIONS, DTYPES, conditions, in_turns, time_of, versions
from .markdown import Table
from .reasons import in_short
from .registry import BF16_ON_A_GPU, Build, Peer
from .runs import Density, Fields, Result, Row, Run, restored, show

FEW = 3
"""Rounds of a first look."""

OF_ALL = ("direction", "milliseconds", "rounds", "reason")
"""Fields of a `Row` that the JSON of every operation has."""

Medians = Mapping[tuple[str, str], float]
"""Milliseconds by the names of a peer and a direction."""


@dataclass(frozen=True)
class Operation:
    """An entry of the registry.

    Attributes:
        description: of help.
        case, about: dataclasses of a case, and of what it comes to; both stand in each row of the JSON.
        problem: from a case, a device and the options to operands, with `verify(name, peer)`.
        peers: builders by name.
        ours: peers that are ds_sparse's; where one of them has no time the run has failed.
        options: adds those of this operation alone.
        cases, names: what to measure, and which peers; ValueError says what is wrong with the options.
        numbers: those of a row that only this operation has, from problem, peer, row and all medians.
        lines: a table of the results of one shape.
        pages: tables for a page, by name.
        fields: what the JSON has of a `Row`, besides name, direction, milliseconds, rounds and reason.
        summary: paragraphs below all tables.
        abouts: from a problem and its peers to `about`.
        of_case: names of the peers that a case has; by default all.
        time_of: as `machine.time_of`, of the directions of this operation.
        dtypes, seconds: what a device measures by default, and after how long no round of a case begins.
        key: the JSON's word for a row's name.
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
    numbers: Callable[[Any, Peer | None, Row, Medians], dict[str, Any]]
    lines: Callable[[list[Result]], Iterator[str]]
    pages: Callable[[list[Result], argparse.Namespace], dict[str, Table]]
    fields: tuple[str, ...]
    summary: Callable[[list[Result], argparse.Namespace], Iterable[Iterable[str]]] = lambda results, args: ()
    about: type = Density
    abouts: Callable[[Any, Mapping[str, Peer]], Any] = lambda problem, peers: Density(problem.size.density)
    of_case: Callable[[Any], Container[str]] | None = None
    time_of: Callable[..., float] | None = None
    dtypes: Mapping[str, list[str]] = field(default_factory=lambda: BF16_ON_A_GPU)
    seconds: Mapping[str, int] = field(default_factory=lambda: SECONDS)
    key: str = "peer"
    directions: tuple[str, ...] = DIRECTIONS
    trains: bool = False
    shape: Callable[[Any], Hashable] | None = None
    rates: bool = False
    packages: list[str] = field(default_factory=list)

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Adds all options."""
        parser.description = self.description
        add_shared(parser, self.dtypes, self.seconds)
        self.options(parser)

    def measure(self, args: argparse.Namespace, device: torch.device) -> int:
        """Measures, prints and writes all cases of the options; returns the exit status."""
        try:
            cases, names = self.cases(args), self.names(args)
        except ValueError as error:
            return wrong(error)
        if getattr(args, "quick", False):
            args.repeats = min(args.repeats, FEW)
        dtypes = args.dtype if self.rates and device.type == "cuda" else ()
        ceilings = {name: Ceilings.measure(device, DTYPES[name]) for name in dtypes}
        run = Run(self.name, args.arguments, conditions(device) | versions(self.packages), ceilings)
        show(*run.heading())
        failed: dict[str, None] = {}
        statuses = [0]

        def measured(case: Any) -> Result:
            mine = [name for name in names if self.of_case is None or name in self.of_case(case)]
            result = run_case(self, case, mine, device, args)
            first = self.directions[0]
            failed.update(dict.fromkeys(x for x in self.ours if x in mine and result.row(x, first) is None))
            run.add(self.record(result), args.json)
            return result

        def shapes() -> Iterator[list[Result]]:
            try:
                for together in self.by_shape(cases, lambda case: case):
                    yield list(map(measured, together))
            except (ValueError, ArithmeticError, RuntimeError) as error:
                statuses.append(wrong(error))

        for lines in self.paragraphs(shapes(), args):
            show(*lines)
        if failed:
            statuses.append(wrong(f"{', '.join(failed)} itself was wrong or failed in a case; its line says how."))
        return max(statuses)

    def record(self, result: Result) -> list[Fields]:
        """The rows of a result with its case, flat, as they go into the JSON."""
        about = asdict(result.case) | asdict(result.about)
        kept = (*self.fields, *OF_ALL)
        return [about | {self.key: row.name} | {name: getattr(row, name) for name in kept} for row in result.rows]

    def restore(self, rows: Sequence[Fields]) -> list[Result]:
        """The results whose `record` these are, one after the other.

        Raises:
            ValueError: a row lacks a field, or has one of another type.
        """

        def of_case(row: Fields) -> tuple[Any, Any]:
            return restored(self.case, row), restored(self.about, row)

        def measured(row: Fields) -> Row:
            known = {name: row[name] for name in (*self.fields, *OF_ALL) if name in row}
            return restored(Row, known | ({"name": row[self.key]} if self.key in row else {}))

        groups = groupby(rows, key=of_case)
        return [Result(case, about, [measured(row) for row in group]) for (case, about), group in groups]

    def report(self, results: Iterable[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
        """Paragraphs: a table for the results of each shape, and the summary of all."""
        return self.paragraphs(self.by_shape(results, lambda result: result.case), args)

    def paragraphs(self, shapes: Iterable[list[Result]], args: argparse.Namespace) -> Iterator[Iterable[str]]:
        """The report of results that come shape by shape."""
        seen: list[Result] = []
        for results in shapes:
            seen += results
            yield self.lines(results)
        if seen:
            yield from self.summary(seen, args)

    def by_shape(self, items: Iterable[Any], case: Callable[[Any], Any]) -> Iterator[list[Any]]:
        """Cases, or results, that belong to one table."""
        of_shape = self.shape
        if of_shape is None:
            return ([item] for item in items)
        return (list(group) for _, group in groupby(items, key=lambda item: of_shape(case(item))))

    def tables(self, results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
        """Leaves out tables of `pages` without rows."""
        return {name: table for name, table in self.pages(results, args).items() if table.rows}


def run_case(
    operation: Operation, case: Any, names: Sequence[str], device: torch.device, args: argparse.Namespace
) -> Result:
    """Verifies the peers of a case, then times them in turns: `args.repeats` rounds, or as many as begin within
    `args.seconds`, three at least. Whoever does not take the case, is wrong or fails is named with the reason.

    Raises:
        ValueError: a case that cannot be.
    """
    problem = operation.problem(case, device, args)
    peers: dict[str, Peer] = {}
    reasons: dict[str, str] = {}
    spent: dict[str, float] = {}
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    with Terminal().progress(len(names), f"{case.name}: verifying {''.join(names[:1])}") as done:
        for number, name in enumerate(names):
            if number:
                done(f"{case.name}: verifying {name}")
            start = time.perf_counter()
            try:
                peer = operation.peers[name](problem)
                problem.verify(name, peer)
                inputs, grad = operands(problem, peer)
            except Exception as error:  # noqa: BLE001 - whatever stops a peer is a line of the table
                reasons[name] = in_short(error)
                continue
            peers[name], spent[name] = peer, time.perf_counter() - start
            for direction in operation.directions[: 1 if peer.no_backward else None]:
                leaves = [x.detach().requires_grad_() for x in inputs] if operation.trains else inputs
                timed = partial(operation.time_of or time_of, peer.call, leaves, grad, direction, device)
                runs[name, direction] = partial(time_unless_wrong, reasons, name, timed)
    about = operation.abouts(problem, peers)
    times = in_turns(runs, args.repeats, args.seconds, case.name)
    medians = {key: statistics.median(samples) for key, samples in times.items() if key[0] not in reasons}

    rows = []
    for name in names:
        found = peers.get(name)
        for direction in operation.directions:
            row = Row(name, direction, dense=found.beside if found else "", preparation_s=spent.get(name))
            mine = medians.get((name, direction))
            if mine is None:
                row = replace(row, reason=reasons.get(name) or found.no_backward)
            else:
                dense, ours = (medians.get((other, direction)) for other in (row.dense, operation.ours[0]))
                ratios: dict[str, Any] = {"to_dense": dense and mine / dense, "to_ours": ours and mine / ours}
                row = replace(row, milliseconds=mine, rounds=len(times[name, direction]), **ratios)
            rows.append(replace(row, **operation.numbers(problem, found, row, medians)))
    return Result(case, about, rows)


def operands(problem: Any, peer: Peer) -> tuple[Sequence[Tensor], Tensor | None]:
    """Inputs of a peer's call, and the gradient of its output."""
    if peer.inputs is None:
        return [peer.arranged(x) for x in problem.inputs], peer.arranged(problem.grad)
    with torch.no_grad():
        return peer.inputs, None if peer.no_backward else torch.randn_like(peer.call(*peer.inputs))


def time_unless_wrong(reasons: dict[str, str], name: str, timed: Callable[[], float]) -> float:
    """Milliseconds of one call; of a peer that fails, the reason is noted, and it is not called again."""
    if name in reasons:
        return float("nan")
    try:
        return timed()
    except Exception as error:  # noqa: BLE001 - whatever stops a peer is a line of the table
        reasons[name] = in_short(error)
        return float("nan")
