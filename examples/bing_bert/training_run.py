"""One training run, sparse or dense: what it is made from, where it is, and what came out."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ds_sparse.integrations.deepspeed_sequence import BATCH
from ds_sparse.plan.model import Model, model_of_config
from ds_sparse.plan.settings import Settings, read_settings
from ds_sparse.plan.utilisation import StepWork
from ds_sparse.tools.ranks import world_size

from data import PretrainingData
from device import device_name
from modeling import BertConfig

SPARSE, DENSE = "sparse", "dense"


@dataclass(frozen=True)
class TrainingRun:
    """Attributes:
    name: SPARSE or DENSE.
    config: the DeepSpeed JSON, adapted to the device.
    model_config: with the vocabulary of the data.
    folder: of this run alone.
    """

    name: str
    args: argparse.Namespace
    config: dict[str, Any]
    model_config: BertConfig
    data: PretrainingData
    folder: Path

    @property
    def block(self) -> dict[str, Any] | None:
        """The `sparse_attention` block that it trains with."""
        return self.config.get("sparse_attention") if self.name == SPARSE else None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def settings(self) -> Settings:
        """The settings of a step on this number of ranks, by the JSON."""
        source, saves_memory = self.args.deepspeed_config, self.args.checkpoint_activations
        return read_settings(self.config, source, gpus=world_size(), checkpoints=saves_memory)

    def model(self) -> Model:
        """The model as plan counts it."""
        model = model_of_config(self.args.config_file, "bing_bert", self.model_config.model_dump())
        return replace(model, predicted=self.data.max_predictions_per_seq / self.args.max_seq_length)

    def work(self) -> StepWork:
        """The work of a step."""
        source, tokens = self.args.deepspeed_config, self.args.max_seq_length
        return StepWork.of(self.block, source, self.model(), self.settings(), tokens, device_name())

    def terms(self) -> dict[str, Any]:
        """Plain values that have to be equal for a run to continue. How the batch is dealt to ranks may differ."""
        manifest = self.data.manifest()
        return {
            "sparse": self.name == SPARSE,
            "deepspeed_config": {key: value for key, value in self.config.items() if key not in BATCH},
            "train_batch_size": self.settings().sequences,
            "model": self.model_config.model_dump(),
            "data": manifest["cache_entry"],
            "eval_sequences": manifest["eval_sequences"],
            "max_seq_length": self.args.max_seq_length,
            "max_predictions_per_seq": self.data.max_predictions_per_seq,
            "warmup_steps": self.args.warmup_steps,
            "seed": self.args.seed,
        }

    def terms_of_weights(self) -> dict[str, Any]:
        """Those of `terms` that a run has to have whose weights this one takes."""
        terms = self.terms()
        return {name: terms[name] for name in ("model", "data")}


@dataclass
class Position:
    """Where a run is; kept with its checkpoints."""

    step: int
    held_out_loss: float = math.nan
    held_out_step: int = -1
    """The step that `held_out_loss` was computed after."""
    filled_in: list[list[str]] = field(default_factory=list)
    """Words that the model of that step fills into the masked lines."""
    skipped_steps: int = 0
    """Steps whose gradients overflowed: the weights stayed as they were, and in fp16 the loss scale was lowered."""
    evaluation_seconds: float = 0.0
    layout_seed: int | None = None
    """The seed of the random blocks of its layout; None: it has none, or the JSON has it."""
    finished: bool = False
    """It reached its end, by steps or by time, and was not stopped before."""
    max_steps: int | None = None
    """The --max-steps that it was started with last."""

    def is_end(self, run: TrainingRun, max_steps: int | None) -> bool:
        """Says whether a resumed run has nothing left to do.

        In a comparison, the sparse run's end by time stays its end unless --max-steps asks for more: one that was
        stopped while dense trained continues there.
        """
        if self.held_out_step != self.step:
            return False
        if max_steps is not None and self.step >= max_steps:
            return True
        asks_for_more = run.args.max_steps not in (None, self.max_steps)
        return run.args.compare_dense and run.name == SPARSE and self.finished and not asks_for_more


class Outcome(NamedTuple):
    """The result of a run."""

    run: TrainingRun
    position: Position
    records: list[dict[str, Any]]
    """Records of metrics.jsonl; on rank 0 only."""
    signal: int = 0
    """The signal that stopped it, or 0."""
