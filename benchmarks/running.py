"""Operations of models: an entry of the registry, which prints, writes and reads results, and types of options."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress, groupby
from typing import Any

import torch

from ds_sparse.bench.machine import conditions
from ds_sparse.bench.markdown import Table
from ds_sparse.bench.runs import Run, restored, show
from ds_sparse.tools.arguments import number

Result = tuple[Any, list[Any]]
"""A case, and the rows of what was measured in it."""

NOT_TRIED = "not tried: "
"""Beginning of a reason that is nobody's failure."""


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
    lines: Callable[[Iterable[Result]], Iterator[Iterable[str]]]
    pages: Callable[[list[Result]], dict[str, Table]]
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


def release_memory(device: torch.device) -> None:
    """Gives memory that nobody holds back to the GPU, so that the next step finds it in one piece."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def without_empty_columns(table: Table) -> Table:
    """The columns in which some row has a text; all of a table without rows."""
    if not table.rows:
        return table
    filled = [any(cells) for cells in zip(*table.rows, strict=True)]
    heading, *rows = (list(compress(cells, filled)) for cells in (table.heading, *table.rows))
    return replace(table, heading=heading, rows=rows)


def in_columns(table: Table) -> Iterator[str]:
    """The lines of a table as text: the first column to the left, all others to the right."""
    rows = [table.heading, *table.rows]
    first, *widths = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    for name, *cells in rows:
        yield "  ".join([f"{name:{first}}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths))]).rstrip()


natural = number(int, "an integer of at least 0", lambda x: x >= 0)
probability = number(float, "a probability from 0 to below 1", lambda x: 0 <= x < 1)
