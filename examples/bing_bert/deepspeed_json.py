"""The DeepSpeed JSON of a run: read, adapted to the device, and checked before anything is built from it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException
from torch.utils.cpp_extension import CUDA_HOME

import ds_sparse
from ds_sparse.integrations.deepspeed_check import check_deepspeed_config
from ds_sparse.plan.settings import BATCHES
from ds_sparse.tools.ranks import world_size

from report import say

PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""The package that a key of a monitor needs."""

KERNELS = {
    "adam": ("FusedAdam", "CPUAdam"), "adamw": ("FusedAdam", "CPUAdam"), "lamb": ("FusedLamb", "FusedLamb"),
    "lion": ("FusedLion", "CPULion"), "adagrad": ("", "CPUAdagrad"),
}  # fmt: skip
"""Optimizers that DeepSpeed compiles, by their names in the JSON: on the device, and offloaded to the CPU."""


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
    if not mistakes:
        mistakes += _batch_of_other_ranks(config)
    if mistakes:
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
    if _object(config, "fp16").get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
        del adapted["fp16"]
        say("The JSON asks for fp16, which DeepSpeed does not support on this CPU: fp32 is used.")
    if device.type == "cuda" and not any(name in config for name in PRECISIONS):
        adapted["bf16"] = {"enabled": True}
        say('The JSON names no precision: bf16 is used on the GPU ("bf16": {"enabled": false} keeps fp32).')
    return adapted


def _adapted_optimizer(optimizer: dict[str, Any], device: torch.device) -> dict[str, Any]:
    kind, params = str(optimizer.get("type")), optimizer["params"]
    if not isinstance(params, dict):
        return optimizer
    if kind.lower() == "lamb" and (lacking := why_no_lamb(device)):
        kept = {name: params[name] for name in ("weight_decay", "betas", "eps") if name in params}
        where = "GPU" if device.type == "cuda" else "CPU"
        say(f"The JSON asks for Lamb, which DeepSpeed {lacking}: AdamW with lr 1e-3 is used on the {where}.")
        optimizer = {"type": "AdamW", "params": kept | {"lr": 1e-3} | ({"torch_adam": True} if where == "GPU" else {})}
        kind, params = "AdamW", optimizer["params"]
    if device.type == "cpu" and kind.lower() in ("adam", "adamw") and "torch_adam" not in params:
        optimizer = {**optimizer, "params": {**params, "torch_adam": True}}
        say(f"{kind} runs as PyTorch's own on the CPU (torch_adam), so that DeepSpeed does not compile one.")
    return optimizer


def why_no_lamb(device: torch.device) -> str:
    """Says what DeepSpeed's Lamb lacks; empty where it can be compiled."""
    if device.type == "cpu":
        return "has on GPUs only"
    return "" if CUDA_HOME and Path(CUDA_HOME, "bin", "nvcc").exists() else "compiles with nvcc, which is not here"


def _not_for_this_example(config: dict[str, Any]) -> Iterator[str]:
    """Sentences about keys that DeepSpeed takes and this example does not."""
    if '"auto"' in json.dumps(config, default=str):
        yield '"auto" is for Transformers\' Trainer or accelerate to fill in; give a value.'
    if not isinstance(_object(config, "optimizer").get("type", 0), str):
        yield "optimizer.type: missing, or no name; AdamW and Lamb are usual."
    if (size := config.get("sequence_parallel_size", 1)) != 1:
        yield (
            f"sequence_parallel_size is {size!r}; the layers of this example do not share sequences, so leave it out, "
            "or train a model of Transformers (docs/sequence-parallel.md)."
        )
    if (_object(config, "checkpoint").get("writer") or {}).get("decoupled") or config.get("datastates_ckpt"):
        yield (
            "checkpoint.writer.decoupled and datastates_ckpt write checkpoints while training goes on; here one is "
            "verified and put in force once it is written. Leave them out."
        )
    for key, package in MONITORS.items():
        if _object(config, key).get("enabled") and importlib.util.find_spec(package) is None:
            yield (
                f"{key}.enabled is true, and the package {package} is not installed; pip install {package}, or leave "
                f"{key} out."
            )


def _batch_of_other_ranks(config: dict[str, Any]) -> Iterator[str]:
    """A sentence where the batch cannot be dealt to these ranks."""
    micro_batch, _, accumulation = (config.get(key) for key in BATCHES)
    at_once = (micro_batch or 1) * (accumulation or 1) * world_size()
    batch = config.get("train_batch_size") or at_once
    if batch % at_once or (micro_batch and accumulation and batch != at_once):
        yield (
            f"train_batch_size is {batch}; it has to be a multiple of {at_once}: {world_size()} ranks x "
            f"train_micro_batch_size_per_gpu {micro_batch or 1} x gradient_accumulation_steps {accumulation or 1}, and "
            "equal to it where all are given."
        )


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    return config[key] if isinstance(config.get(key), dict) else {}


def load_kernels(config: dict[str, Any], source: str) -> None:
    """Loads the kernels of an optimizer of DeepSpeed's own, which compiles them when a machine uses them first.

    Raises:
        ValueError: they cannot be compiled.
    """
    optimizer = config["optimizer"]
    offload = _object(_object(config, "zero_optimization"), "offload_optimizer").get("device", "none") != "none"
    name = KERNELS.get(optimizer["type"].lower(), ("", ""))[offload]
    if not name or optimizer["params"].get("torch_adam"):
        return
    made = f"DeepSpeed{name}" if name.startswith("CPU") else name
    say(f"{made} is DeepSpeed's own; where it is used first, compiling it takes a minute or two.")
    try:
        deepspeed.get_accelerator().create_op_builder(f"{name}Builder").load(verbose=False)
    except (
        AssertionError, CUDAMismatchException, ImportError, MissingCUDAException, OSError, RuntimeError, ValueError,
    ) as error:  # fmt: skip
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0]).strip()
        raise ValueError(
            f"{source}: optimizer.type: DeepSpeed cannot compile its {made} here ({reason}); {_way_to_compile()}."
        ) from error


def _way_to_compile() -> str:
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    plain = re.sub(r"(?<=\d)[a-z]", "", architectures)
    if plain != architectures:
        return f"TORCH_CUDA_ARCH_LIST is {architectures}, of which DeepSpeed reads numbers alone: set it to {plain}"
    return (
        'take PyTorch\'s, "type": "AdamW" with "torch_adam": true, or install nvcc (CUDA toolkit) and ninja for a GPU'
    )
