"""`ds_sparse bench show`: what earlier runs printed, or tables for a page, from the files that `--json` wrote."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from . import command
from .runs import Run, read, show


class Options(argparse.ArgumentParser):
    """Raises ValueError where argparse ends the program: these options are a file's, not the user's."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog} does not take the options of this run: {message}.")


def main(arguments: list[str]) -> int:
    """Runs `ds_sparse bench show ARGUMENTS` and returns its exit status."""
    parser = argparse.ArgumentParser(prog="ds_sparse bench show")
    parser.description = "Prints what runs printed, or tables for a page, from their files."
    parser.add_argument("files", nargs="+", metavar="FILE", help="written by ds_sparse bench OPERATION --json FILE")
    args = parser.parse_args(arguments)
    try:
        loaded = [load(path) for path in args.files]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for run, options, results in loaded:
        show_run(run, options, results)
    return 0


def load(path: str) -> tuple[Run, argparse.Namespace, list[Any]]:
    """A run, the options that it was measured with, and its results.

    Raises:
        ValueError: the file is not what `--json` writes; the sentence says what it lacks.
    """
    run = read(path)
    if run.operation not in command.RESULTS:
        raise ValueError(f"{path}: operation {run.operation!r} is not one of {', '.join(command.RESULTS)}.")
    try:
        return (
            run,
            command.parse(run.operation, run.arguments, Options),
            command.RESULTS[run.operation].restore(run.rows),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def show_run(run: Run, options: argparse.Namespace, results: list[Any]) -> None:
    """Prints a run as it printed itself."""
    show(*run.heading())
    command.show_report(options, results)
