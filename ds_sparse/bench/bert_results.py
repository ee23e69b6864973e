"""Results of `ds_sparse bench bert`: their table, and their rows in the JSON. Reading them takes no Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .runs import rows_by_case

TOKENS = {"cpu": 2048, "cuda": 32768}
"""In a step; one sequence where that is longer."""

MODEL: dict[str, dict[str, int]] = {
    "cpu": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
    },
    "cuda": {},
}
"""What differs from BERT-base, the default of `BertConfig`: on a CPU a small model."""

LABELLED = 0.15
"""Part of the tokens that have a label."""


@dataclass(frozen=True)
class Case:
    """One line of the grid: sequences of `seq_len` tokens, `dropout` in attention and elsewhere.

    Attributes:
        predicts_all: logits of all tokens, as Transformers' model computes them; else of those with a label alone, as
            bing_bert does.
    """

    seq_len: int
    dropout: float
    dtype: str
    device: str
    predicts_all: bool = True

    @property
    def batch(self) -> int:
        return max(1, TOKENS[self.device] // self.seq_len)


@dataclass(frozen=True)
class Row:
    """One attention in one case; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        of_ceiling: the time without any attention over this one.
        peak_gib: memory on the GPU at its highest during the step, with model and gradients; None on a CPU.
    """

    attention: str
    milliseconds: float | None = None
    of_ceiling: float | None = None
    peak_gib: float | None = None
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: a table a case, as they come."""
    return (table(case, rows) for case, rows in results)


def table(case: Case, rows: list[Row]) -> Iterator[str]:
    """Lines: milliseconds of a step, the share of what it takes without attention, memory."""
    rounds = max((row.rounds for row in rows), default=0)
    yield (
        f"{case.seq_len} tokens, {case.batch} {'sequences' if case.batch > 1 else 'sequence'}, "
        f"dropout {case.dropout:g}, {case.dtype}{'' if case.predicts_all else ', labelled tokens predicted'}; "
        f"medians of {rounds} rounds"
    )
    yield f"{'':16} {'ms':>9} {'of ceiling':>11} {'peak GiB':>9}"
    for row in rows:
        if row.reason:
            yield f"{row.attention:16} no time: {row.reason}"
            continue
        share = "-" if row.of_ceiling is None else f"{row.of_ceiling:.0%}"
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        yield f"{row.attention:16} {row.milliseconds:9.1f} {share:>11} {peak:>9}"


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    case, rows = result
    return [asdict(case) | {"batch": case.batch} | asdict(row) for row in rows]


def restore(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    return rows_by_case(Case, Row, rows)
