"""Pictures of docs/what-it-gives-you.md, from committed results."""

import base64
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from benchmarks.models import attentions
from benchmarks.models.attentions import FLOOR, NO_ATTENTION, STRUCTURES_IN_BERT
from benchmarks.models.results import longest_of
from benchmarks.train import results as train_results
from benchmarks.train.results import BY_COPY, WITHOUT_COPY

from .axes import OURS, PLAIN, TEXT, THEIRS, axes, legend_below, several_axes
from .claims import (
    CONTINUED,
    CONTINUED_LONGER,
    COPIES,
    DECODER,
    DNA,
    DOCUMENTS,
    DOCUMENTS_FAR,
    DOCUMENTS_IN_A_MINUTE,
    ENCODER,
    LARGE_LONGEST,
    LENGTHS,
    LONGER,
    LONGEST,
    MODERNBERT,
    QUALITY,
    RECALL,
    STRUCTURES,
)
from .continued import draw_continued
from .documents import draw_shown
from .recall import draw_recall, recall_tables
from .tables import results_of, sources, trained


def colours(names: Iterable[str]) -> dict[str, str]:
    """Greens and blue are ours, greys no attention."""
    ours, theirs = iter(OURS), iter(THEIRS)
    plain = {NO_ATTENTION: PLAIN, FLOOR: PLAIN}
    is_ours = {*STRUCTURES_IN_BERT, attentions.OURS, attentions.OURS_PADDED}
    return {name: plain.get(name) or next(ours if name in is_ours else theirs) for name in names}


def bar_colours(names: Iterable[str]) -> list[str]:
    """Colours of bars that are named by an attention, or by one and what else is told of it after a comma."""
    attentions = [name.partition(",")[0] for name in names]
    colour_of = colours(dict.fromkeys(attentions))
    return [colour_of[name] for name in attentions]


