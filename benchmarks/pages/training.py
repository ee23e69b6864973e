"""Sums up runs of examples/bing_bert/deepspeed_train.py in training-h200.json, and draws their losses:

    .venv/bin/python -m benchmarks.pages.training --machine "NVIDIA H200" --commit COMMIT --date DAY FOLDER...

FOLDER is what the program prints as its run's: it has `manifest.json`, and in `sparse` or `dense` a metrics.jsonl and a
checkpoint's state.json.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import ds_sparse
from ds_sparse.layout import density

from .gains import TEXT, axes, image
from .tables import RESULTS, TRAINING

SUMMARY = RESULTS / f"{TRAINING}.json"

FIRST_STEPS = 10
"""Steps whose tokens a second do not count: they compile and tune."""


def summary(folder: Path) -> dict[str, Any]:
    """One training run: what was trained, its figures, and its losses by step.

    Raises:
        ValueError: it has no more than `FIRST_STEPS` steps.
    """
    checkpoints = folder / "checkpoints"
    terms = json.loads((checkpoints / (checkpoints / "latest").read_text() / "state.json").read_text())["terms"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "mlm_loss" in record]
    held_out = [[record["step"], round(record["held_out_mlm_loss"], 4)] for record in records if record not in steps]
    if len(steps) <= FIRST_STEPS:
        raise ValueError(f"{folder} has {len(steps)} steps; train more than {FIRST_STEPS}.")
    config = terms["deepspeed_config"]
    return {
        **attention(config.get("sparse_attention") if terms["sparse"] else None, terms),
        "seq_len": terms["max_seq_length"],
        "batch": config["train_batch_size"],
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in steps[FIRST_STEPS:]),
        "peak_gib": max(record["memory_gib"] for record in steps),
        "held_out": held_out,
        "training": [round(record["mlm_loss"], 4) for record in steps],
    }


def attention(block: dict[str, Any] | None, terms: dict[str, Any]) -> dict[str, Any]:
    """Its name and density; without a block of the JSON it is dense."""
    if block is None:
        return {"name": "dense", "density": 1.0}
    seq_len = terms["max_seq_length"]
    structure = ds_sparse.parse_sparse_attention(block, terms["model"]["num_attention_heads"], seq_len=seq_len)
    window = block.get("num_sliding_window_blocks")
    random = block.get("num_random_blocks")
    name = f"`{block['mode']}`, block {structure.block}" + (f", window {window}" if window else "")
    name += f", {random} random" if random else ""
    return {"name": name, "density": density(structure.make_layout(seq_len).bool())}


def runs(folder: Path) -> list[Path]:
    """The sparse and the dense run of a folder, as far as they are there."""
    return [folder / name for name in ("sparse", "dense") if (folder / name / "metrics.jsonl").exists()]


def picture() -> str:
    """Losses of the committed runs by step, training and held out, one colour a run."""
    figure, plot = axes()
    for run in json.loads(SUMMARY.read_text())["runs"]:
        (line,) = plot.plot(*zip(*run["held_out"]), marker="o", markersize=3, label=run["name"].replace("`", ""))
        steps = range(1, len(run["training"]) + 1)
        plot.plot(steps, run["training"], color=line.get_color(), alpha=0.3, linewidth=1)
    plot.set_xlabel("step", color=TEXT)
    plot.set_ylabel("masked-LM loss (nats per token)", color=TEXT)
    plot.legend(title="held out; pale: training", loc="upper right")
    return image(figure, "Loss by step of the four runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    for name in ("machine", "commit", "date"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    args = parser.parse_args()
    torch = json.loads((args.folders[0] / "manifest.json").read_text())["versions"]["torch"]
    about = {"machine": args.machine, "torch": torch, "commit": args.commit, "date": args.date}
    trained = [summary(run) for folder in args.folders for run in runs(folder)]
    lines = ",\n".join(json.dumps(run) for run in trained)
    args.summary.write_text(f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
