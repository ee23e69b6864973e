"""Steps of BERT as `python -m benchmarks bert` writes, prints and puts them on a page. Reading them takes no
Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from benchmarks.models import longest_sequence
from benchmarks.models.attentions import DENSE_IN_BERT, EAGER, FLEX_IN_BERT, FLOOR, NO_ATTENTION, STRUCTURES_IN_BERT
from benchmarks.models.longest_sequence import Longest
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table, percent, ratio, span

TOKENS = {"cpu": 2048, "cuda": 32768}
"""In a step; one sequence where that is longer."""

BASE, LARGE = "base", "large"

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
"""Differences from BERT-base, the default of `BertConfig`: on a CPU a small model."""

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

LABELLED = 0.15
"""Part of the tokens that have a label."""


@dataclass(frozen=True)
class Case:
    """One line of the grid: sequences of `seq_len` tokens, `dropout` in attention and elsewhere.

    Attributes:
        predicts_all: logits of all tokens, as Transformers' model computes them; else of those with a label alone, as
            bing_bert does.
        model: of `MODELS`.
        whole_step: with AdamW, and with the batch copied from the CPU; else forward and backward alone.
        checkpointed: of activations the inputs of layers are kept, and the rest is computed again in backward.
        is_try: one sequence, to see whether it fits.
    """

    seq_len: int
    dropout: float
    dtype: str
    device: str
    predicts_all: bool = True
    model: str = BASE
    whole_step: bool = False
    checkpointed: bool = False
    is_try: bool = False

    @property
    def batch(self) -> int:
        return 1 if self.is_try else max(1, TOKENS[self.device] // self.seq_len)


@dataclass(frozen=True)
class Row:
    """One attention in one case; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        milliseconds: of a step; of a try that of its only one.
        peak_gib: memory on the GPU at its highest during the step, with model, gradients and optimizer; None on a CPU.
    """

    attention: str
    milliseconds: float | None = None
    peak_gib: float | None = None
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """Lines to print: a table a case, as they come; a line a try, and the longest sequences at the end."""
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
    """Settings of a case besides its length."""
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


def longest_of(tries: Iterable[tuple[Case, Row]]) -> list[tuple[str, Longest]]:
    """The longest sequence of each attention for which some fit."""
    found = longest_sequence.longest_of(tries, lambda row: row.attention)
    return [(attention, one) for (_, attention), one in found.items()]


def of_bert(results: list[Result]) -> dict[str, Table]:
    """Times of a step with the share of the model without attention; how they compare; memory; longest sequences."""
    steps = [(case, rows) for case, rows in results if not case.is_try]
    measured = {row.attention for _, rows in steps for row in rows if not row.reason}
    names = [name for name in dict.fromkeys(row.attention for _, rows in steps for row in rows) if name in measured]
    heading = ["tokens", *({NO_ATTENTION: "no attention", FLOOR: "floor"}.get(name, f"`{name}`") for name in names)]

    shared = shared_settings(steps)
    notes = notes_of(shared)

    def lines(cell: Callable[[list[Row], Row], str]) -> list[list[str]]:
        found = [(case, rows, {row.attention: row for row in rows if not row.reason}) for case, rows in steps]
        return [
            [of_step(case, shared), *(cell(rows, timed[name]) if name in timed else "" for name in names)]
            for case, rows, timed in found
        ]

    def time(rows: list[Row], row: Row) -> str:
        share = None if row.attention == NO_ATTENTION else over(rows, NO_ATTENTION, row)
        return in_three_digits(row.milliseconds) + ("" if share is None else f" ({percent(share)})")

    def memory(rows: list[Row], row: Row) -> str:
        return "" if row.peak_gib is None else f"{row.peak_gib:.1f}"

    found = {"steps": Table(heading, lines(time), notes=notes), "beside": bert_beside(steps)}
    if any(row.peak_gib is not None for _, rows in steps for row in rows):
        found["memory"] = Table(heading, lines(memory), notes=notes)
    tries = [(case, row) for case, rows in results for row in rows if case.is_try]
    return found | {"longest": bert_longest(tries)}


def bert_beside(steps: Sequence[Result]) -> Table:
    """A line a length and structure: the share of it that the floor takes, and what each peer takes."""
    seen = dict.fromkeys(row.attention for _, rows in steps for row in rows if not row.reason)
    floors = [name for name in (NO_ATTENTION, FLOOR) if name in seen]
    ours = (*floors, *STRUCTURES_IN_BERT)
    peers = list(dict.fromkeys("flex" if name in FLEX_IN_BERT else name for name in seen if name not in ours))
    ratios: dict[str, list[float | None]] = {peer: [] for peer in peers}
    lines, shared = [], shared_settings(steps)
    for case, rows in steps:
        for row in rows:
            if row.reason or row.attention not in STRUCTURES_IN_BERT:
                continue
            shares = [over(rows, name, row) for name in floors]
            for peer in peers:
                name = f"flex-{row.attention}" if peer == "flex" else peer
                ratios[peer].append(over(rows, name, row))
            takes = [ratios[peer][-1] for peer in peers]
            lines.append(
                [
                    of_step(case, shared),
                    f"`{row.attention}`",
                    in_three_digits(row.milliseconds),
                    *("" if share is None else percent(share) for share in shares),
                    *("" if number is None else ratio(number) for number in takes),
                ]
            )
    of = ["of " + {NO_ATTENTION: "no attention", FLOOR: "the floor"}[name] for name in floors]
    takes_longer = [f"`{peer}` takes {text} times as long." for peer in peers if (text := span(ratios[peer]))]
    notes = [*notes_of(shared), *takes_longer]
    return Table(["tokens", "structure", "ms", *of, *(f"`{peer}` takes" for peer in peers)], lines, notes=notes)


def bert_longest(tries: Sequence[tuple[Case, Row]]) -> Table:
    """A line an attention: the longest sequence with all activations kept and with those of layers alone, and how many
    times that of eager attention it is."""
    found: dict[tuple[str, str], dict[bool, Longest]] = {}
    for name, one in longest_of(tries):
        settings = ", ".join(unusual(replace(one.case, checkpointed=False)))
        found.setdefault((settings, name), {})[one.case.checkpointed] = one
    ways = [way for way in (False, True) if any(way in cells for cells in found.values())]
    lines = []
    for (settings, name), cells in found.items():
        eager = found.get((settings, EAGER), {})
        line = [f"`{name}`", settings]
        for way in ways:
            line += longest_cells(cells.get(way), eager.get(way))
        lines.append(line)
    named = {False: "tokens", True: "tokens, checkpointed"}
    heading = chain.from_iterable((named[way], f"times `{EAGER}`") for way in ways)
    return Table(["attention", "step", *heading], lines)


def longest_cells(found: Longest | None, eager: Longest | None) -> list[str]:
    """Tokens, and how many times those of eager attention they are, if its longest is known."""
    if found is None:
        return ["", ""]
    times = f"{found.at_least}{ratio(found.case.seq_len / eager.case.seq_len)}" if eager and eager.is_known else ""
    return [found.tokens, times]


def of_step(case: Case, shared: Sequence[str]) -> str:
    return ", ".join([f"{case.seq_len:,}", *(setting for setting in unusual(case) if setting not in shared)])


def shared_settings(steps: Sequence[Result]) -> list[str]:
    """Settings other than the default that all steps share."""
    if not steps:
        return []
    return [setting for setting in unusual(steps[0][0]) if all(setting in unusual(case) for case, _ in steps)]


def notes_of(shared: Sequence[str]) -> list[str]:
    return [f"All steps: {', '.join(shared)}."] if shared else []


def unusual(case: Case) -> Iterator[str]:
    """Settings of a step other than the default."""
    if case.model == LARGE:
        yield "BERT-large"
    if case.dropout:
        yield f"dropout {case.dropout:g}"
    if not case.predicts_all:
        yield "logits of labelled tokens alone"
    if case.whole_step:
        yield "AdamW"
    if case.checkpointed:
        yield "activations checkpointed"
