"""What operations of models do alike: an entry of the registry, options, printing, writing, and an end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ds_sparse.bench.machine import conditions
from ds_sparse.bench.markdown import Table
from ds_sparse.bench.runs import Run, show

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """An entry of the registry of `ds_sparse bench`: see `Measurable` there.

    Attributes:
        results: the module that makes rows of results (`record`), results of rows (`restore`), and lines (`report`).
        pages: tables of results, by name.
    """

    add: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, torch.device], int]
    results: Any
    pages: Callable[[list[Any]], dict[str, Table]]

    def restore(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        return self.results.restore(rows)

    def report(self, results: Iterable[Any], args: argparse.Namespace) -> Iterator[Iterable[str]]:
        return self.results.report(results)

    def tables(self, results: list[Any], args: argparse.Namespace) -> dict[str, Table]:
        return {name: table for name, table in self.pages(results).items() if table.rows}


def begin(args: argparse.Namespace, device: torch.device, **versions: str) -> Run:
    """Prints what the numbers depend on."""
    run = Run(args.operation, args.arguments, conditions(device) | versions)
    show(*run.heading())
    return run


def keep(args: argparse.Namespace, run: Run, results: Any, result: Result) -> Result:
    """The result, when its rows are written by the module `results`."""
    run.add(results.record(result), args.json)
    return result


def show_report(results: Any, found: Iterable[Any]) -> None:
    """Prints results, as they come, by the module `results`."""
    for lines in results.report(found):
        show(*lines)


def status_of(failed: bool) -> int:
    """The exit status, and on failure a line about ours."""
    if failed:
        print("ds_sparse itself was wrong or failed in a case; its line says how.", file=sys.stderr)
    return int(failed)


def add_labelled_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labelled-only",
        action="store_true",
        help="logits of tokens with a label alone, as bing_bert computes them (default: of all, as Transformers does)",
    )


def natural(text: str) -> int:
    """argparse type: an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def positive_number(text: str) -> float:
    """argparse type: above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def probability(text: str) -> float:
    """argparse type: from 0 to below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability from 0 to below 1")
    return number
