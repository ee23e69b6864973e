"""Results that are committed for an H200, the training runs among them, and the rates that come of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ds_sparse.config import parse_sparse_attention
from ds_sparse.plan.fitting import Results, from_files, in_short, rates_of
from ds_sparse.plan.layers import Walk, Walked
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.rates import Rates
from ds_sparse.plan.settings import BUCKET, Settings
from ds_sparse.plan.step import Step, step_of

COMMITTED = Path(__file__).parents[1] / "results"

ATTENTION = ("attention-h200", "attention-growth-h200", "attention-break-even-h200", "attention-peers-h200")
BERT = ("bert-h200", "bert-long-h200", "bert-labelled-h200", "bert-dropout-h200")
SEQUENCE = ("sequence-h200",)
TRAINING = "training-h200"
"""Files of `COMMITTED` that hold the rates of an H200."""

MODEL = NAMED["bing_bert-base"]
"""The model of the training runs."""

CHECK_MS = 24.0
"""Milliseconds of a step of that model in which DeepSpeed looks for inf and NaN: two runs with and without in turns, of
4e10c01, took 99.4 and 75.5 ms, 106.8 and 82.8 ms, on a machine whose processor was slower than the training runs'."""

_GLOBAL = {"num_global_blocks": 1}
BLOCKS: Mapping[str, dict[str, Any] | None] = {
    "dense": None,
    "`bslongformer`, block 64, window 5": {
        "mode": "bslongformer",
        "block": 64,
        "num_sliding_window_blocks": 5,
        "global_block_indices": [0],
    },
    "`bigbird`, block 64, window 3, 1 random": {
        "mode": "bigbird",
        "block": 64,
        "num_random_blocks": 1,
        "num_sliding_window_blocks": 3,
        "seed": 42,
        **_GLOBAL,
    },
    "`fixed`, block 16": {"mode": "fixed", "block": 16, "num_local_blocks": 4, **_GLOBAL},
}
"""The `sparse_attention` block of each training run, by its name in the summary; None trains dense."""


@dataclass(frozen=True)
class TrainingStep:
    """The median step of a training run of examples/bing_bert."""

    name: str
    seq_len: int
    batch: int
    milliseconds: float
    peak_gib: float

    def settings(self) -> Settings:
        """Settings of configs/bert_base_8192.json."""
        return Settings(self.batch, zero_stage=1, bucket_bytes=2 * BUCKET)

    def predicted(self, rates: Rates) -> Step:
        return step_of(rates, MODEL, self.settings(), self.seq_len, [walk_of(self.name, self.seq_len)] * MODEL.layers)


@cache
def walk_of(name: str, seq_len: int) -> Walked:
    """Tiles of a training run's attention, of `BLOCKS`; None for dense."""
    block = BLOCKS[name]
    if block is None:
        return None
    structure = parse_sparse_attention(block, MODEL.heads)
    return Walk.of(structure.make_bool_layout(seq_len), structure.block)


def committed(folder: Path = COMMITTED) -> Results:
    """Results for an H200, with a source for the training runs."""
    found = from_files([folder / f"{name}.json" for name in (*ATTENTION, *BERT, *SEQUENCE)])
    about = json.loads((folder / f"{TRAINING}.json").read_text(encoding="utf-8"))
    found.sources.append(f"{TRAINING}: commit {about['commit']}, {about['date']}")
    return found


def training_steps(folder: Path = COMMITTED) -> list[TrainingStep]:
    """Steps of the committed training runs."""
    runs = json.loads((folder / f"{TRAINING}.json").read_text(encoding="utf-8"))["runs"]
    return [
        TrainingStep(
            run["name"],
            run["seq_len"],
            run["batch"],
            run["batch"] * run["seq_len"] / run["tokens_per_second"] * 1e3,
            run["peak_gib"],
        )
        for run in runs
    ]


def committed_rates(results: Results, steps: Sequence[TrainingStep]) -> Rates:
    """The rates of results, with what training steps take besides."""
    return with_training(rates_of(results), steps)


def with_training(rates: Rates, steps: Sequence[TrainingStep]) -> Rates:
    """The rates, with `training`: the mean of what is left of these steps beside what they compute."""
    bare = replace(rates, training=0.0)
    left = [step.milliseconds - step.predicted(bare).total for step in steps]
    found = replace(rates, training=max(0.0, sum(left) / len(left)), check=CHECK_MS)
    errors = [step.predicted(found).total / step.milliseconds - 1 for step in steps]
    return replace(found, errors=found.errors | {"training steps": in_short(errors)})


def written(rates: Rates) -> str:
    """The text of the file that has these rates, in as many digits as mean something."""
    return json.dumps(_rounded(asdict(rates)), indent=1) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(of_key) for key, of_key in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
