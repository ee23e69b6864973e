"""Shows a run that has ended: the loss curve as a picture, and one page, which asks for no network."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from ds_sparse.bench.machine import in_three_digits
from ds_sparse.cli.report import report
from ds_sparse.drawing import Sheet, page_text
from ds_sparse.plan.layers import in_whole_blocks, kinds_of, layers_in_words
from ds_sparse.plan.utilisation import MFU, TFLOPS, TOKENS
from ds_sparse.sparsity.declarations import declared_value

import checkpoints
from report import median_figures, tokens_per_second, write_atomically
from training_run import Outcome, TrainingRun

MONITORS = "wandb", "comet"
"""Keys of DeepSpeed that may hold a user's secrets; pages are passed on."""

TEMPLATE = Path(__file__).with_name("run_page.html")

COLOURS = "tab:blue", "tab:orange"


def draw_curves(path: Path, runs: Mapping[str, Sequence[Mapping[str, float]]], unigram: float) -> None:
    """Draws loss, learning rate and tokens a second by step, one colour a run, of records of metrics.jsonl. PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="tight")
    panels = figure.subplots(3)
    curves = (
        (panels[0], "mlm_loss", ", training", {"alpha": 0.35}),
        (panels[0], "held_out_mlm_loss", ", held out", {"marker": "o", "markersize": 3}),
        (panels[1], "learning_rate", "", {}),
        (panels[2], "tokens_per_second", "", {}),
    )
    for panel, key, kind, style in curves:
        for colour, (name, records) in zip(COLOURS, runs.items()):
            points = [(record["step"], record[key]) for record in records if key in record]
            panel.plot(*zip(*points or [(math.nan,) * 2]), color=colour, linewidth=1, label=f"{name}{kind}", **style)
    panels[0].axhline(unigram, color="black", linestyle="--", linewidth=1, label="unigram cross-entropy, held out")
    for panel, label in zip(panels, ("masked-LM loss (nats per token)", "learning rate", "tokens/s")):
        panel.set(xlabel="step", ylabel=label)
        panel.legend()
        panel.grid(alpha=0.3)
    for panel in panels[1:]:
        panel.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def write_page(path: Path, outcomes: Sequence[Outcome], curves: Path, unigram: float, lines: str) -> None:
    """Writes the page of one run, or of two that are compared.

    Args:
        curves: the picture of `draw_curves`.
        unigram: the cross-entropy that losses stand beside, nats.
        lines: what the models fill into held-out lines.
    """
    run = outcomes[0].run
    ends = " and ".join(f"{outcome.run.name} after {outcome.position.step:,} steps" for outcome in outcomes)
    configuration = {
        "DeepSpeed JSON, as it was trained with": {k: v for k, v in run.config.items() if k not in MONITORS},
        "Model": run.model_config.model_dump(),
        "Options": vars(run.args),
    }
    parts = {
        "title": html.escape(f"{path.parent}: {ends}"),
        "figures": _table({outcome.run.name: figures_of(outcome, unigram) for outcome in outcomes}),
        "curves": base64.b64encode(curves.read_bytes()).decode(),
        "layout": _layout(outcomes[0]),
        "lines": html.escape(lines),
        "data": html.escape(run.data.describe()),
        "configuration": "\n".join(_details(name, content) for name, content in configuration.items()),
        "environment": html.escape(report()),
    }
    write_atomically(path, Template(TEMPLATE.read_text(encoding="utf-8")).substitute(parts))


def figures_of(outcome: Outcome, unigram: float) -> dict[str, str]:
    """The figures of a run, by what they are; "-" for what is not known."""
    run, position, records, _ = outcome
    figures, settings = median_figures(records), run.settings()
    memory = max((record["memory_gib"] for record in records if "memory_gib" in record), default=None)
    return {
        "steps": f"{position.step:,}",
        "tokens": f"{position.step * settings.sequences * run.args.max_seq_length:,}",
        "held-out loss, nats": f"{position.held_out_loss:.4f}",
        "unigram cross-entropy, nats": f"{unigram:.4f}",
        "tokens/s, median step": f"{figures[TOKENS]:,.0f}" if figures else "-",
        "tokens/s, all steps": f"{tokens_per_second(records):,.0f}" if figures else "-",
        "model TFLOP/s a rank, median step": in_three_digits(figures[TFLOPS]) if figures else "-",
        "part of the chip's peak rate (MFU), median step": f"{figures[MFU]:.1%}" if MFU in figures else "-",
        "peak memory of rank 0, GiB": f"{memory:.2f}" if memory is not None else "-",
        "ranks": str(settings.gpus),
        "checkpoints": ", ".join(path.name for path in checkpoints.kept(run.checkpoints)) or "-",
    }


def _table(columns: Mapping[str, Mapping[str, str]]) -> str:
    def row(name: str, cells: Sequence[str], kind: str) -> str:
        return f"<tr><th>{html.escape(name)}</th>{''.join(f'<{kind}>{html.escape(x)}</{kind}>' for x in cells)}</tr>"

    names = next(iter(columns.values()))
    rows = [row(name, [column[name] for column in columns.values()], "td") for name in names]
    return f"<table><thead>{row('', list(columns), 'th')}</thead><tbody>{''.join(rows)}</tbody></table>"


def _layout(outcome: Outcome) -> str:
    """The page of `ds_sparse draw` with the layouts of the layers, in a frame; or why there is none."""
    sheets = _sheets(outcome.run, outcome.position.layout_seed)
    if not sheets:
        return "<p>Attention is dense: there is no layout.</p>"
    try:
        page = page_text(sheets, f"{len(sheets)} layouts" if len(sheets) > 1 else "The layout")
    except ValueError as error:
        return f"<p>{html.escape(str(error))}</p>"
    return f'<iframe title="Layouts" srcdoc="{html.escape(page)}"></iframe>'


def _sheets(run: TrainingRun, layout_seed: int | None) -> list[Sheet]:
    block, file = run.block, Path(run.args.deepspeed_config).name
    if block is not None and layout_seed is not None:
        block = block | {"seed": layout_seed}
    kinds = kinds_of(block, run.model(), run.args.deepspeed_config)
    tokens = in_whole_blocks(kinds, run.args.max_seq_length)
    sheets = []
    for kind in kinds:
        if (structure := kind.structure) is not None:
            name, causal = f"layers {layers_in_words(kind.layers)}", declared_value(structure, "causal")
            rows = structure.make_rows(tokens)
            sheets.append(Sheet(file, name, rows, structure.block, structure.num_heads, causal, about=block))
    return sheets


def _details(name: str, content: Mapping[str, Any]) -> str:
    text = html.escape(json.dumps(content, indent=2, default=str))
    return f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>"
