"""Steps of models: cases, rows, and their tables on a terminal and on pages. Reading them takes no Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from benchmarks.models.attentions import DENSE_IN_BERT, EAGER, FLOOR, NO_ATTENTION, OF_STRUCTURES, STRUCTURES_IN_BERT
from benchmarks.running import NOT_TRIED, in_columns
from ds_sparse.bench.documents import corpus_lengths
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table, percent, ratio, span

BERT, MODERNBERT, SEQUENCE_STEP = "bert", "modernbert", "sequence"
"""Operations of `python -m benchmarks`."""

TOKENS = {"cpu": 2048, "cuda": 32768}
"""In a step; one sequence where that is longer."""

PACKED_TOKENS = {"cpu": 2048, "cuda": 16384}
"""In a step of BERT on packed documents."""

BASE, LARGE = "base", "large"

LABELLED = {BERT: 0.15, MODERNBERT: 0.3}
"""Part of the tokens that have a label."""

ALONE, DATA, SEQUENCE = "alone", "data", "sequence"
"""Ways of ranks: one computes a sequence, each computes one of its own, all share one."""

KEPT, CHECKPOINTED, OFFLOADED = "kept", "checkpointed", "offloaded"
"""Activations until backward: all are kept; each layer's input is, on the GPU, or on the CPU."""

EXCHANGE, REDUCTION = "all-to-all", "reduction of gradients"
"""Traffic of ranks, as profiles of a step name it."""

TOO_LONG = f"{NOT_TRIED}a shorter sequence ran out of memory"
NO_RESULT = "no result within"
"""Beginning of the reason where a process took too long."""

ON_CPU = "--longest: a CPU's memory is not filled by trying; measure on a GPU, with --device cuda."

WITHIN, LENGTHS = 1 / 16, 1024
"""Part by which the shortest length that does not fit is longer than the longest that does, at most; lengths that are
tried are multiples of the second."""


def ran_out_of_memory(reason: str) -> bool:
    """True for what CUDA's allocator says."""
    return "out of memory" in reason


