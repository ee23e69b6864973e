"""What longer sequences and structures make of one base, from runs of `python -m benchmarks train --experiment
continued`."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.train import results as train_results
from benchmarks.train.results import BASE_ARM, DENSE, FAR, Arm

from .axes import OURS, PLAIN, TEXT, THEIRS, legend_below, several_axes
from .tables import trained

NAMES = "name_"

STYLES = ("-", "--", ":")
"""Of the longest sequences first."""


def draw_continued(runs: Sequence[str]) -> Figure:
    """The loss of names by how many tokens ago they were seen, and beside it how far that is above the loss of the arm
    that goes on with short sequences, where there is one; a bar is the standard deviation over seeds."""
    ((case, arms),) = train_results.arms_by_case(trained(runs)).items()
    measures = [name for name in arms[0].measures if name.startswith(NAMES) and name != FAR]
    ours, theirs = iter(OURS + THEIRS[2:]), iter(THEIRS)
    kinds = dict.fromkeys(map(kind_of, arms))
    colours = {kind: PLAIN if kind == BASE_ARM[:-1] else next(theirs if kind == DENSE else ours) for kind in kinds}
    styles = dict(zip(sorted({arm.length for arm in arms}, reverse=True), STYLES, strict=False))
    short = train_results.goes_on_short(case, arms)
    figure, ((losses, *more),) = several_axes(2 if short else 1, [4.2])
    for arm in arms:
        style = {"color": colours[kind_of(arm)], "linestyle": styles[arm.length], "marker": "o", "markersize": 3}
        losses.plot([arm.measures[name] for name in measures], label=arm.name, **style)
        if short and arm is not short:
            above = [train_results.more_loss(arm, short, name) for name in measures]
            spread = [statistics.stdev(of_seeds) if len(of_seeds) > 1 else 0 for of_seeds in above]
            more[0].errorbar(range(len(measures)), list(map(statistics.mean, above)), spread, capsize=2, **style)
    for plot in (losses, *more):
        plot.set_xticks(
            range(len(measures)), [edge_in_words(name.removeprefix(NAMES)) for name in measures], fontsize=8
        )
        plot.set_xlabel("last seen, tokens ago", color=TEXT)
    losses.set_ylabel("held-out loss of a name", color=TEXT)
    for plot in more:
        plot.axhline(0, color=TEXT, linewidth=1)
        plot.set_ylabel(f"over {short.name}", color=TEXT)
    legend_below(figure)
    return figure


def kind_of(arm: Arm) -> str:
    return arm.name.rpartition("-")[0]


def edge_in_words(edge: str) -> str:
    return f"{int(edge):,} on" if edge.isdecimal() else edge
