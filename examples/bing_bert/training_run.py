"""A run of the example, sparse or dense: what it is given, and what `ds_sparse plan` counts of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_sparse.plan.model import Model, model_of_config
from ds_sparse.plan.settings import BATCHES, Settings, read_settings
from ds_sparse.plan.utilisation import StepWork
from ds_sparse.ranks import world_size

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
    def is_sparse(self) -> bool:
        return self.name == SPARSE

    @property
    def block(self) -> dict[str, Any] | None:
        """The `sparse_attention` block that it trains with."""
        return self.config.get("sparse_attention") if self.is_sparse else None

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def settings(self) -> Settings:
        """What the JSON says of a step on this number of ranks."""
        source, checkpoints = self.args.deepspeed_config, self.args.checkpoint_activations
        return read_settings(self.config, source, gpus=world_size(), checkpoints=checkpoints)

    def model(self) -> Model:
        """The model as plan counts it."""
        model = model_of_config(self.args.config_file, "bing_bert", self.model_config.model_dump())
        return replace(model, predicted=self.data.max_predictions_per_seq / self.args.max_seq_length)

    def work(self) -> StepWork:
        """What a step computes."""
        source, tokens = self.args.deepspeed_config, self.args.max_seq_length
        return StepWork.of(self.block, source, self.model(), self.settings(), tokens, device_name())

    def terms(self) -> dict[str, Any]:
        """What has to be equal for a run to continue; plain JSON values. How the batch is dealt to ranks may differ."""
        manifest = self.data.manifest()
        return {
            "sparse": self.is_sparse,
            "deepspeed_config": {key: value for key, value in self.config.items() if key not in BATCHES},
            "train_batch_size": self.settings().sequences,
            "model": self.model_config.model_dump(),
            "data": manifest["cache_entry"],
            "eval_sequences": manifest["eval_sequences"],
            "max_seq_length": self.args.max_seq_length,
            "max_predictions_per_seq": self.data.max_predictions_per_seq,
            "warmup_steps": self.args.warmup_steps,
            "seed": self.args.seed,
        }


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        records: those of metrics.jsonl.
        layout_seed: of the random blocks of its layout; None: it has none, or the JSON has it.
    """

    run: TrainingRun
    step: int
    held_out_loss: float
    layout_seed: int | None
    records: list[dict[str, Any]]