@dataclass(frozen=True)
class Case:
    """A training step of a model with sequences of `seq_len` tokens.

    Attributes:
        dropout: in attention and elsewhere.
        predicts_all: logits of all tokens, as Transformers' models compute them; else of those with a label alone, as
            bing_bert does.
        model: sizes of BERT, base or large.
        whole_step: with AdamW, and with the batch copied from the CPU; else forward and backward alone.
        checkpointed: of activations the inputs of layers are kept, and the rest is computed again in backward.
        is_try: one sequence, to see whether it fits.
        structure, zero_stage: of `sequence`: all that follow are.
        tiles: parts of a rank's tokens in which MLPs and the loss are computed, one after the other.
        micro_batches: forward and backward passes of a step, whose gradients are added up.
        tokens: of a pass, which has one sequence where these are fewer than a sequence's, else as many as fit.
        packed: rows of documents, with other borders in each step; weights are fp32, `dtype` is that of autocast.
    """

    seq_len: int
    dtype: str
    device: str
    dropout: float = 0.0
    predicts_all: bool = True
    model: str = BASE
    whole_step: bool = False
    checkpointed: bool = False
    is_try: bool = False
    structure: str = ""
    zero_stage: int = 0
    activations: str = KEPT
    tiles: int = 1
    micro_batches: int = 1
    tokens: int = 0
    packed: bool = False

    @property
    def batch(self) -> int:
        """Sequences of a step; of a pass, on one rank or on those that share them, where the case says its tokens."""
        of_step = self.tokens if self.structure or self.packed else TOKENS[self.device]
        return 1 if self.is_try else max(1, of_step // self.seq_len)

    @property
    def of_any_length(self) -> Case:
        """The settings that cases share which differ in length alone."""
        return replace(self, seq_len=0, is_try=False)

    def settings(self) -> list[str]:
        """All but the length, in words."""
        activations = CHECKPOINTED if self.checkpointed else self.activations
        words = {
            "BERT-large": self.model == LARGE,
            self.structure: self.structure,
            self.dtype: True,
            "autocast": self.packed and self.dtype != "fp32",
            "packed documents": self.packed,
            f"dropout {self.dropout:g}": self.dropout,
            "logits of labelled tokens alone": not self.predicts_all,
            "AdamW": self.whole_step,
            f"ZeRO {self.zero_stage}": self.zero_stage,
            f"activations {activations}": self.structure or activations != KEPT,
            f"{self.tiles} tiles": self.tiles > 1,
            f"{self.micro_batches} micro batches": self.micro_batches > 1,
            f"up to {self.tokens:,} tokens a pass or one sequence": self.tokens,
        }
        return [word for word, is_so in words.items() if is_so]

    @property
    def documents(self) -> list[list[int]]:
        """Tokens of packed documents, row by row."""
        return corpus_lengths(self.seq_len, self.batch)


@dataclass(frozen=True)
class Row:
    """One attention, or some ranks, in one case; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        parallel: ALONE, DATA or SEQUENCE.
        milliseconds: of a step; of a try that of its only one.
        tokens_per_second: without padding.
        efficiency: tokens a second over those of as many ranks as fast as the one alone.
        peak_gib: memory on a GPU at its highest, with model, gradients and optimizer; of the rank that has most; None
            on a CPU.
        loss, gradient_norm: of the first step on ranks; a rank's own sequence has the loss of rank 0.
        loss_alone, gradient_norm_alone: the same of the one rank.
        profile: milliseconds of a step by where they go.
        memory: GiB by what it is for.
    """

    attention: str = ""
    ranks: int = 1
    parallel: str = ALONE
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
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def who(case: Case, row: Row) -> str:
    """The attention, or the ranks and their sequences."""
    if row.attention:
        return {NO_ATTENTION: "no attention"}.get(row.attention, row.attention)
    said = f"{row.ranks} {'rank' if row.ranks == 1 else 'ranks'}"
    if case.batch == 1:
        return said + {ALONE: "", DATA: ", a sequence each", SEQUENCE: ", one sequence"}[row.parallel]
    return f"{said}, {case.batch} sequences" + {ALONE: "", DATA: " each", SEQUENCE: " that they share"}[row.parallel]


def kind_of(results: Iterable[Result]) -> str:
    """The case of rows, as a heading."""
    return "attention" if any(row.attention for _, rows in results for row in rows) else "ranks"


def over(rows: Iterable[Row], name: str, row: Row) -> float | None:
    """The time of another attention of the same case over a row's."""
    other = next((other.milliseconds for other in rows if other.attention == name), None)
    return None if other is None or row.milliseconds is None or not row.attention else other / row.milliseconds


def written(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


def step_table(steps: Sequence[Result], places: Callable[[Case], list[str]], heading: Sequence[str] = ()) -> Table:
    """A line a row that has a time, which begins with `places` of its case under `heading`; columns that are empty are
    left out."""
    columns: dict[str, Callable[[list[Row], Row], str]] = {
        "ms": lambda rows, row: in_three_digits(row.milliseconds),
        "of no attention": lambda rows, row: written(over(rows, NO_ATTENTION, row), percent),
        "of the floor": lambda rows, row: written(over(rows, FLOOR, row), percent),
        f"times {DENSE_IN_BERT}": lambda rows, row: written(over(rows, DENSE_IN_BERT, row), lambda x: ratio(1 / x)),
        "tokens/s": lambda rows, row: written(row.tokens_per_second, "{:,.0f}".format),
        "efficiency": lambda rows, row: written(row.efficiency, percent),
        "peak GiB": lambda rows, row: written(row.peak_gib, "{:.1f}".format),
        "loss": lambda rows, row: written(row.loss, "{:.4f}".format),
        "loss on one rank": lambda rows, row: written(row.loss_alone, "{:.4f}".format),
    }
    timed = [(case, rows, row) for case, rows in steps for row in rows if not row.reason]
    cells = {name: [cell(rows, row) for _, rows, row in timed] for name, cell in columns.items()}
    shown = {name: found for name, found in cells.items() if any(found)}
    starts = [[*places(case), who(case, row)] for case, _, row in timed]
    lines = [[*start, *found] for start, *found in zip(starts, *shown.values(), strict=True)]
    return Table([*heading, kind_of(steps), *shown], lines)


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """Lines to print: a table a case, as they come; a line a try, and the longest sequences at the end."""
    seen = []
    for case, rows in results:
        seen.append((case, rows))
        yield map(line_of_try, [case] * len(rows), rows) if case.is_try else lines_of_case(case, rows)
    if found := longest_of(seen):
        yield (f"the longest that fits, {one.who}, {', '.join(one.case.settings())}: {one.said}" for one in found)


def line_of_try(case: Case, row: Row) -> str:
    about = f"{who(case, row)}, {case.seq_len:,} tokens, {', '.join(case.settings())}"
    if row.reason:
        return f"{about}: {row.reason}"
    peak = written(row.peak_gib, ", peak {:.1f} GiB".format)
    return f"{about}: fits{peak}, {in_three_digits(row.milliseconds / 1e3)} s"


def lines_of_case(case: Case, rows: Sequence[Row]) -> Iterator[str]:
    """A table, who has no time and why, and where a step's time and memory go."""
    rounds = max((row.rounds for row in rows), default=0)
    batch = f"{case.batch} {'sequences' if case.batch > 1 else 'sequence'}"
    yield f"{batch} of {case.seq_len:,} tokens, {', '.join(case.settings())}; medians of {rounds} rounds"
    if any(not row.reason for row in rows):
        yield from in_columns(step_table([(case, list(rows))], lambda case: []))
    for row in rows:
        if row.reason:
            yield f"{who(case, row)}: no time: {row.reason}"
        if 0 < row.rounds < rounds:
            yield f"{who(case, row)}: {row.rounds} {'round' if row.rounds == 1 else 'rounds'}"
        if row.gradient_norm is not None:
            alone = written(row.gradient_norm_alone, " ({:.4f} on one rank)".format)
            yield f"{who(case, row)}, gradient norm: {row.gradient_norm:.4g}{alone}"
        if row.profile:
            parts = (f"{name} {ms:.1f} ms ({ms / row.milliseconds:.0%})" for name, ms in row.profile.items())
            yield f"{who(case, row)}, time: {', '.join(parts)}"
        if row.memory:
            yield f"{who(case, row)}, GiB: {', '.join(f'{name} {gib:.2f}' for name, gib in row.memory.items())}"


def tables_of(results: list[Result]) -> dict[str, Table]:
    """Times of steps, how ours compare, memory, where time goes, and the longest sequences.

    Attentions of several lengths stand beside one another, ranks one below the other.
    """
    steps = [(case, rows) for case, rows in results if not case.is_try]
    cases = [case for case, _ in steps]
    shared = [word for word in cases[0].settings() if all(word in case.settings() for case in cases)] if cases else []
    notes = [f"All steps: {', '.join(shared)}."] if shared else []

    def place(case: Case) -> str:
        return ", ".join([f"{case.seq_len:,}", *(word for word in case.settings() if word not in shared)])

    def parts(of: Callable[[Row], Mapping[str, float]], write: Callable[[float], str]) -> Table:
        rows = [(case, row) for case, rows in steps for row in rows if of(row)]
        names = list(dict.fromkeys(name for _, row in rows for name in of(row)))
        lines = [[place(case), who(case, row), *(written(of(row).get(n), write) for n in names)] for case, row in rows]
        return Table(["tokens", kind_of(steps), *names], lines, notes=notes)

    is_grid = any(row.attention for _, rows in steps for row in rows) and len(set(cases)) > 1
    listed = step_table(steps, lambda case: [place(case)], ["tokens"])
    return {
        "steps": grid(steps, place, notes, time_in_grid) if is_grid else replace(listed, notes=notes),
        "beside": beside(steps, place, notes),
        "memory": grid(steps, place, notes, lambda rows, row: written(row.peak_gib, "{:.1f}".format))
        if is_grid
        else parts(lambda row: row.memory, "{:.2f}".format),
        "time": parts(lambda row: row.profile, in_three_digits),
        "longest": longest_table(results),
    }


def time_in_grid(rows: list[Row], row: Row) -> str:
    share = None if row.attention == NO_ATTENTION else over(rows, NO_ATTENTION, row)
    return in_three_digits(row.milliseconds) + written(share, lambda part: f" ({percent(part)})")


def grid(
    steps: Sequence[Result], place: Callable[[Case], str], notes: list[str], cell: Callable[[list[Row], Row], str]
) -> Table:
    """A line a case, a column an attention that was measured in one."""
    measured = {row.attention for _, rows in steps for row in rows if not row.reason}
    names = [name for name in dict.fromkeys(row.attention for _, rows in steps for row in rows) if name in measured]
    lines = []
    for case, rows in steps:
        cells = {row.attention: cell(rows, row) for row in rows if not row.reason}
        lines.append([place(case), *(cells.get(name, "") for name in names)])
    heading = ({NO_ATTENTION: "no attention", FLOOR: "floor"}.get(name, f"`{name}`") for name in names)
    return Table(["tokens", *heading], lines, notes=notes)


def beside(steps: Sequence[Result], place: Callable[[Case], str], notes: list[str]) -> Table:
    """A line a length and structure: the share of it that the floor takes, and what each peer takes."""
    seen = dict.fromkeys(row.attention for _, rows in steps for row in rows if not row.reason)
    floors = {name: f"of {word}" for name, word in FLOORS.items() if name in seen}
    peers = list(dict.fromkeys(name.split("-")[0] if name in OF_STRUCTURES else name for name in seen))
    peers = [peer for peer in peers if peer not in (*FLOORS, *STRUCTURES_IN_BERT)]
    found = [
        (case, row, {p: over(rows, named(p, row.attention), row) for p in (*floors, *peers)})
        for case, rows in steps
        for row in rows
        if not row.reason and row.attention in STRUCTURES_IN_BERT
    ]
    lines = [
        [
            *(place(case), f"`{row.attention}`", in_three_digits(row.milliseconds)),
            *(written(takes[name], percent) for name in floors),
            *(written(takes[peer], ratio) for peer in peers),
        ]
        for case, row, takes in found
    ]
    spans = {peer: span(takes[peer] for _, _, takes in found) for peer in peers}
    takes_longer = [f"`{peer}` takes {text} times as long." for peer, text in spans.items() if text]
    heading = ["tokens", "structure", "ms", *floors.values(), *(f"`{peer}` takes" for peer in peers)]
    return Table(heading, lines, notes=[*notes, *takes_longer])


def named(peer: str, structure: str) -> str:
    """The attention of a peer, which each structure may have one of."""
    return name if (name := f"{peer}-{structure}") in OF_STRUCTURES else peer


FLOORS = {NO_ATTENTION: "no attention", FLOOR: "the floor"}


class Longest(NamedTuple):
    """The longest sequence that fits, and the shortest that does not; None where none was found that does not."""

    case: Case
    row: Row
    failed: int | None

    @property
    def who(self) -> str:
        return who(self.case, self.row)

    @property
    def is_known(self) -> bool:
        """False where longer ones were left to try."""
        return is_near(self.case.seq_len, self.failed)

    @property
    def at_least(self) -> str:
        """Words before its length, and before all that follows from it."""
        return "" if self.is_known else "at least "

    @property
    def tokens(self) -> str:
        return f"{self.at_least}{self.case.seq_len:,}"

    @property
    def said(self) -> str:
        """The length in words, with how the search ended."""
        ended = "" if self.is_known else ", where the search's time was over"
        return f"{self.tokens} tokens{ended}" + written(self.failed, "; {:,} do not fit".format)


def is_near(longest: int, failed: int | None) -> bool:
    """True if no length between one that fits and one that does not is worth a try."""
    return failed is not None and failed <= longest * (1 + WITHIN) + LENGTHS


def longest_of(results: Iterable[Result]) -> list[Longest]:
    """The longest sequence of each attention, or each number of ranks, that was tried with several, in cases that
    differ in length alone; of none where nothing fits."""
    groups: dict[tuple[Case, str, int, str], list[tuple[Case, Row]]] = {}
    for case, rows in results:
        for row in rows:
            groups.setdefault((case.of_any_length, row.attention, row.ranks, row.parallel), []).append((case, row))
    found = []
    for pairs in groups.values():
        failed = [case.seq_len for case, row in pairs if row.reason and not row.reason.startswith(NO_RESULT)]
        fitted = [(case, row) for case, row in pairs if not row.reason]
        if fitted and any(case.is_try for case, _ in pairs):
            found.append(Longest(*max(fitted, key=lambda one: one[0].seq_len), min(failed, default=None)))
    return found


def longest_table(results: Sequence[Result]) -> Table:
    """A line a search: the longest sequence, how many times that of eager attention, and the shortest that did not
    fit."""
    found = longest_of(results)
    eager = {one.case.of_any_length: one for one in found if one.row.attention == EAGER and one.is_known}
    lines = []
    for one in found:
        other = eager.get(one.case.of_any_length)
        times = f"{one.at_least}{ratio(one.case.seq_len / other.case.seq_len)}" if other else ""
        name = f"`{one.who}`" if one.row.attention else one.who
        told = [name, ", ".join(one.case.settings()), one.tokens, *([times] if eager else [])]
        peak = written(one.row.peak_gib, "{:.1f}".format)
        lines.append([*told, written(one.failed, "{:,}".format), in_three_digits(one.row.milliseconds), peak])
    times_eager = [f"times `{EAGER}`"] if eager else []
    return Table([kind_of(results), "step", "tokens", *times_eager, "too long", "ms", "peak GiB"], lines)
