"""Settings of a step in a DeepSpeed JSON: batch, ranks, dtype, ZeRO, optimizer, checkpoints of activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..integrations.deepspeed_sequence import BATCH, sequence_parallel_size
from ..integrations.deepspeed_sequence import KEY as RANKS
from ..tools.wording import show

TRAIN, MICRO, STEPS = BATCH
ZERO, BUCKET, CHECKPOINTS = "zero_optimization", 500_000_000, "activation_checkpointing"

STATES = {"sgd": 0, "adagrad": 1, "lion": 1, "muon": 1}
"""Numbers of fp32 a parameter that optimizers keep beside the weights; all others are counted as Adam's two."""

ADAMS = ("adam", "adamw", "fusedadam", "lamb", "fusedlamb", "onebitadam", "onebitlamb", "zerooneadam")


@dataclass(frozen=True)
class Settings:
    """Attributes:
    micro_batch: sequences of a forward pass on one GPU, or on the ranks that share them.
    accumulation: forward passes before the optimizer steps.
    gpus: all, a rank each.
    dtype: "bf16", "fp16" or "fp32".
    zero_stage: 0 to 3.
    states: numbers of fp32 a parameter, beside the weights in fp32.
    offloads: optimizer states are on the CPU.
    bucket_bytes: of the buffers in which ZeRO collects gradients.
    checkpoints: activations are made again in the backward pass, layer by layer.
    ranks: that share a sequence.
    checks: ZeRO 1 or 2 looks for inf and NaN in each gradient.
    keys: batch sizes that are numbers, in the JSON or by an option, and checkpoints if the JSON has them.
    """

    micro_batch: int
    accumulation: int = 1
    gpus: int = 1
    dtype: str = "bf16"
    zero_stage: int = 0
    optimizer: str = "AdamW"
    states: int = 2
    offloads: bool = False
    bucket_bytes: int = 0
    checkpoints: bool = False
    ranks: int = 1
    checks: bool = False
    keys: tuple[str, ...] = field(default=(), compare=False)

    def tokens(self, seq_len: int) -> int:
        """Tokens of a rank in a forward pass."""
        return self.micro_batch * -(-seq_len // self.ranks)

    @property
    def sequences(self) -> int:
        """Sequences of a step, on all GPUs."""
        return self.micro_batch * self.accumulation * (self.gpus // self.ranks)


def read_settings(
    config: Mapping[str, Any],
    source: str,
    micro_batch: int | None = None,
    gpus: int | None = None,
    dtype: str | None = None,
    checkpoints: bool | None = None,
) -> Settings:
    """The settings of a configuration without its `sparse_attention` block; what is given counts for what it says.

    Args:
        gpus: as many as share a sequence, if not given.

    Raises:
        ValueError: no batch size; sizes that do not fit together; a value of another type.
    """
    ranks = sequence_parallel_size(config, source)
    gpus = gpus or ranks
    if gpus % ranks:
        raise ValueError(f"{source}: {RANKS} is {ranks}, and --gpus {gpus} is no multiple of it; give one that is.")
    micro, accumulation = _batches(config, source, micro_batch, gpus, ranks)
    zero = _object(config, ZERO, source)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"{source}: {ZERO}.stage: got {show(stage)}; wanted 0, 1, 2 or 3.")
    optimizer = _object(config, "optimizer", source).get("type", "AdamW")
    if not isinstance(optimizer, str):
        raise ValueError(f"{source}: optimizer.type: got {show(optimizer)}; wanted a name.")
    offload = zero.get("offload_optimizer") or {}
    bucket = 0
    if stage in (1, 2) and zero.get("contiguous_gradients", True):
        elements = zero.get("reduce_bucket_size", BUCKET)
        if not isinstance(elements, int | float):
            raise ValueError(f'{source}: {ZERO}.reduce_bucket_size: got {show(elements)}; give a number, not "auto".')
        bucket = int(elements) * 2 * (2 if zero.get("overlap_comm") else 1)
    is_there = {
        MICRO: micro_batch is not None or type(config.get(MICRO)) is int,
        TRAIN: type(config.get(TRAIN)) is int,
        CHECKPOINTS: CHECKPOINTS in config,
    }
    dtype = dtype or _dtype(config, source)
    asked = all(_object(config, key, source).get("check_grad_overflow", True) for key in ("bf16", "bfloat16"))
    return Settings(
        micro_batch=micro,
        accumulation=accumulation,
        gpus=gpus,
        dtype=dtype,
        zero_stage=stage,
        optimizer=optimizer,
        states=STATES.get(optimizer.lower(), 2),
        offloads=isinstance(offload, Mapping) and offload.get("device", "none") != "none",
        bucket_bytes=bucket,
        checkpoints=CHECKPOINTS in config if checkpoints is None else checkpoints,
        ranks=ranks,
        checks=checks_gradients(stage, dtype, asked),
        keys=tuple(key for key, there in is_there.items() if there),
    )


def _batches(config: Mapping[str, Any], source: str, micro: int | None, gpus: int, ranks: int) -> tuple[int, int]:
    """Sequences of a forward pass, and forward passes a step, by DeepSpeed's rule: a batch counts sequences."""
    groups = gpus // ranks
    found = {key: None if config.get(key) == "auto" else config.get(key) for key in (MICRO, TRAIN, STEPS)}
    for key, value in found.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{source}: {key}: got {show(value)}; wanted an integer of at least 1.")
    of_micro, train, steps = micro or found[MICRO], found[TRAIN], found[STEPS]
    if of_micro is None:
        if train is None:
            raise ValueError(f"{source}: neither {MICRO} nor {TRAIN} gives a number; add one, or pass --micro-batch.")
        of_micro, rest = divmod(train, groups * (steps or 1))
        if rest or not of_micro:
            side_by_side = f"{gpus} GPUs" if ranks == 1 else f"{groups} groups of {ranks} GPUs"
            raise ValueError(
                f"{source}: {TRAIN} {train} is no multiple of {side_by_side} x {steps or 1} {STEPS}; "
                "pass --gpus or --micro-batch."
            )
    if steps is None:
        steps = max(1, train // (of_micro * groups)) if train else 1
    return of_micro, steps


def checks_gradients(stage: int, dtype: str, asked: bool = True) -> bool:
    """Whether ZeRO 1 or 2 looks at each gradient, which in bf16 is an option; what other stages do is not measured."""
    return stage in (1, 2) and (dtype == "fp16" or (dtype == "bf16" and asked))


def _dtype(config: Mapping[str, Any], source: str) -> str:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
    on = [names[key] for key in names if _object(config, key, source).get("enabled") is True]
    return on[0] if on else "fp32"


def _object(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {key}: got {show(value)}; wanted an object {{...}}.")
    return value