def draw_speed(runs: Sequence[str]) -> Figure:
    """Tokens a second against the length of a sequence."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for case, rows in results_of(runs):
        for row in rows:
            if not row.reason:
                speed = case.batch * case.seq_len / row.milliseconds * 1e3
                lines.setdefault(row.attention, []).append((case.seq_len, speed))
    figure, plot = axes()
    for name, colour in colours(lines).items():
        style = {NO_ATTENTION: ":", FLOOR: "--"}.get(name, "-")
        label = {NO_ATTENTION: "no attention"}.get(name, name)
        plot.plot(*zip(*sorted(lines[name])), style, color=colour, marker="o", markersize=4, label=label)
    plot.set_xscale("log", base=2)
    plot.set_ylim(bottom=0)
    ticks = sorted({length for line in lines.values() for length, _ in line})
    plot.set_xticks(ticks, [f"{length:,}" for length in ticks])
    plot.set_xlabel("tokens of a sequence", color=TEXT)
    plot.set_ylabel("tokens a second", color=TEXT)
    plot.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    legend_below(figure)
    return figure


def draw_bars(
    bars: Mapping[str, float], colours: Sequence[str], label: str, number: str = "{:,.0f}", least: Iterable[str] = ()
) -> Figure:
    """A bar each, the first on top; those that are the least of what may be say so, and are dashed."""
    figure, plot = axes()
    plot.grid(visible=False, axis="y")
    drawn = plot.barh(list(bars), list(bars.values()), color=colours)
    labels = [f"{'at least ' if name in least else ''}{number.format(value)}" for name, value in bars.items()]
    plot.bar_label(drawn, labels, color=TEXT, padding=3)
    for bar in (bar for bar, name in zip(drawn, bars) if name in least):
        bar.set(fill=False, edgecolor=bar.get_facecolor(), linestyle="--", linewidth=1.5)
    plot.invert_yaxis()
    plot.set_xlim(0, 1.4 * max(bars.values()))
    plot.locator_params(axis="x", nbins=5)
    plot.set_xlabel(label, color=TEXT)
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def draw_longest(runs: Sequence[str]) -> Figure:
    found = {
        one.row.attention + (", checkpointed" if one.case.checkpointed else ""): one
        for one in longest_of(results_of(runs))
    }
    least = {name for name, one in found.items() if not one.is_known}
    bars = {name: one.case.seq_len for name, one in found.items()}
    label = "longest sequence that fits, tokens" + ("\n(dashed: the search ended by its time)" if least else "")
    return draw_bars(bars, bar_colours(bars), label, least=least)


def draw_packed(runs: Sequence[str]) -> Figure:
    ((_, rows),) = results_of(runs)
    bars = {row.attention: row.tokens_per_second for row in rows if not row.reason}
    return draw_bars(bars, bar_colours(bars), "tokens a second")


def draw_curves(runs: Sequence[str]) -> Figure:
    """Held-out loss on the way, the mean of seeds, and below that of each seed at the end: a column for each budget,
    and for each thing that phases are asked."""
    groups = train_results.arms_by_case(trained(runs))
    phases = [(case, asked) for case, arms in groups.items() for asked in asked_of(arms)]
    is_one_loss = len({asked for _, asked in phases}) == 1
    most = max(map(len, groups.values()))
    figure, (curves, ends) = several_axes(len(phases), [3.6, 0.6 + 0.28 * most])
    for plot, end, (case, asked) in zip(curves, ends, phases):
        for arm, colour in zip(groups[case], arm_colours(groups[case])):
            draw_curve(plot, case, arm, asked, colour)
        draw_ends(end, groups[case], asked)
        plot.set_xlabel("million tokens" if case.tokens else "seconds of training steps", color=TEXT)
        loss = " of ".join(filter(None, ["held-out loss", asked]))
        end.set_xlabel(f"{loss} at the end", color=TEXT, fontsize=8)
        if plot is curves[0] or not is_one_loss:
            plot.set_ylabel(loss, color=TEXT)
        else:
            plot.sharey(curves[0])
            plot.tick_params(labelleft=False)
    first, *others = ([arm.name for arm in groups[case]] for case, _ in phases)
    for end, names in zip(ends[1:], others):
        end.tick_params(labelleft=names != first)
    curves[0].legend(frameon=False, labelcolor=TEXT, fontsize=8)
    return figure


def asked_of(arms: Sequence[train_results.Arm]) -> list[str]:
    """The things that losses are measured on, in the order of phases."""
    return list(dict.fromkeys(point.asked for arm in arms for row in arm.rows for point in row.curve))


def draw_curve(plot: Any, case: train_results.Case, arm: train_results.Arm, asked: str, colour: str) -> None:
    """The mean loss of seeds on one thing, against tokens where those are the budget, else against seconds."""
    by_seed = list(zip(*([point for point in row.curve if point.asked == asked] for row in arm.rows)))
    done = [[point.tokens / 1e6 if case.tokens else point.seconds for point in at] for at in by_seed]
    losses = [statistics.mean(point.held_out for point in at) for at in by_seed]
    plot.plot(list(map(statistics.mean, done)), losses, color=colour, label=arm.name)


def draw_ends(plot: Any, arms: Sequence[train_results.Arm], asked: str) -> None:
    """A line an arm, the first on top: a dot a seed, a stroke and a number for their mean."""
    for number, (arm, colour) in enumerate(zip(arms, arm_colours(arms))):
        losses = [[point.held_out for point in row.curve if point.asked == asked][-1] for row in arm.rows]
        mean = statistics.mean(losses)
        plot.plot(losses, [number] * len(losses), "o", color=colour, markersize=5, alpha=0.7)
        plot.plot([mean], [number], "|", color=colour, markersize=14, markeredgewidth=2)
        plot.annotate(
            f"{mean:.3f}",
            (max(losses), number),
            (8, 0),
            textcoords="offset points",
            va="center",
            color=TEXT,
            fontsize=8,
        )
    plot.set_yticks(range(len(arms)), [arm.name for arm in arms], fontsize=8)
    plot.set_ylim(len(arms) - 0.5, -0.5)
    plot.margins(x=0.25)
    plot.locator_params(axis="x", nbins=5)


def arm_colours(arms: Sequence[train_results.Arm]) -> list[str]:
    """A colour of ours for each sparse arm; the longest dense one has the same colour in all pictures."""
    longest = max((arm.length for arm in arms if arm.is_dense), default=0)
    shorter, long, *more = THEIRS
    ours, theirs = iter(OURS), iter([shorter, *more])
    return [next(ours) if not arm.is_dense else long if arm.length == longest else next(theirs) for arm in arms]


def draw_measure(runs: Sequence[str], measure: str, label: str) -> Figure:
    """A bar an arm, percent; the mean of seeds."""
    ((_, arms),) = train_results.arms_by_case(trained(runs)).items()
    return draw_bars({arm.name: arm.measures[measure] * 100 for arm in arms}, arm_colours(arms), label, "{:.1f}")


def train_tables(runs: Sequence[str]) -> str:
    return "\n\n".join(table.in_markdown() for table in train_results.tables_of(trained(runs)).values())


def draw_copies(runs: Sequence[str]) -> Figure:
    """The part of masked bases that is named, percent, by how far away the same bases stand; dashed: without a copy."""
    ((_, arms),) = train_results.arms_by_case(trained(runs)).items()
    figure, plot = axes()
    for arm, colour in zip(arms, arm_colours(arms)):
        named = {name: 100 * part for name, part in arm.measures.items() if name.startswith(BY_COPY)}
        plot.axhline(named.pop(WITHOUT_COPY), color=colour, linestyle="--", linewidth=1)
        distances = [f"{int(name.removeprefix(BY_COPY)):,}" for name in named]
        plot.plot(distances, list(named.values()), color=colour, marker="o", markersize=4, label=arm.name)
    plot.set_xlabel("the same bases stand away, bases, to below twice that", color=TEXT)
    plot.set_ylabel("masked bases that are named, percent", color=TEXT)
    legend_below(figure)
    return figure


class Picture(NamedTuple):
    """A picture of runs; `about` is its text for who does not see it, `below` makes tables of the runs under it."""

    runs: Sequence[str]
    draw: Callable[[Sequence[str]], Figure]
    about: str
    below: Callable[[Sequence[str]], str] = lambda runs: ""


GAINS = {
    "speed": Picture(LENGTHS, draw_speed, "Tokens a second of a step of BERT-base against the length, by attention"),
    "longest": Picture(
        LONGEST, draw_longest, "The longest sequence that fits, by attention; dashed where the search ended by its time"
    ),
    "longest_large": Picture(
        LARGE_LONGEST,
        draw_longest,
        "The longest sequence of BERT-large that fits; as long for dense attention as for bigbird-64",
    ),
    "quality": Picture(
        QUALITY,
        draw_curves,
        "Held-out loss against tokens and against seconds, by arm; below it each seed at the end",
        train_tables,
    ),
    "structures": Picture(
        STRUCTURES,
        draw_curves,
        "Held-out loss of other structures, and of a dense model that goes on with 4,096 tokens",
        train_tables,
    ),
    "longer": Picture(LONGER, draw_curves, "Held-out loss with sequences of 16,384 tokens", train_tables),
    "recall": Picture(
        RECALL,
        draw_recall,
        "Percent of values told against their distance, by attention and by the hops between",
        recall_tables,
    ),
    "continued": Picture(
        CONTINUED,
        draw_continued,
        "Held-out loss of names by how many tokens ago they were seen, by attention that goes on from the same base",
        train_tables,
    ),
    "continued_longer": Picture(
        CONTINUED_LONGER,
        draw_continued,
        "The same with sequences of 16,384 tokens",
        train_tables,
    ),
    "documents_far": Picture(
        DOCUMENTS_FAR,
        draw_shown,
        "Percent of files whose package is named, by arm: whole, with the far part removed, and with it shuffled",
        train_tables,
    ),
    "dna": Picture(
        DNA,
        partial(draw_measure, measure="gene_f1", label="F1 of genes on held-out sequences, percent"),
        "F1 of genes that are found, by arm",
        train_tables,
    ),
    "copies": Picture(
        COPIES,
        draw_copies,
        "Percent of masked bases that are named against the distance of their copy, by arm",
        train_tables,
    ),
    "dna_losses": Picture(DNA, draw_curves, "Held-out loss of masked bases, then of genes, against seconds, by arm"),
    "documents": Picture(
        DOCUMENTS,
        partial(draw_measure, measure="macro_f1", label="macro F1 of packages on held-out files, percent"),
        "Macro F1 of packages that source files belong to, by arm",
        train_tables,
    ),
    "documents_minute": Picture(
        DOCUMENTS_IN_A_MINUTE,
        draw_curves,
        "Held-out loss of masked tokens, then of packages, in one minute, by arm",
        train_tables,
    ),
    "decoder": Picture(
        DECODER, draw_curves, "Held-out loss of a decoder against tokens and against seconds, by arm", train_tables
    ),
    "encoder": Picture(
        ENCODER, draw_curves, "Held-out loss of an encoder against tokens and against seconds, by arm", train_tables
    ),
    "packed": Picture([MODERNBERT], draw_packed, "Tokens a second of a step of ModernBERT, by attention"),
}


def shown(name: str) -> str:
    """A picture with the tables and runs that belong to it."""
    gain = GAINS[name]
    parts = (image(gain.draw(gain.runs), gain.about), gain.below(gain.runs), sources(list(gain.runs)))
    return "\n\n".join(part for part in parts if part)


def image(figure: Figure, about: str) -> str:
    """An SVG inside the page; `about` is its text for who does not see it."""
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_sparse"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None}, transparent=True)
    data = base64.b64encode(drawn.getvalue()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{about}" width="720">'
