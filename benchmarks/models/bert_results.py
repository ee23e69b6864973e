"""Results of `ds_sparse bench bert`: their tables, and their rows in the JSON. Reading them takes no Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.models.bert_cases import BASE, MODEL, Case, Result, Row, restore
from benchmarks.models.longest_sequence import Longest, alike, longest
from ds_sparse.bench.cases import DENSE_IN_BERT, FLOOR, NO_ATTENTION
from ds_sparse.bench.machine import in_three_digits

__all__ = ["BASE", "LARGE", "MODELS", "Case", "Found", "Result", "Row", "record", "report", "restore"]

LARGE = "large"

MODELS: dict[str, dict[str, dict[str, int]]] = {
    BASE: MODEL,
    LARGE: {
        "cpu": MODEL["cpu"] | {"num_hidden_layers": 4},
        "cuda": {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    },
}


Found = Longest[Case, Row]


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: a table a case, as they come; a line a try, and the longest sequences at the end."""
    tries = []
    for case, rows in results:
        if case.is_try:
            tries.append((case, rows[0]))
            yield [line_of_try(case, rows[0])]
        else:
            yield table(case, rows)
    if tries:
        yield longest_lines(tries)


def table(case: Case, rows: Sequence[Row]) -> Iterator[str]:
    """Lines: milliseconds of a step, beside those without attention, those of the floor and those of dense attention;
    memory."""
    rounds = max((row.rounds for row in rows), default=0)
    yield (
        f"{case.seq_len} tokens, {case.batch} {'sequences' if case.batch > 1 else 'sequence'}, {settings_of(case)}; "
        f"medians of {rounds} rounds"
    )
    yield f"{'':32} {'ms':>9} {'of ceiling':>11} {'of floor':>9} {'x dense':>8} {'peak GiB':>9}"
    for row in rows:
        if row.reason:
            yield f"{row.attention:32} no time: {row.reason}"
            continue
        shares = (over(rows, name, row) for name in (NO_ATTENTION, FLOOR))
        ceiling, floor = ("-" if share is None else f"{share:.0%}" for share in shares)
        dense = over(rows, DENSE_IN_BERT, row)
        times = "-" if dense is None else in_three_digits(1 / dense)
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        once = " timed once" if row.rounds == 1 < rounds else ""
        yield f"{row.attention:32} {row.milliseconds:9.1f} {ceiling:>11} {floor:>9} {times:>8} {peak:>9}{once}"


def over(rows: Iterable[Row], name: str, row: Row) -> float | None:
    """The time of another attention of the same case over a row's."""
    other = next((other.milliseconds for other in rows if other.attention == name), None)
    return None if other is None or row.milliseconds is None else other / row.milliseconds


def settings_of(case: Case) -> str:
    """What else than its length makes a case."""
    return ", ".join(
        [
            *(["BERT-large"] if case.model == LARGE else []),
            f"dropout {case.dropout:g}",
            case.dtype,
            *([] if case.predicts_all else ["labelled tokens predicted"]),
            *(["AdamW"] if case.whole_step else []),
            *(["activations checkpointed"] if case.checkpointed else []),
        ]
    )


def line_of_try(case: Case, row: Row) -> str:
    about = f"{row.attention}, {case.seq_len:,} tokens, {settings_of(case)}"
    if row.reason:
        return f"{about}: {row.reason}"
    return f"{about}: fits, peak {row.peak_gib:.1f} GiB, {in_three_digits(row.milliseconds / 1e3)} s"


def longest_lines(tries: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    for attention, found in longest_of(tries):
        yield f"the longest that fits, {attention}, {settings_of(found.case)}: {found.said}"


def longest_of(tries: Iterable[tuple[Case, Row]]) -> list[tuple[str, Found]]:
    """The longest sequence of each attention for which some fit."""
    groups = alike(tries, lambda row: row.attention)
    found = ((attention, longest(rows)) for (_, attention), rows in groups.items())
    return [(attention, one) for attention, one in found if one is not None]


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    case, rows = result
    return [asdict(case) | {"batch": case.batch} | asdict(row) for row in rows]
