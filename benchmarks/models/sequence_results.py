"""Results of `ds_sparse bench sequence`: their lines, and their rows in the JSON. Reading them takes no DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.models.longest_sequence import Longest, alike, longest
from benchmarks.models.sequence_cases import (
    ACTIVATIONS,
    ALONE,
    CHECKPOINTED,
    DATA,
    KEPT,
    OFFLOADED,
    SEQUENCE,
    SEVERAL,
    Case,
    Result,
    Row,
    ranks_of,
    restore,
    sequences_of,
)
from ds_sparse.bench.machine import in_three_digits

__all__ = [
    "ACTIVATIONS",
    "ALONE",
    "CHECKPOINTED",
    "DATA",
    "KEPT",
    "OFFLOADED",
    "SEQUENCE",
    "SEVERAL",
    "Case",
    "Result",
    "Row",
    "ranks_of",
    "record",
    "report",
    "restore",
    "sequences_of",
]


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: some lines a row, as they come, a table of all, and the longest sequences."""
    seen = []
    for case, rows in results:
        for row in rows:
            seen.append((case, row))
            yield lines(case, row)
    yield table([(case, row) for case, row in seen if not row.is_try])
    if found := longest_of(seen):
        yield (
            f"the longest that fits, {ranks_of(one.case, one.row)}, {settings_of(one.case)}: {one.said}"
            for one in found
        )


def lines(case: Case, row: Row) -> Iterator[str]:
    """A row in words: what was measured, where the time goes, what memory is for."""
    looked_for = "; is it the longest?" if row.is_try else ""
    yield f"{case.seq_len:,} tokens, {ranks_of(case, row)}; {settings_of(case)}{looked_for}"
    if row.milliseconds is None:
        yield f"no time: {row.reason}"
        return
    yield ", ".join(figures(row))
    if row.profile:
        parts = (f"{name} {ms:.1f} ms ({ms / row.milliseconds:.0%})" for name, ms in row.profile.items())
        yield f"time: {', '.join(parts)}"
    if row.memory:
        yield f"GiB: {', '.join(f'{name} {gib:.2f}' for name, gib in row.memory.items())}"


def settings_of(case: Case) -> str:
    tiles = f", {case.tiles} tiles" if case.tiles > 1 else ""
    micro_batches = f", {case.micro_batches} micro batches" if case.micro_batches > 1 else ""
    tokens = f", up to {case.tokens:,} tokens a pass or one sequence" if case.tokens else ""
    return (
        f"{case.structure}, {case.dtype}, ZeRO {case.zero_stage}, activations {case.activations}{tiles}{micro_batches}"
        f"{tokens}"
    )


def figures(row: Row) -> Iterator[str]:
    yield f"{in_three_digits(row.milliseconds)} ms a step ({row.rounds} rounds)"
    yield f"{row.tokens_per_second:,.0f} tokens/s"
    if row.efficiency is not None:
        yield f"efficiency {row.efficiency:.1%}"
    if row.peak_gib is not None:
        yield f"peak {row.peak_gib:.1f} GiB a rank"
    yield f"loss {row.loss:.4f}{alone(row.loss_alone, 4)}"
    if row.gradient_norm is not None:
        yield f"gradient norm {row.gradient_norm:.4g}{alone(row.gradient_norm_alone, 4)}"


def alone(number: float | None, digits: int) -> str:
    return "" if number is None else f" ({number:.{digits}f} on one rank)"


def table(seen: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    """A line a row that has a time."""
    yield (
        f"{'tokens':>9} {'ranks':>5} {'sequences':>9} {'ms':>9} {'tokens/s':>11} {'efficiency':>10} {'peak GiB':>8} "
        f"{'loss':>8} {'on one rank':>11}"
    )
    for case, row in seen:
        if row.milliseconds is None:
            continue
        sequences = case.sequences * (row.ranks if row.parallel == DATA else 1)
        efficiency = "-" if row.efficiency is None else f"{row.efficiency:.1%}"
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        one = "-" if row.loss_alone is None else f"{row.loss_alone:.4f}"
        yield (
            f"{case.seq_len:9} {row.ranks:5} {sequences:9} {in_three_digits(row.milliseconds):>9} "
            f"{row.tokens_per_second:11,.0f} {efficiency:>10} {peak:>8} {row.loss:8.4f} {one:>11}"
        )


def longest_of(seen: Iterable[tuple[Case, Row]]) -> list[Longest[Case, Row]]:
    """The longest sequence that fits, wherever it was looked for."""
    groups = alike(seen, lambda row: (row.ranks, row.parallel))
    found = (longest(rows) for rows in groups.values() if any(row.is_try for _, row in rows))
    return [one for one in found if one is not None]


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    case, rows = result
    return [asdict(case) | asdict(row) for row in rows]
