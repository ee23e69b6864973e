"""The DeepSpeed JSON of a run: checked by the package, with an optimizer and a precision that the device has."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.cpp_extension import CUDA_HOME

import ds_sparse
from ds_sparse.integrations.deepspeed_check import check_deepspeed_config
from ds_sparse.integrations.deepspeed_sequence import BATCH
from ds_sparse.tools.ranks import world_size

from report import say

PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")


def read_deepspeed_config(
    args: argparse.Namespace, num_heads: int, num_layers: int, device: torch.device
) -> dict[str, Any]:
    """The DeepSpeed JSON with an optimizer and a precision that the device has; says a sentence for each change.

    To be called before ranks are connected, as DeepSpeed reads the JSON for one rank.

    Raises:
        ValueError: everything that is wrong with the `sparse_attention` block for this model and length, or with what
            DeepSpeed and this example read of the rest.
    """
    source = args.deepspeed_config
    config, block = ds_sparse.load_config(source)
    if block is not None:
        _check_block(block, num_heads, num_layers, args)
    config = adapt_to_device(config, device)
    mistakes = [*_not_for_this_example(config), *check_deepspeed_config(config).mistakes]
    if mistakes := mistakes or _batch_of_other_ranks(config):
        raise ValueError("\n".join(f"{source}: {mistake}" for mistake in mistakes))
    return config if block is None else {**config, "sparse_attention": block}


def _check_block(block: dict[str, Any], num_heads: int, num_layers: int, args: argparse.Namespace) -> None:
    """Parses the block for the length, which is padded to whole blocks of every layer."""
    notices: list[str] = []
    parse, source = ds_sparse.parse_sparse_attention_layers, args.deepspeed_config
    structures = parse(block, num_heads, num_layers, source=source, notices=notices)
    size = math.lcm(*(structure.block for structure in structures if structure is not None))
    parse(block, num_heads, num_layers, source=source, seq_len=math.ceil(args.max_seq_length / size) * size)
    if not args.deepspeed_sparse_attention:  # with the flag, who makes the structure says them
        for notice in notices:
            say(notice)


def adapt_to_device(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The JSON with an optimizer and a precision that the device has. Shapes that are wrong are left to the checks."""
    adapted, optimizer = dict(config), config.get("optimizer")
    if optimizer is None:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}}
        say("The JSON has no optimizer: AdamW with lr 1e-3 and weight_decay 0.01 is used.")
    if isinstance(optimizer, dict):
        adapted["optimizer"] = _adapted_optimizer({"params": {}, **optimizer}, device)
    fp16 = config.get("fp16")
    if isinstance(fp16, dict) and fp16.get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
        del adapted["fp16"]
        say("The JSON asks for fp16, which DeepSpeed does not support on this CPU: fp32 is used.")
    if device.type == "cuda" and not any(name in config for name in PRECISIONS):
        adapted["bf16"] = {"enabled": True}
        say('The JSON names no precision: bf16 is used on the GPU ("bf16": {"enabled": false} keeps fp32).')
    return adapted


def _adapted_optimizer(optimizer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    kind, params, on_cpu = str(optimizer.get("type")), optimizer["params"], device.type == "cpu"
    if not isinstance(params, dict):
        return optimizer
    if kind.lower() == "lamb" and (on_cpu or not (CUDA_HOME and Path(CUDA_HOME, "bin", "nvcc").exists())):
        lacking, where = ("has on GPUs only", "CPU") if on_cpu else ("compiles with nvcc, which is not here", "GPU")
        say(f"The JSON asks for Lamb, which DeepSpeed {lacking}: AdamW with lr 1e-3 is used on the {where}.")
        kept = {name: params[name] for name in ("weight_decay", "betas", "eps") if name in params}
        return {"type": "AdamW", "params": kept | {"lr": 1e-3, "torch_adam": True}}
    if on_cpu and kind.lower() in ("adam", "adamw") and "torch_adam" not in params:
        say(f"{kind} runs as PyTorch's own on the CPU (torch_adam), so that DeepSpeed does not compile one.")
        return {**optimizer, "params": {**params, "torch_adam": True}}
    return optimizer


def _not_for_this_example(config: dict[str, Any]) -> list[str]:
    """Sentences about keys that DeepSpeed takes and this example does not."""
    mistakes = []
    if '"auto"' in json.dumps(config, default=str):
        mistakes.append('"auto" is for Transformers\' Trainer or accelerate to fill in; give a value.')
    if isinstance(optimizer := config["optimizer"], dict) and not isinstance(optimizer.get("type"), str):
        mistakes.append("optimizer.type: missing, or no name; AdamW and Lamb are usual.")
    if (size := config.get("sequence_parallel_size", 1)) != 1:
        mistakes.append(
            f"sequence_parallel_size is {size!r}; the layers of this example do not share sequences, so leave it out, "
            "or train a model of Transformers (docs/sequence-parallel.md)."
        )
    return mistakes


def _batch_of_other_ranks(config: dict[str, Any]) -> list[str]:
    """A sentence where the batch cannot be dealt to these ranks; DeepSpeed's classes were asked for one."""
    _, micro_batch, accumulation = (config.get(key) for key in BATCH)
    at_once = (micro_batch or 1) * (accumulation or 1) * world_size()
    batch = config.get("train_batch_size") or at_once
    if batch % at_once == 0 and (batch == at_once or not (micro_batch and accumulation)):
        return []
    return [
        f"train_batch_size is {batch}; it has to be a multiple of {at_once}: {world_size()} ranks x "
        f"train_micro_batch_size_per_gpu {micro_batch or 1} x gradient_accumulation_steps {accumulation or 1}, and "
        "equal to it where all are given."
    ]
