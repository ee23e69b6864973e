"""A run as `ds_sparse plan` counts it: its model, its settings, and the FLOPs of a step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ds_sparse.plan.model import Model, model_of_config
from ds_sparse.plan.settings import Settings, read_settings
from ds_sparse.plan.utilisation import StepWork
from ds_sparse.ranks import world_size

from device import device_name
from modeling import BertConfig


def planned_model(config: BertConfig, args: argparse.Namespace, predictions: int) -> Model:
    """The model with its vocabulary of the data; `predictions` are the tokens to predict of a sequence."""
    model = model_of_config(args.config_file, "bing_bert", config.model_dump())
    return replace(model, predicted=predictions / args.max_seq_length)


def planned_settings(deepspeed_config: dict[str, Any], args: argparse.Namespace) -> Settings:
    return read_settings(
        deepspeed_config, args.deepspeed_config, gpus=world_size(), checkpoints=args.checkpoint_activations
    )


def step_work(model: Model, deepspeed_config: dict[str, Any], args: argparse.Namespace, sparse: bool) -> StepWork:
    """What a step of the sparse or the dense run computes."""
    block = deepspeed_config.get("sparse_attention") if sparse else None
    settings = planned_settings(deepspeed_config, args)
    return StepWork.of(block, args.deepspeed_config, model, settings, args.max_seq_length, device_name())
