"""Sums up runs of examples/bing_bert/deepspeed_train.py in training-h200.json, and draws their losses:

    .venv/bin/python -m benchmarks.pages.training FOLDER... --machine "NVIDIA H200" --commit COMMIT --date DAY

FOLDER is a `sparse` or `dense` folder of what the program prints as its run's, a folder for each attention of
`benchmarks.plan.committed.BLOCKS` and in their order.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.plan.committed import BLOCKS, walk_of

from .gains import TEXT, axes, image
from .tables import RESULTS, TRAINING

SUMMARY = RESULTS / f"{TRAINING}.json"

FIRST_STEPS = 10
"""Steps whose tokens a second do not count: they compile and tune."""


def summary(name: str, folder: Path) -> dict[str, Any]:
    """One training run: what was trained, its figures, and its losses by step."""
    checkpoints = folder / "checkpoints"
    terms = json.loads((checkpoints / (checkpoints / "latest").read_text() / "state.json").read_text())["terms"]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "mlm_loss" in record]
    seq_len, walk = terms["max_seq_length"], walk_of(name, terms["max_seq_length"])
    return {
        "name": name,
        "density": 1.0 if walk is None else walk.density,
        "seq_len": seq_len,
        "batch": terms["train_batch_size"],
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in steps[FIRST_STEPS:]),
        "peak_gib": max(record["memory_gib"] for record in steps),
        "held_out": [[x["step"], round(x["held_out_mlm_loss"], 4)] for x in records if "held_out_mlm_loss" in x],
        "training": [round(record["mlm_loss"], 4) for record in steps],
    }


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
    parser.add_argument("folders", nargs=len(BLOCKS), type=Path, metavar="FOLDER")
    for name in ("machine", "commit", "date"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    torch = json.loads((args.folders[0].parent / "manifest.json").read_text())["versions"]["torch"]
    about = {"machine": args.machine, "torch": torch, "commit": args.commit, "date": args.date}
    lines = ",\n".join(json.dumps(summary(*run)) for run in zip(BLOCKS, args.folders, strict=True))
    SUMMARY.write_text(f'{json.dumps(about)[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
