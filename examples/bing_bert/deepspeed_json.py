"""The DeepSpeed JSON of a run: read, adapted to the device, and checked before anything is built from it."""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib.util
import inspect
import math
import os
import re
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from torch.utils.cpp_extension import CUDA_HOME

import ds_sparse
from ds_sparse.ranks import world_size

from report import mistakes, say

PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
KERNELS = {
    FusedAdam: "FusedAdamBuilder", DeepSpeedCPUAdam: "CPUAdamBuilder", FusedLamb: "FusedLambBuilder",
    FusedLion: "FusedLionBuilder", DeepSpeedCPULion: "CPULionBuilder", DeepSpeedCPUAdagrad: "CPUAdagradBuilder",
}  # fmt: skip
COMPILATION_ERRORS = (
    AssertionError, CUDAMismatchException, ImportError, MissingCUDAException, OSError, RuntimeError, ValueError,
)  # fmt: skip
ADAMS_OWN = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Parameters of Adam in the JSON that decide which class DeepSpeed makes."""


class Component(BaseModel):
    """An optimizer or a scheduler of the DeepSpeed JSON."""

    model_config = ConfigDict(strict=True)

    type: str
    params: dict[str, Any] = {}


class Shapes(BaseModel):
    """The shapes of a DeepSpeed JSON that DeepSpeed takes for granted."""

    model_config = ConfigDict(strict=True)

    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: float = Field(0.0, ge=0)
    optimizer: Component | None = None
    scheduler: Component | None = None
    fp16: dict[str, Any] = {}
    bf16: dict[str, Any] = {}
    activation_checkpointing: dict[str, Any] = {}


def read_deepspeed_config(args: argparse.Namespace, num_heads: int, num_layers: int) -> dict[str, Any]:
    """The DeepSpeed JSON, its `sparse_attention` block checked for this model and length; prints what deserves a line.

    Raises:
        ValueError: everything that is wrong with the block, or with what this script reads of the rest.
    """
    config, block = ds_sparse.load_config(args.deepspeed_config)
    if block is not None:
        layers = block.get("layers")
        entries = [entry for entry in layers.values() if isinstance(entry, dict)] if isinstance(layers, dict) else []
        sizes = [size for part in (block, *entries) if isinstance(size := part.get("block", 16), int) and size > 0]
        size = math.lcm(*sizes) if all(size <= 128 for size in sizes) else 1
        notices: list[str] = []
        ds_sparse.parse_sparse_attention_layers(
            block,
            num_heads,
            num_layers,
            source=args.deepspeed_config,
            seq_len=math.ceil(args.max_seq_length / size) * size if sizes else None,
            notices=notices,
        )
        if not args.deepspeed_sparse_attention:  # with the flag, who makes the structure says them
            for notice in notices:
                say(notice)
    try:
        Shapes.model_validate(config)
    except ValidationError as error:
        raise ValueError(f"{args.deepspeed_config}: {mistakes(error)}.") from error
    return config if block is None else {**config, "sparse_attention": block}


def why_no_lamb(device: torch.device) -> str:
    """What DeepSpeed's Lamb lacks; empty where it can be compiled."""
    if device.type == "cpu":
        return "has on GPUs only"
    return "" if CUDA_HOME and Path(CUDA_HOME, "bin", "nvcc").exists() else "compiles with nvcc, which is not here"


