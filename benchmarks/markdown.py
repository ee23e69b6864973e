"""Results of models and of training as tables for a page, in GitHub's Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from benchmarks.models import bert_results, modernbert_results, sequence_results
from benchmarks.train import results as train_results
from ds_sparse.bench.cases import EAGER, FLEX_IN_BERT, FLOOR, NO_ATTENTION, STRUCTURES_IN_BERT
from ds_sparse.bench.machine import in_three_digits
from ds_sparse.bench.markdown import Table, percent, ratio, span


def of_bert(results: list[bert_results.Result]) -> dict[str, Table]:
    """Times of a step with the share of the model without attention; how they compare; memory; longest sequences."""
    steps = [(case, rows) for case, rows in results if not case.is_try]
    measured = {row.attention for _, rows in steps for row in rows if not row.reason}
    names = [name for name in dict.fromkeys(row.attention for _, rows in steps for row in rows) if name in measured]
    heading = ["tokens", *({NO_ATTENTION: "no attention", FLOOR: "floor"}.get(name, f"`{name}`") for name in names)]

    shared = shared_settings(steps)
    notes = notes_of(shared)

    def lines(cell: Callable[[list[bert_results.Row], bert_results.Row], str]) -> list[list[str]]:
        found = [(case, rows, {row.attention: row for row in rows if not row.reason}) for case, rows in steps]
        return [
            [of_step(case, shared), *(cell(rows, timed[name]) if name in timed else "" for name in names)]
            for case, rows, timed in found
        ]

    def time(rows: list[bert_results.Row], row: bert_results.Row) -> str:
        share = None if row.attention == NO_ATTENTION else bert_results.over(rows, NO_ATTENTION, row)
        return in_three_digits(row.milliseconds) + ("" if share is None else f" ({percent(share)})")

    def memory(rows: list[bert_results.Row], row: bert_results.Row) -> str:
        return "" if row.peak_gib is None else f"{row.peak_gib:.1f}"

    found = {"steps": Table(heading, lines(time), notes=notes), "beside": bert_beside(steps)}
    if any(row.peak_gib is not None for _, rows in steps for row in rows):
        found["memory"] = Table(heading, lines(memory), notes=notes)
    tries = [(case, row) for case, rows in results for row in rows if case.is_try]
    return found | {"longest": bert_longest(tries)}


def bert_beside(steps: Sequence[bert_results.Result]) -> Table:
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
            shares = [bert_results.over(rows, name, row) for name in floors]
            for peer in peers:
                name = f"flex-{row.attention}" if peer == "flex" else peer
                ratios[peer].append(bert_results.over(rows, name, row))
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


def bert_longest(tries: Sequence[tuple[bert_results.Case, bert_results.Row]]) -> Table:
    """A line an attention: the longest sequence with all activations kept and with those of layers alone, and how many
    times that of eager attention it is."""
    found: dict[tuple[str, str], dict[bool, bert_results.Found]] = {}
    for name, one in bert_results.longest_of(tries):
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


def longest_cells(found: bert_results.Found | None, eager: bert_results.Found | None) -> list[str]:
    """Tokens, and how many times those of eager attention they are, if its longest is known."""
    if found is None:
        return ["", ""]
    times = f"{found.at_least}{ratio(found.case.seq_len / eager.case.seq_len)}" if eager and eager.is_known else ""
    return [found.tokens, times]


def of_step(case: bert_results.Case, shared: Sequence[str]) -> str:
    return ", ".join([f"{case.seq_len:,}", *(setting for setting in unusual(case) if setting not in shared)])


def shared_settings(steps: Sequence[bert_results.Result]) -> list[str]:
    """What of all steps is not the default."""
    if not steps:
        return []
    return [setting for setting in unusual(steps[0][0]) if all(setting in unusual(case) for case, _ in steps)]


def notes_of(shared: Sequence[str]) -> list[str]:
    return [f"All steps: {', '.join(shared)}."] if shared else []


def unusual(case: bert_results.Case) -> Iterator[str]:
    """What of a step of BERT is not the default."""
    if case.model == bert_results.LARGE:
        yield "BERT-large"
    if case.dropout:
        yield f"dropout {case.dropout:g}"
    if not case.predicts_all:
        yield "logits of labelled tokens alone"
    if case.whole_step:
        yield "AdamW"
    if case.checkpointed:
        yield "activations checkpointed"


def modernbert_steps(results: list[modernbert_results.Result]) -> Table:
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
    return Table([*(["rows"] if several else []), *heading, *(["peak GiB"] if memory else [])], lines)


def of_train(results: list[train_results.Result]) -> dict[str, Table]:
    """For each budget a line an arm: its held-out loss, beside that of dense attention, and what else was measured."""
    return {
        f"{case.experiment}, {case.job.budget}, {train_results.settings_of(case)}": trained_arms(case, arms)
        for case, arms in train_results.arms_by_case(results).items()
    }


def trained_arms(case: train_results.Case, arms: Sequence[train_results.Arm]) -> Table:
    measures = list(dict.fromkeys(name for arm in arms for name in arm.measures))
    lines = []
    for arm in arms:
        over = arm.over(train_results.dense_for(arm, arms))
        lines.append(
            [
                f"`{arm.name}`",
                str(len(arm.rows)),
                f"{arm.held_out:.4f}" + ("" if arm.spread is None else f" ± {arm.spread:.4f}"),
                "" if over is None else f"{over:.3f}",
                f"{arm.seconds / 60:.2f}",
                f"{arm.tokens / 1e6:.1f}",
                f"{arm.tokens_per_second:,.0f}",
                *(f"{arm.measures[name]:.4g}" if name in arm.measures else "" for name in measures),
            ]
        )
    heading = ["arm", "seeds", "held-out loss", "of dense", "minutes", "million tokens", "tokens/s"]
    about = f"{case.experiment}, {case.job.budget} an arm, {train_results.settings_of(case)}"
    return Table([*heading, *(name.replace("_", " ") for name in measures)], lines, notes=[about])


def of_packed_step(case: modernbert_results.Case) -> str:
    rows = f"{len(case.lengths)} x {case.seq_len:,}, {case.dtype}"
    return f"{rows}{'' if case.predicts_all else ', logits of labelled tokens alone'}"


def of_sequence(results: list[sequence_results.Result]) -> dict[str, Table]:
    """Lines of what was measured on each number of ranks; where the time goes, and what memory is for."""
    seen = [(case, row) for case, rows in results for row in rows if not row.reason]
    settings = list(dict.fromkeys(sequence_results.settings_of(case) for case, _ in seen))

    def start(case: sequence_results.Case, row: sequence_results.Row) -> list[str]:
        ranks = f"{row.ranks}{sequence_results.sequences_of(case, row)}"
        also = [sequence_results.settings_of(case)] if len(settings) > 1 else []
        return [f"{case.seq_len:,}", ranks, *also]

    def parts(of: Callable[[sequence_results.Row], Mapping[str, float]], write: Callable[[float], str]) -> Table:
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
        for one in sequence_results.longest_of((case, row) for case, rows in results for row in rows)
    ]
    notes = settings if len(settings) == 1 else []
    return {
        "steps": Table([*heading, *columns], steps, notes=notes),
        "time": parts(lambda row: row.profile, in_three_digits),
        "memory": parts(lambda row: row.memory, lambda gib: f"{gib:.2f}"),
        "longest": Table([*heading, "too long", "ms", "peak GiB a rank"], found, notes=notes),
    }


TABLES: dict[str, Callable[[list[Any]], dict[str, Table]]] = {
    "bert": of_bert,
    "modernbert": lambda results: {"steps": modernbert_steps(results)},
    "sequence": of_sequence,
    "train": of_train,
}
"""Tables of results, by operation."""
