"""Results of `python -m benchmarks modernbert`: their table, and their rows in the JSON. Reading them takes no
Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from benchmarks.models.attentions import FLOOR
from ds_sparse.bench.documents import corpus_lengths
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table, percent

TOKENS = {"cpu": 2048, "cuda": 32768}
"""In a step; one row where that is longer."""

OURS, OURS_PADDED = "ds_sparse", "ds_sparse-padded"

ATTENTIONS = (
    *(FLOOR, OURS, OURS_PADDED),
    *("sdpa", "sdpa-padded", "flex_attention", "flash_attention_4", "flash_attention_2"),
)
"""Names of Transformers, but for the floor and for what takes documents one below the other."""


@dataclass(frozen=True)
class Case:
    """One line of the grid: rows of `seq_len` tokens, filled with documents.

    Attributes:
        predicts_all: logits of all tokens, as Transformers' model computes them; else of those with a label alone.
    """

    seq_len: int
    dtype: str
    device: str
    predicts_all: bool = True

    @property
    def lengths(self) -> list[list[int]]:
        """Tokens of the documents, row by row."""
        return corpus_lengths(self.seq_len, max(1, TOKENS[self.device] // self.seq_len))

    @property
    def tokens(self) -> int:
        return self.seq_len * len(self.lengths)

    @property
    def padded_batches(self) -> list[list[int]]:
        """The documents in batches, in their order, each with as many as are no more tokens than a row's when they are
        padded to the longest."""
        batches: list[list[int]] = [[]]
        for length in chain.from_iterable(self.lengths):
            together = [*batches[-1], length]
            if len(together) > 1 and len(together) * max(together) > self.tokens:
                batches.append([length])
            else:
                batches[-1] = together
        return batches


@dataclass(frozen=True)
class Row:
    """One attention in one case; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        of_floor: the time of the floor over this one.
        tokens_per_second: documents' tokens, without padding.
        peak_gib: memory on the GPU at its highest during the step, with model, gradients and optimizer; None on a CPU.
    """

    attention: str
    milliseconds: float | None = None
    of_floor: float | None = None
    tokens_per_second: float | None = None
    peak_gib: float | None = None
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """Lines to print: a table a case, as they come."""
    return (table(case, rows) for case, rows in results)


def table(case: Case, rows: list[Row]) -> Iterator[str]:
    """Lines: milliseconds of a step, the share of it that the floor takes, tokens a second, memory."""
    lengths = list(chain.from_iterable(case.lengths))
    rounds = max((row.rounds for row in rows), default=0)
    yield (
        f"{len(case.lengths)} x {case.seq_len} tokens, {case.dtype}"
        f"{'' if case.predicts_all else ', labelled tokens predicted'}; medians of {rounds} rounds"
    )
    batches = case.padded_batches
    padded = sum(len(batch) * max(batch) for batch in batches)
    yield (
        f"{len(lengths)} documents of {min(lengths):,} to {max(lengths):,} tokens; padded {padded:,} tokens in "
        f"{len(batches)} {'batches' if len(batches) > 1 else 'batch'}"
    )
    yield f"{'':18} {'ms':>9} {'of floor':>9} {'tokens/s':>10} {'peak GiB':>9}"
    for row in rows:
        if row.reason:
            yield f"{row.attention:18} no time: {row.reason}"
            continue
        share = "-" if row.of_floor is None else f"{row.of_floor:.0%}"
        peak = "-" if row.peak_gib is None else f"{row.peak_gib:.1f}"
        yield f"{row.attention:18} {row.milliseconds:9.1f} {share:>9} {row.tokens_per_second:10,.0f} {peak:>9}"


def of_modernbert(results: list[Result]) -> dict[str, Table]:
    """A line an attention that was measured: its step, the share of it that the floor takes, and memory."""
    several = len({case for case, _ in results}) > 1
    memory = any(row.peak_gib is not None for _, rows in results for row in rows)
    lines = []
    for case, rows in results:
        for row in rows:
            if row.reason:
                continue
            share = None if row.of_floor is None or row.attention == FLOOR else row.of_floor
            lines.append(
                [
                    *([of_packed_step(case)] if several else []),
                    "floor" if row.attention == FLOOR else f"`{row.attention}`",
                    in_three_digits(row.milliseconds),
                    "" if share is None else percent(share),
                    f"{row.tokens_per_second:,.0f}",
                    *([f"{row.peak_gib:.1f}"] if memory else []),
                ]
            )
    heading = ["attention", "ms", "of the floor's speed", "tokens/s"]
    return {"steps": Table([*(["rows"] if several else []), *heading, *(["peak GiB"] if memory else [])], lines)}


def of_packed_step(case: Case) -> str:
    rows = f"{len(case.lengths)} x {case.seq_len:,}, {case.dtype}"
    return f"{rows}{'' if case.predicts_all else ', logits of labelled tokens alone'}"
