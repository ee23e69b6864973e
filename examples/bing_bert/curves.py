"""The curves of one run or two: the loss as a picture, and all of them for a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

Records = Sequence[Mapping[str, float]]
"""Records of a metrics.jsonl."""

COLOURS = "tab:blue", "tab:orange"
MOST = 2000
"""Points of a curve in a page; of longer ones every so many is shown."""


def draw_loss_curve(path: Path, runs: Mapping[str, Records], unigram: float) -> None:
    """Masked-LM loss by step, training and held-out, one colour a run, beside the unigram cross-entropy. PNG."""
    figure, axes = _subplots(1, (8, 5))
    _loss(axes[0], runs, unigram)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)


def curves_svg(runs: Mapping[str, Records], unigram: float) -> str:
    """Loss, learning rate and tokens a second by step, one over the other, as an <svg> element."""
    import matplotlib

    figure, axes = _subplots(3, (9, 9))
    _loss(axes[0], runs, unigram)
    for panel, (key, label) in zip(axes[1:], (("learning_rate", "learning rate"), ("tokens_per_second", "tokens/s"))):
        for colour, (name, records) in zip(COLOURS, runs.items()):
            panel.plot(*_points(records, key), color=colour, linewidth=1, label=name)
        panel.set_ylim(bottom=0)
        _label(panel, label)
    out = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ds_sparse"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]


def _subplots(rows: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="tight")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, squeeze=False)[:, 0]


def _loss(axes: Any, runs: Mapping[str, Records], unigram: float) -> None:
    for colour, (label, records) in zip(COLOURS, runs.items()):
        training, held_out = (_points(records, key) for key in ("mlm_loss", "held_out_mlm_loss"))
        axes.plot(*training, color=colour, alpha=0.35, linewidth=1, label=f"{label}, training")
        axes.plot(*held_out, color=colour, marker="o", markersize=3, label=f"{label}, held out")
    axes.axhline(unigram, color="black", linestyle="--", linewidth=1, label="unigram cross-entropy, held out")
    _label(axes, "masked-LM loss (nats per token)")


def _points(records: Records, key: str) -> tuple[list[float], list[float]]:
    those = [record for record in records if key in record]
    shown = those[:: -(-len(those) // MOST) or 1]
    return [record["step"] for record in shown], [record[key] for record in shown]


def _label(axes: Any, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.legend()
    axes.grid(alpha=0.3)
