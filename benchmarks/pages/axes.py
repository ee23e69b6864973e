"""Axes and colours of pictures."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

TEXT, PLAIN = "#808080", "#9a9a9a"
OURS = ("#3aa76d", "#2f8fd0", "#9a6fd8", "#17a2a2", "#7bbf3a")
THEIRS = ("#e8833a", "#d9534f", "#c0569f", "#b08a2e", "#8f7be0", "#5fb0b7")
"""Colours that are seen on white and on black."""


def axes() -> tuple[Figure, Any]:
    figure, ((plot,),) = several_axes(1, [4.0])
    return figure, plot


def several_axes(columns: int, heights: Sequence[float]) -> tuple[Figure, Any]:
    """Rows of plots, with the inches that each is high."""
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    figure.patch.set_alpha(0)
    plots: Any = figure.subplots(len(heights), columns, height_ratios=heights, squeeze=False)
    for plot in plots.flat:
        plot.patch.set_alpha(0)
        plot.tick_params(colors=TEXT, which="both")
        plot.grid(color=TEXT, alpha=0.25, linewidth=0.6)
        plot.set_axisbelow(True)
        for side, spine in plot.spines.items():
            spine.set_color(TEXT)
            spine.set_visible(side in ("left", "bottom"))
    return figure, plots


def legend_below(figure: Figure, columns: int = 3) -> None:
    """Names each line once, in the place of a legend that is there."""
    for legend in [*figure.legends]:
        legend.remove()
    lines = {name: line for plot in figure.axes for line, name in zip(*plot.get_legend_handles_labels())}
    style: dict[str, Any] = {"frameon": False, "labelcolor": TEXT, "fontsize": 8}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns, **style)
