"""The page of a run that has ended: one file, which asks for nothing from a network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from ds_sparse.bench.machine import in_three_digits
from ds_sparse.cli.report import report
from ds_sparse.config import mode_of, sparse_attention_block
from ds_sparse.drawing import Sheet, page_text
from ds_sparse.plan.layers import in_whole_blocks, kinds_of, layers_in_words
from ds_sparse.plan.utilisation import MFU, TFLOPS, TOKENS
from ds_sparse.sparsity.declarations import declared_value

import checkpoints
from curves import curves_svg
from files import write_atomically
from report import median_figures, tokens_per_second
from training_run import Outcome, TrainingRun

SECRETS = ("api_key", "token", "password", "secret")
"""Ends of the keys of a configuration whose values are nobody else's."""

TEMPLATE = Path(__file__).with_name("run_page.html")


def write_page(path: Path, outcomes: Sequence[Outcome], unigram: float, lines: str) -> None:
    """Writes it of one run, or of two that are compared.

    Args:
        unigram: the cross-entropy that losses stand beside, nats.
        lines: what the models fill into held-out lines.
    """
    run = outcomes[0].run
    ends = " and ".join(f"{outcome.run.name} after {outcome.position.step:,} steps" for outcome in outcomes)
    configuration = {
        "DeepSpeed JSON, as it was trained with": run.config,
        "Model": run.model_config.model_dump(),
        "Options": vars(run.args),
    }
    parts = {
        "title": html.escape(f"{path.parent}: {ends}"),
        "figures": _table({outcome.run.name: figures_of(outcome, unigram) for outcome in outcomes}),
        "curves": curves_svg({outcome.run.name: outcome.records for outcome in outcomes}, unigram),
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
    kept = checkpoints.kept(run.checkpoints)
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
        "checkpoints": "\n".join(f"{name}, {size / 2**20:,.1f} MiB" for name, size in kept.items()) or "-",
    }


def _table(columns: Mapping[str, Mapping[str, str]]) -> str:
    names = next(iter(columns.values()))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = []
    for name in names:
        cells = "".join(f"<td>{html.escape(column[name]).replace(chr(10), '<br>')}</td>" for column in columns.values())
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


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
    block, found = run.block, []
    if block is not None and layout_seed is not None:
        block = block | {"seed": layout_seed}
    kinds = kinds_of(block, run.model(), run.args.deepspeed_config)
    tokens = in_whole_blocks(kinds, run.args.max_seq_length)
    for kind in kinds:
        if kind.structure is None:
            continue
        name, structure = f"layers {layers_in_words(kind.layers)}", kind.structure
        try:
            about = sparse_attention_block(structure)
        except ValueError:  # a class of a user's that does not keep what it was made from
            about = {"mode": mode_of(type(structure)), "block": structure.block}
        rows = structure.make_rows(tokens)
        file = Path(run.args.deepspeed_config).name
        causal = declared_value(structure, "causal")
        found.append(Sheet(file, name, rows, structure.block, structure.num_heads, causal, about=about))
    return found


def _details(name: str, content: Mapping[str, Any]) -> str:
    text = html.escape(json.dumps(without_secrets(content), indent=2, default=str))
    return f"<details><summary>{html.escape(name)}</summary><pre>{text}</pre></details>"


def without_secrets(content: Any) -> Any:
    """The content without what keys such as a monitor's `api_key` hold: pages are passed on."""
    if isinstance(content, list):
        return [without_secrets(part) for part in content]
    if not isinstance(content, Mapping):
        return content
    return {
        key: "(left out)" if str(key).endswith(SECRETS) and isinstance(value, str) else without_secrets(value)
        for key, value in content.items()
    }
