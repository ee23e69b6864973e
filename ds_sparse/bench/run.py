"""The one loop of all operations: a case's peers are built, verified against float64, and timed in turns."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .floors import Ceilings
from .machine import DTYPES, conditions, in_turns, time_of, versions
from .reasons import in_short
from .registry import Operation, Peer, Result, Row
from .runs import Run, record, show

FEW = 3
"""Rounds of a first look."""


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
    for name in names:
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
            timed = partial(time_of, peer.call, leaves, grad, direction, device)
            runs[name, direction] = partial(time_unless_wrong, reasons, name, timed)
    about = operation.abouts(problem, peers)
    times = in_turns(runs, args.repeats, args.seconds, case.title)
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


def measure(operation: Operation, args: argparse.Namespace, device: torch.device) -> int:
    """Measures, prints and writes all cases of the options; returns the exit status."""
    try:
        cases, names = operation.cases(args), operation.names(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if getattr(args, "quick", False):
        args.repeats = min(args.repeats, FEW)
    failed: dict[str, None] = {}
    raised: list[Exception] = []

    def results(shape: list[Any]) -> Iterator[Result]:
        for case in shape:
            result = run_case(operation, case, names, device, args)
            last = operation.directions[-1]
            failed.update(dict.fromkeys(x for x in operation.ours if x in names and result.row(x, last) is None))
            run.add(record(operation, result), args.json)
            yield result

    def shapes() -> Iterator[list[Result]]:
        try:
            for shape in by_shape(operation, cases):
                yield list(results(shape))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            print(error, file=sys.stderr)
            raised.append(error)

    run = begin(operation, args, device)
    for lines in report(operation, shapes(), args):
        show(*lines)
    if failed:
        print(f"{', '.join(failed)} itself was wrong or failed in a case; its line says how.", file=sys.stderr)
    return int(bool(failed or raised))


def begin(operation: Operation, args: argparse.Namespace, device: torch.device) -> Run:
    """Prints what the numbers depend on, and the rates that a GPU has."""
    dtypes = args.dtype if operation.rates and device.type == "cuda" else ()
    ceilings = {name: Ceilings.measure(device, DTYPES[name]) for name in dtypes}
    run = Run(operation.name, args.arguments, conditions(device) | versions(operation.packages), ceilings)
    show(*run.heading())
    return run


def report(operation: Operation, shapes: Iterable[list[Result]], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    """Paragraphs: a table for the results of each shape, as they come, and the summary of all."""
    seen: list[Result] = []
    for results in shapes:
        seen += results
        yield operation.lines(results)
    if seen:
        yield from operation.summary(seen, args)


def by_shape(
    operation: Operation, items: Iterable[Any], case: Callable[[Any], Any] = lambda item: item
) -> Iterator[list[Any]]:
    """Cases, or results, that belong to one table."""
    if operation.shape is None:
        return ([item] for item in items)
    shape = operation.shape
    return (list(group) for _, group in groupby(items, key=lambda item: shape(case(item))))
