"""The training runs that are committed: predicted, and what a step takes beyond what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from ..config import parse_sparse_attention
from .memory import Memory, memory_of
from .model import NAMED
from .rates import Rates, Walked, rates_of
from .results import Results, TrainingStep
from .sequence_steps import with_communication
from .settings import BUCKET, Settings
from .step import Step, step_of
from .walk import Walk

MODEL = NAMED["bing_bert-base"]

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
"""The `sparse_attention` block of each run, by its name in the summary; None trains dense."""


@cache
def walk_of_run(name: str, seq_len: int) -> Walked:
    """What each layer of a run attends to."""
    block = BLOCKS[name]
    if block is None:
        return None
    structure = parse_sparse_attention(block, MODEL.heads)
    return Walk.of(structure.make_bool_layout(seq_len), structure.block)


def settings_of(run: TrainingStep) -> Settings:
    """Those of configs/bert_base_8192.json."""
    return Settings(run.batch, zero_stage=1, bucket_bytes=2 * BUCKET)


def predicted(rates: Rates, run: TrainingStep) -> Step:
    walks = [walk_of_run(run.name, run.seq_len)] * MODEL.layers
    return step_of(rates, MODEL, settings_of(run), run.seq_len, walks)


def predicted_memory(run: TrainingStep) -> Memory:
    return memory_of(MODEL, settings_of(run), run.seq_len)


def complete_rates(results: Results) -> Rates:
    """The rates of results, with what training steps take besides, the mean of what is left of them, and with what
    ranks take to send."""
    return with_communication(with_training(rates_of(results), results), results)


def with_training(rates: Rates, results: Results) -> Rates:
    """The rates, with `training` from these results."""
    if not results.training:
        return replace(rates, training=None)
    bare = replace(rates, training=0.0)
    left = [run.milliseconds - predicted(bare, run).total for run in results.training]
    found = replace(rates, training=max(0.0, sum(left) / len(left)))
    errors = [predicted(found, run).total / run.milliseconds - 1 for run in results.training]
    return replace(found, errors=found.errors | {"training steps": errors})