def adapt_to_device(config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The JSON with an optimizer and a precision that the device has; says a sentence for each change."""
    default = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}}
    optimizer = config.get("optimizer") or default
    if optimizer is default:
        say("The JSON has no optimizer: AdamW with lr 1e-3 and weight_decay 0.01 is used.")
    kind, params = optimizer["type"], dict(optimizer.get("params", {}))
    if kind.lower() == "lamb" and (lacking := why_no_lamb(device)):
        params = {name: params[name] for name in ("weight_decay", "betas", "eps") if name in params} | {"lr": 1e-3}
        kind = "AdamW"
        if device.type == "cuda":
            params["torch_adam"] = True
        where = "GPU" if device.type == "cuda" else "CPU"
        say(f"The JSON asks for Lamb, which DeepSpeed {lacking}: AdamW with lr 1e-3 is used on the {where}.")
    if device.type == "cpu" and kind.lower() in ("adam", "adamw") and "torch_adam" not in params:
        params["torch_adam"] = True
        say(f"{kind} runs as PyTorch's own on the CPU (torch_adam), so that DeepSpeed does not compile one.")
    adapted = {**config, "optimizer": {"type": kind, "params": params}}
    if config.get("fp16", {}).get("enabled") and not deepspeed.get_accelerator().is_fp16_supported():
        del adapted["fp16"]
        say("The JSON asks for fp16, which DeepSpeed does not support on this CPU: fp32 is used.")
    if device.type == "cuda" and not any(name in config for name in PRECISIONS):
        adapted["bf16"] = {"enabled": True}
        say('The JSON names no precision: bf16 is used on the GPU ("bf16": {"enabled": false} keeps fp32).')
    return adapted


def check_for_deepspeed(config: dict[str, Any], source: str) -> type | None:
    """Lets DeepSpeed read the JSON once, for this number of ranks, so that what it refuses ends in a sentence.

    What only its optimizer and its scheduler would refuse, when they are made, is checked too.

    Returns:
        The class of the optimizer; None for those whose parameters DeepSpeed sorts out itself.

    Raises:
        ValueError: DeepSpeed refuses the JSON.
    """
    if config.get("sequence_parallel_size", 1) != 1:
        raise ValueError(
            f"{source}: sequence_parallel_size is {config['sequence_parallel_size']!r}; the layers of this example do "
            "not share sequences, so leave it out, or train a model of Transformers (docs/sequence-parallel.md)."
        )
    kind, ranks = config["optimizer"]["type"], world_size()
    if kind.lower() not in DEEPSPEED_OPTIMIZERS and not isinstance(getattr(torch.optim, kind, None), type):
        raise ValueError(
            f"{source}: optimizer.type: DeepSpeed and torch.optim have no {kind}; AdamW and Lamb are usual."
        )
    micro_batch = config.get("train_micro_batch_size_per_gpu") or 1
    accumulation = config.get("gradient_accumulation_steps") or 1
    at_once = micro_batch * accumulation * ranks
    if (config.get("train_batch_size") or at_once) % at_once:
        raise ValueError(
            f"{source}: train_batch_size is {config['train_batch_size']}; it has to be a multiple of {at_once}: "
            f"{ranks} ranks x train_micro_batch_size_per_gpu {micro_batch} x gradient_accumulation_steps "
            f"{accumulation}."
        )
    without_block = {key: copy.deepcopy(value) for key, value in config.items() if key != "sparse_attention"}
    try:
        read = DeepSpeedConfig(without_block)
    except ValidationError as error:
        raise ValueError(f"{source}: DeepSpeed refuses it: {mistakes(error)}, in {error.title}.") from error
    except (DeepSpeedConfigError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        # DeepSpeed asserts relations between keys, and trips over a value of another shape than it expects.
        raise ValueError(f"{source}: DeepSpeed refuses it: {type(error).__name__}: {error}") from error
    if (read.checkpoint_config["writer"] or {}).get("decoupled") or read.datastates_config.enabled:
        raise ValueError(
            f"{source}: checkpoint.writer.decoupled and datastates_ckpt write checkpoints while training goes on; here "
            "one is verified and put in force once it is written. Leave them out."
        )
    _check_monitors(read, source)
    if config.get("scheduler"):
        _check_scheduler(config["scheduler"], source)
    offload = read.zero_config.offload_optimizer
    made = _optimizer_class(config["optimizer"], offloaded=offload is not None and offload.device != "none")
    if made is None:
        return None
    _check_optimizer(config["optimizer"], made, source)
    if read.zero_enabled and made not in ZERO_SUPPORTED_OPTIMIZERS and not read.zero_allow_untested_optimizer:
        stage = int(read.zero_optimization_stage)
        raise ValueError(
            f"{source}: zero_optimization.stage is {stage}, and DeepSpeed has ZeRO for Adam, AdamW, Adagrad and Lion, "
            f'not for {kind}; take one of these, or stage 0, or add "zero_allow_untested_optimizer": true.'
        )
    return made


def load_kernels(optimizer: type | None, source: str) -> None:
    """Loads the kernels of an optimizer of DeepSpeed's own, which compiles them when a machine uses them first.

    Raises:
        ValueError: they cannot be compiled.
    """
    builder = KERNELS.get(optimizer)
    if builder is None:
        return
    say(f"{optimizer.__name__} is DeepSpeed's own; where it is used first, compiling it takes a minute or two.")
    try:
        deepspeed.get_accelerator().create_op_builder(builder).load(verbose=False)
    except COMPILATION_ERRORS as error:
        lines = str(error).splitlines() or [type(error).__name__]
        reason = next((line for line in lines if "error:" in line), lines[0]).strip()
        raise ValueError(
            f"{source}: optimizer.type: DeepSpeed cannot compile its {optimizer.__name__} here ({reason}); "
            f"{_way_to_compile()}."
        ) from error


def _way_to_compile() -> str:
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    plain = re.sub(r"(?<=\d)[a-z]", "", architectures)
    if plain != architectures:
        return f"TORCH_CUDA_ARCH_LIST is {architectures}, of which DeepSpeed reads numbers alone: set it to {plain}"
    return (
        'take PyTorch\'s, "type": "AdamW" with "torch_adam": true, or install nvcc (CUDA toolkit) and ninja for a GPU'
    )


def _check_monitors(read: DeepSpeedConfig, source: str) -> None:
    """Raises ValueError where the package of a monitor that the JSON asks for is not installed."""
    monitors = read.monitor_config
    for key, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        if getattr(monitors, key).enabled and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{source}: {key}.enabled is true, and the package {package} is not installed; pip install {package}, "
                f"or leave {key} out."
            )


def _optimizer_class(optimizer: dict[str, Any], offloaded: bool) -> type | None:
    kind, name = optimizer["type"], optimizer["type"].lower()
    if name in ("adam", "adamw"):
        if optimizer["params"].get("torch_adam"):
            return torch.optim.AdamW
        return DeepSpeedCPUAdam if offloaded else FusedAdam
    if name == "lamb":
        return FusedLamb
    if name == "lion":
        return DeepSpeedCPULion if offloaded else FusedLion
    if name == "adagrad":
        return DeepSpeedCPUAdagrad if offloaded else torch.optim.Adagrad
    return None if name in DEEPSPEED_OPTIMIZERS else getattr(torch.optim, kind)


def _check_optimizer(optimizer: dict[str, Any], made: type, source: str) -> None:
    params = optimizer["params"]
    own = ADAMS_OWN if optimizer["type"].lower() in ("adam", "adamw") else set()
    _check_params("optimizer", params, made, own, source)
    if made.__module__.startswith("torch."):
        try:
            made([torch.zeros(1, requires_grad=True)], **{key: params[key] for key in params if key not in own})
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{source}: optimizer.params: {made.__name__} refuses them: {error}.") from error


def _check_scheduler(scheduler: dict[str, Any], source: str) -> None:
    kind = scheduler["type"]
    made = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
    if not isinstance(made, type):
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise ValueError(
            f"{source}: scheduler.type: DeepSpeed and torch.optim.lr_scheduler have no {kind}; DeepSpeed has {known}."
        )
    _check_params("scheduler", scheduler.get("params", {}), made, set(), source)


def _check_params(key: str, given: dict[str, Any], made: type, own: set[str], source: str) -> None:
    """Raises ValueError for params that `made` does not take, or lacks; `own` are those that DeepSpeed takes itself."""
    what = f"{made.__module__.split('.')[0]}'s {made.__name__}"
    _, *parameters = inspect.signature(made).parameters.values()  # the first is what it works on
    known = own | {parameter.name for parameter in parameters}
    sentences = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"It has {', '.join(sorted(known))}."
            sentences.append(f"{source}: {key}.params.{name}: {what} has no such parameter. {hint}")
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    sentences += [f"{source}: {key}.params.{name} is missing; {what} needs it." for name in needed if name not in given]
    if sentences:
        raise ValueError("\n".join(sentences))
