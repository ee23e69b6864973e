"""Makes what pages show of benchmarks/results/*.json: .venv/bin/python website/benchmark_tables.py

It writes the tables of README.md, docs/benchmarks.md and docs/sequence-parallel.md, between the comments
`<!-- table: RUN[,RUN...] [TABLE] -->` and `<!-- end -->`; beside each RUN.json the text that `ds_sparse bench show`
prints; and the sections of docs/benchmark-runs.md with these texts. TABLE is needed where an operation has several.
With nothing between the comments, the place of a table whose runs are still to be measured stays empty.
"""

import contextlib
import io
import json
import re
from pathlib import Path

from benchmarks.program import register
from ds_sparse.bench import markdown
from ds_sparse.bench.registry import operation
from ds_sparse.bench.show import load, show_run

register()

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = "training-h200"
"""The summary of `training_table.py`; all others are runs of `ds_sparse bench`."""

PAGES = {
    "README.md": "benchmarks/results/{}.txt",
    "docs/benchmarks.md": "benchmark-runs.md#{}",
    "docs/sequence-parallel.md": "benchmark-runs.md#{}",
}
"""Pages with tables, and where each leads to what a run printed."""

RUNS = ROOT / "docs" / "benchmark-runs.md"


def names() -> list[str]:
    """The runs of `ds_sparse bench` that are there."""
    return sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != TRAINING)


def text(name: str) -> str:
    """What a run printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show_run(*load(str(RESULTS / f"{name}.json")))
    return printed.getvalue().lstrip("\n")


def table(runs: list[str], which: str | None, link: str) -> str:
    """The table of some runs of an operation, and a line about each.

    Raises:
        ValueError: an operation with several tables, and none of them named.
    """
    if runs == [TRAINING]:
        return training_table()
    loaded = [load(str(RESULTS / f"{name}.json")) for name in runs]
    run, options, _ = loaded[0]
    found = operation(run.operation).tables([result for _, _, results in loaded for result in results], options)
    if which is None and len(found) > 1:
        raise ValueError(f"{', '.join(runs)}: name one of the tables {', '.join(found)}.")
    made = found[which or next(iter(found))].in_markdown()
    sources = markdown.sources([run for run, *_ in loaded], [link.format(name) for name in runs])
    return f"{made}\n\n{sources}"


def training_table() -> str:
    """A line a training run, the fastest first."""
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


def with_tables(page: str, link: str) -> str:
    """The page with all its tables made anew. The place of one whose runs are still to be measured stays as it is."""

    def made(found: re.Match[str]) -> str:
        runs = found[1].split(",")
        if found[3] == "" and not any((RESULTS / f"{name}.json").exists() for name in runs):
            return found[0]
        return f"{found[0].splitlines()[0]}\n\n{table(runs, found[2], link)}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+)(?: (\S+))? -->\n(.*?)<!-- end -->", made, page, flags=re.DOTALL)


def with_runs(page: str) -> str:
    """The page of all runs, a section each."""
    sections = "".join(f'## {name}\n\n```text\n--8<-- "benchmarks/results/{name}.txt"\n```\n\n' for name in names())
    return re.sub(r"<!-- runs -->\n.*<!-- end -->", f"<!-- runs -->\n\n{sections}<!-- end -->", page, flags=re.DOTALL)


def main() -> None:
    for name in names():
        (RESULTS / f"{name}.txt").write_text(text(name))
    for name, link in PAGES.items():
        (ROOT / name).write_text(with_tables((ROOT / name).read_text(), link))
    RUNS.write_text(with_runs(RUNS.read_text()))


if __name__ == "__main__":
    main()
