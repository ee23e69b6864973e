"""What files tell of their package with and without their far part, from runs of `python -m benchmarks train
--experiment documents`."""

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.train import results as train_results
from benchmarks.train.documents import PIECES, REMOVED, SHUFFLED, WHOLE
from benchmarks.train.results import DENSE

from .axes import OURS, TEXT, THEIRS, several_axes
from .tables import trained

MARKS = dict(zip([WHOLE, REMOVED, *SHUFFLED], "o|sx", strict=True))


def draw_shown(runs: Sequence[str]) -> Figure:
    """Percent of files whose package is named: a column a budget, a line an arm, the shortest on top, a mark for what
    of files is shown: means of seeds, of whole files with the standard deviation."""
    groups = train_results.arms_by_case(trained(runs))
    kinds = dict.fromkeys(arm.name.rpartition("-")[0] for arms in groups.values() for arm in arms)
    ours, theirs = iter(OURS), iter(THEIRS)
    colour_of = {kind: next(theirs if kind in (DENSE, PIECES) else ours) for kind in kinds}
    figure, (plots,) = several_axes(len(groups), [1 + 0.3 * max(map(len, groups.values()))])
    for plot, (case, arms) in zip(plots, groups.items(), strict=True):
        arms = sorted(arms, key=lambda arm: arm.length)
        for number, arm in enumerate(arms):
            colour = colour_of[arm.name.rpartition("-")[0]]
            found = {shown: list(by_seed.values()) for shown, by_seed in train_results.percents_shown(arm).items()}
            means = {shown: statistics.mean(of_seeds) for shown, of_seeds in found.items()}
            plot.plot([means[REMOVED], means[WHOLE]], [number] * 2, color=colour, alpha=0.4)
            for shown, mean in means.items():
                spread = statistics.stdev(found[shown]) if shown == WHOLE and len(found[shown]) > 1 else None
                plot.errorbar(mean, number, xerr=spread, fmt=MARKS[shown], color=colour, markersize=7, capsize=3)
        plot.set_yticks(range(len(arms)), [arm.name for arm in arms], fontsize=8)
        plot.set_ylim(len(arms) - 0.4, -0.6)
        plot.set_title(f"{case.budget} an arm", color=TEXT, fontsize=9)
        plot.set_xlabel("percent of held-out files", color=TEXT)
    marks = [Line2D([], [], color=TEXT, marker=mark, linestyle="", label=shown) for shown, mark in MARKS.items()]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, labelcolor=TEXT, fontsize=8)
    return figure
