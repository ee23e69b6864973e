"""Tables of committed results of `ds_sparse bench`, in Markdown."""

import contextlib
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.program import register
from benchmarks.train import results as train_results
from ds_sparse.bench import markdown
from ds_sparse.bench.registry import operation
from ds_sparse.bench.show import load, show_run

register()

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "training-h200"
"""The summary that `training.py` writes; all others are runs of `ds_sparse bench`."""


def names() -> list[str]:
    """The committed runs of `ds_sparse bench`."""
    return sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != TRAINING)


def text(name: str) -> str:
    """The text that `ds_sparse bench show` prints of a run; RUN.txt beside RUN.json has it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show_run(*load(str(RESULTS / f"{name}.json")))
    return printed.getvalue().lstrip("\n")


RUN_PAGES = {"operations": "benchmark-runs.md", "models": "benchmark-runs-models.md"}


def _kind(name: str) -> str:
    """Which of the two pages of runs has it."""
    return "models" if name.startswith(("bert", "modernbert", "sequence", "train")) else "operations"


def texts(kind: str) -> str:
    """A section with its output for each run of operations, or of models."""
    return "\n\n".join(f"## {name}\n\n```text\n{text(name)}```" for name in names() if _kind(name) == kind)


def printed(name: str) -> str:
    """The address of a run's output."""
    return f"{RUN_PAGES[_kind(name)]}#{name}"


def table(runs: str, which: str | None = None) -> str:
    """A table of some runs of an operation, with their machines and commands.

    Raises:
        ValueError: an operation with several tables, and none of them named.
    """
    loaded = [load(str(RESULTS / f"{name}.json")) for name in runs.split(",")]
    run, options, _ = loaded[0]
    found = operation(run.operation).tables([result for _, _, results in loaded for result in results], options)
    if which is None and len(found) > 1:
        raise ValueError(f"{runs}: name one of the tables {', '.join(found)}.")
    made = found[which or next(iter(found))].in_markdown()
    return f"{made}\n\n{sources(runs.split(','))}"


def sources(runs: list[str]) -> str:
    """Machines and commands of some runs, with links to what they printed."""
    return markdown.sources([load(str(RESULTS / f"{name}.json"))[0] for name in runs], [printed(name) for name in runs])


def results_of(runs: Iterable[str]) -> list[Any]:
    """Cases and rows of some runs."""
    return [result for name in runs for result in load(str(RESULTS / f"{name}.json"))[2]]


def trained(runs: Sequence[str]) -> list[train_results.Result]:
    """Jobs of runs of `python -m benchmarks train`.

    Raises:
        ValueError: a job has learned nothing that could be compared.
    """
    found = []
    for name in runs:
        for case, (row,) in results_of([name]):
            if row.warning:
                raise ValueError(f"{name}.json, {case.job}: {row.warning}.")
            found.append((case, [row]))
    return found


def training() -> str:
    """A line a training run, the fastest first; the README has this table, too."""
    data = json.loads((RESULTS / f"{TRAINING}.json").read_text())
    rows = [
        [
            run["name"],
            markdown.percent(run["density"]),
            f"{run['tokens_per_second']:,.0f}",
            f"{run['peak_gib']:.1f}",
            f"{run['held_out'][-1][1]:.3f}",
        ]
        for run in sorted(data["runs"], key=lambda run: -run["tokens_per_second"])
    ]
    made = markdown.Table(["attention", "density", "tokens/s", "peak GiB", "held-out loss"], rows).in_markdown()
    (trained,) = {f"{len(run['training'])} steps of {run['batch']} x {run['seq_len']:,} tokens" for run in data["runs"]}
    about = f"{data['machine']}, torch {data['torch']}, commit {data['commit']}, {data['date']}"
    return f"{made}\n\n{about}: `examples/bing_bert/deepspeed_train.py`, {trained}"
