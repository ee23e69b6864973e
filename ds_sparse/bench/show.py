"""`ds_sparse bench show`: what earlier runs printed, or tables for a page, from the files that `--json` wrote."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from . import IN_A_CLONE, OPERATIONS, sentence_of_clone
from .command import parse
from .markdown import sources
from .registry import operation
from .runs import Run, read, show

Loaded = tuple[Run, argparse.Namespace, list[Any]]
"""A run, the options that it was measured with, and its results."""


def main(arguments: list[str]) -> int:
    """Runs `ds_sparse bench show ARGUMENTS` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="ds_sparse bench show")
    parser.description = "Prints what runs printed, or tables for a page, from their files."
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by ds_sparse bench OPERATION --json FILE")
    parser.add_argument(
        "--markdown", action="store_true", help="tables of an operation's runs together, as Markdown for a page"
    )
    args = parser.parse_args(arguments)
    try:
        loaded = [load(path) for path in args.files]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if args.markdown:
        print("\n\n".join(tables_of(loaded)))
        return 0
    for one in loaded:
        show_run(*one)
    return 0


def load(path: str) -> Loaded:
    """A run, the options that it was measured with, and its results.

    Raises:
        ValueError: the file is not what `--json` writes; the sentence says what it lacks.
    """
    run = read(path)
    if run.operation in IN_A_CLONE and run.operation not in OPERATIONS:
        raise ValueError(f"{path}: {sentence_of_clone(run.operation)}")
    if run.operation not in OPERATIONS:
        raise ValueError(f"{path}: operation {run.operation!r} is not one of {', '.join(OPERATIONS)}.")
    for number, row in enumerate(run.rows, 1):
        if row.get("milliseconds") is None and not row.get("reason"):
            raise ValueError(f"{path}: row {number} has neither milliseconds nor a reason.")
    try:
        options = parse(run.operation, run.arguments, is_recorded=True)
        return run, options, operation(run.operation).restore(run.rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def tables_of(loaded: list[Loaded]) -> Iterator[str]:
    """Tables in Markdown, and below them the runs that they are of: those of one operation and device are together."""
    kinds: dict[tuple[str, str, bool, bool], list[Loaded]] = {}
    for run, options, results in loaded:
        mode = getattr(options, "break_even", False), getattr(options, "growth", False)
        kinds.setdefault((run.operation, options.device, *mode), []).append((run, options, results))
    for together in kinds.values():
        run, options, _ = together[0]
        everything = [result for _, _, results in together for result in results]
        for table in operation(run.operation).tables(everything, options).values():
            yield table.in_markdown()
        yield sources([run for run, _, _ in together])


def show_run(run: Run, options: argparse.Namespace, results: list[Any]) -> None:
    """Prints a run as it printed itself."""
    show(*run.heading())
    for lines in operation(run.operation).report(results, options):
        show(*lines)
