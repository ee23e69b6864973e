"""What operations of `ds_sparse bench` do alike: print, write, and end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch

from .. import cases, floors, machine, packed_cases, peers
from ..runs import Run, show

Case = TypeVar("Case")
Named = TypeVar("Named", cases.Case, packed_cases.Case)


def show_report(args: argparse.Namespace, results: Iterable[Any]) -> None:
    """Prints an operation's results, as they come."""
    options: dict[str, Any] = {}
    if args.operation == "attention":
        options = {"break_even_with": peers.DENSE[args.device] if args.break_even else "", "grows": args.growth}
    for lines in args.results.report(results, **options):
        show(*lines)


def begin(args: argparse.Namespace, device: torch.device, dtypes: Iterable[str] = (), **versions: str) -> Run:
    """Prints what the numbers depend on, and the rates that a GPU has in these dtypes."""
    on_cuda = device.type == "cuda"
    ceilings = {name: floors.Ceilings.measure(device, machine.DTYPES[name]) for name in dtypes if on_cuda}
    run = Run(args.operation, args.arguments, machine.conditions(device) | versions, ceilings)
    show(*run.heading())
    return run


def keep(args: argparse.Namespace, run: Run, result: Case) -> Case:
    """The result, when its rows are written."""
    run.add(args.results.record(result), args.json)
    return result


def run_grid(
    args: argparse.Namespace, device: torch.device, grid: Iterable[Case], measured: Callable[[Case], Any]
) -> int:
    """Prints and writes case after case; one that is wrong or fails is the last."""
    failures: list[Exception] = []

    def results() -> Iterator[Any]:
        try:
            run = begin(args, device, args.dtype)
            for case in grid:
                yield keep(args, run, measured(case))
        except (ValueError, ArithmeticError, RuntimeError) as error:
            print(error, file=sys.stderr)
            failures.append(error)

    show_report(args, results())
    return int(bool(failures))


def choose(grid: list[Named], patterns: list[str]) -> list[Named]:
    """The cases whose name, or the name of what a CPU runs of them, matches a pattern.

    Raises:
        ValueError: a pattern that no case matches.
    """

    def matches(case: Named, pattern: str) -> bool:
        return fnmatch(case.name, pattern) or fnmatch(case.small().name, pattern)

    for pattern in patterns:
        if not any(matches(case, pattern) for case in grid):
            raise ValueError(f"--cases {pattern}: none of {', '.join(case.name for case in grid)}.")
    return [case for case in grid if any(matches(case, pattern) for pattern in patterns)]


def status_of(ours: str, failed: bool) -> int:
    """The exit status, and on failure a line about what is ours in the table."""
    if failed:
        print(f"{ours} itself was wrong or failed in a case; its line says how.", file=sys.stderr)
    return int(failed)
