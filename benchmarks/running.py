"""Operations of models: an entry of the registry, which prints, writes and reads results, and shared options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from ds_sparse.bench.machine import conditions
from ds_sparse.bench.markdown import Table
from ds_sparse.bench.runs import Run, restored, show

Result = tuple[Any, Any]
"""A case, and the rows of what was measured in it."""


@dataclass(frozen=True)
class Entry:
    """An entry of the registry of `ds_sparse bench`, as `operation` there wants it.

    Attributes:
        case, row: dataclasses, whose fields stand in each row of the JSON.
        lines: paragraphs of lines, as results come.
        pages: tables of results, by name.
        more: what the JSON says of a case besides.
    """

    add: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, torch.device], int]
    case: type
    row: type
    lines: Callable[[Iterable[Any]], Iterator[Iterable[str]]]
    pages: Callable[[list[Any]], dict[str, Table]]
    more: Callable[[Any], dict[str, Any]] = lambda case: {}

    def record(self, result: Result) -> list[dict[str, Any]]:
        """The rows with their case, flat, as they go into the JSON."""
        case, rows = result
        return [asdict(case) | self.more(case) | asdict(row) for row in rows]

    def restore(self, rows: Sequence[dict[str, Any]]) -> list[Result]:
        groups = groupby(rows, key=partial(restored, self.case))
        return [(case, [restored(self.row, fields) for fields in group]) for case, group in groups]

    def report(self, results: Iterable[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
        return self.lines(results)

    def tables(self, results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
        return {name: table for name, table in self.pages(results).items() if table.rows}

    def run(
        self, args: argparse.Namespace, device: torch.device, results: Iterable[tuple[Result, bool]], **versions: str
    ) -> int:
        """Prints and writes results as they come, each with whether ours failed in it, below what they depend on;
        returns the exit status."""
        run = Run(args.operation, args.arguments, conditions(device) | versions)
        show(*run.heading())
        failures: list[bool] = []

        def kept() -> Iterator[Result]:
            for result, failed in results:
                run.add(self.record(result), args.json)
                failures.append(failed)
                yield result

        for lines in self.lines(kept()):
            show(*lines)
        if any(failures):
            print("ds_sparse itself was wrong or failed in a case; its line says how.", file=sys.stderr)
        return int(any(failures))


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
