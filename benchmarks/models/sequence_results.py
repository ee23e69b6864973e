"""Steps of BERT on several ranks, as `python -m benchmarks sequence` writes, prints and puts them on a page. Reading
takes no DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.models import longest_sequence
from benchmarks.models.longest_sequence import Longest, of_any_length
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table, percent

ALONE, DATA, SEQUENCE = "alone", "data", "sequence"
"""Ways of ranks: one computes a sequence, each computes one of its own, all share one."""

SEVERAL = (DATA, SEQUENCE)

KEPT, CHECKPOINTED, OFFLOADED = "kept", "checkpointed", "offloaded"
ACTIVATIONS = (KEPT, CHECKPOINTED, OFFLOADED)
"""Activations until backward: all are kept; each layer's input is, on the GPU, or on the CPU."""


EXCHANGE, REDUCTION = "all-to-all", "reduction of gradients"
"""Traffic of ranks, as profiles of a step name it."""


@dataclass(frozen=True)
class Case:
    """A training step of BERT with sequences of `seq_len` tokens, or as many a rank.

    Attributes:
        structure: of `IN_BERT`.
        activations: of `ACTIVATIONS`.
        tiles: parts of a rank's tokens in which MLPs and the loss are computed, one after the other.
        micro_batches: forward and backward passes of a step, whose gradients are added up.
        tokens: of a pass, which has one sequence where these are fewer than a sequence's, else as many as fit.
    """

    seq_len: int
    structure: str
    dtype: str
    device: str
    zero_stage: int
    activations: str = KEPT
    tiles: int = 1
    micro_batches: int = 1
    tokens: int = 0

    @property
    def sequences(self) -> int:
        """Sequences of a pass, on one rank or on those that share them."""
        return max(1, self.tokens // self.seq_len)


@dataclass(frozen=True)
class Row:
    """One case on some ranks; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        parallel: ALONE, DATA or SEQUENCE.
        efficiency: tokens a second over those of as many ranks as fast as the one alone.
        peak_gib: memory on a rank's GPU at its highest, of the rank that has most; None on a CPU.
        loss, gradient_norm: of the first step; a rank's own sequence has the loss of rank 0.
        loss_alone, gradient_norm_alone: the same of the one rank.
        profile: milliseconds of a step by where they go.
        memory: GiB by what it is for.
        is_try: it was looked for the longest sequence that fits.
    """

    ranks: int
    parallel: str
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    loss_alone: float | None = None
    gradient_norm_alone: float | None = None
    profile: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    is_try: bool = False
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def ranks_of(case: Case, row: Row) -> str:
    return f"{row.ranks} {'rank' if row.ranks == 1 else 'ranks'}{sequences_of(case, row)}"


def sequences_of(case: Case, row: Row) -> str:
    """Words for the sequences of ranks, behind their number."""
    if case.sequences == 1:
        return {ALONE: "", DATA: ", a sequence each", SEQUENCE: ", one sequence"}[row.parallel]
    has = {ALONE: "", DATA: " each", SEQUENCE: " that they share"}[row.parallel]
    return f", {case.sequences} sequences{has}"


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """Lines to print: some a row, as they come, a table of all, and the longest sequences."""
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


def longest_of(seen: Iterable[tuple[Case, Row]]) -> list[Longest]:
    """The longest sequence that fits, wherever it was looked for."""
    seen = list(seen)
    tried = {(of_any_length(case), (row.ranks, row.parallel)) for case, row in seen if row.is_try}
    found = longest_sequence.longest_of(seen, lambda row: (row.ranks, row.parallel))
    return [one for shared, one in found.items() if shared in tried]


def of_sequence(results: list[Result]) -> dict[str, Table]:
    """Lines of what was measured on each number of ranks; where the time goes, and what memory is for."""
    seen = [(case, row) for case, rows in results for row in rows if not row.reason]
    settings = list(dict.fromkeys(settings_of(case) for case, _ in seen))

    def start(case: Case, row: Row) -> list[str]:
        ranks = f"{row.ranks}{sequences_of(case, row)}"
        also = [settings_of(case)] if len(settings) > 1 else []
        return [f"{case.seq_len:,}", ranks, *also]

    def parts(of: Callable[[Row], Mapping[str, float]], write: Callable[[float], str]) -> Table:
        names = list(dict.fromkeys(name for _, row in seen for name in of(row)))
        lines = [
            [*start(case, row), *(write(of(row)[name]) if name in of(row) else "" for name in names)]
            for case, row in seen
            if of(row)
        ]
        return Table([*heading, *names], lines)

    heading = ["tokens", "ranks", *(["settings"] if len(settings) > 1 else [])]
    steps = [
        [
            *start(case, row),
            in_three_digits(row.milliseconds),
            f"{row.tokens_per_second:,.0f}",
            "" if row.efficiency is None else percent(row.efficiency),
            "" if row.peak_gib is None else f"{row.peak_gib:.1f}",
            f"{row.loss:.4f}",
            "" if row.loss_alone is None else f"{row.loss_alone:.4f}",
        ]
        for case, row in seen
        if not row.is_try
    ]
    columns = ["ms", "tokens/s", "efficiency", "peak GiB a rank", "loss", "loss on one rank"]
    found = [
        [
            one.tokens,
            *start(one.case, one.row)[1:],
            "" if one.failed is None else f"{one.failed:,}",
            in_three_digits(one.row.milliseconds),
            "" if one.row.peak_gib is None else f"{one.row.peak_gib:.1f}",
        ]
        for one in longest_of((case, row) for case, rows in results for row in rows)
    ]
    notes = settings if len(settings) == 1 else []
    return {
        "steps": Table([*heading, *columns], steps, notes=notes),
        "time": parts(lambda row: row.profile, in_three_digits),
        "memory": parts(lambda row: row.memory, lambda gib: f"{gib:.2f}"),
        "longest": Table([*heading, "too long", "ms", "peak GiB a rank"], found, notes=notes),
    }
