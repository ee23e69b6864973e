"""The memory that a step needs on a GPU, by what it is for, and the longest sequences that fit."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.machine import GIB
from .communication import of_rank
from .model import Model
from .operations import FP32, ITEM, embeddings, exchange, kept_by_attention, layer, logits_at_the_highest
from .settings import Settings

LEFT_FREE = 0.05
"""Part of the memory that is not counted on: CUDA's context, libraries, what the allocator cannot use."""

MOST_TOKENS = 2**24
"""Beyond this no length is looked for."""


@dataclass(frozen=True)
class Memory:
    """Bytes when most are in use: while the loss is computed, or while the optimizer steps.

    Attributes:
        optimizer: weights in fp32 and the states of the optimizer.
        attention: query, key, value, output and lse of all layers.
        activations: all else that waits for the backward pass.
        buckets: in which ZeRO collects gradients.
        at: the moment, in words.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    attention: float
    logits: float
    buckets: float
    at: str

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The bytes of each part, by name."""
        return {name: value for name, value in vars(self).items() if name != "at"}


def memory_of(model: Model, settings: Settings, seq_len: int) -> Memory:
    """The memory of a step on one GPU. seq_len: tokens of a sequence, whole blocks."""
    tokens = settings.tokens(seq_len)
    wide = 2 if settings.dtype == "fp32" else 1
    parameters = model.parameters(seq_len)
    stage, gpus = settings.zero_stage, settings.gpus
    weights = wide * ITEM * parameters / (gpus if stage == 3 else 1)
    gradients = wide * ITEM * parameters / (gpus if stage >= 2 else 1)
    states = 0.0
    if not settings.offloads:
        states = FP32 * (settings.states + (wide == 1)) * parameters / (gpus if stage else 1)
    activations, attention = (wide * tokens * part for part in _waiting(model, settings))
    logits = wide * tokens * model.labelled * logits_at_the_highest(model)
    if settings.checkpoints:  # one layer is made again when the logits are gone
        logits = max(logits, wide * tokens * sum(_of_layer(model, settings)))
    held = gradients if settings.accumulation > 1 else 0.0
    bucket = float(settings.bucket_bytes)
    at_loss = Memory(weights, held, states, activations, attention, logits, bucket, "while the loss is computed")
    fp32_gradients = 0.0 if settings.offloads or wide > 1 else FP32 * parameters / (gpus if stage else 1)
    stepping = Memory(weights, gradients + fp32_gradients, states, 0.0, 0.0, 0.0, bucket, "while the optimizer steps")
    return max(at_loss, stepping, key=lambda memory: memory.total)


def _waiting(model: Model, settings: Settings) -> tuple[float, float]:
    """Bytes of a token that wait for the backward pass: of all but attention, and of attention."""
    around = embeddings(model).saved
    if settings.checkpoints:
        return around + model.layers * ITEM * model.hidden, 0.0
    others, attention = _of_layer(model, settings)
    return around + model.layers * others, model.layers * attention


def _of_layer(model: Model, settings: Settings) -> tuple[float, float]:
    """Bytes of a token that one layer keeps: of all but attention, and of attention."""
    attention = kept_by_attention(model)
    others = layer(model).saved - attention
    if settings.ranks > 1:  # needs the same, measured, whether ranks exchange heads or keys
        others += exchange(model).saved
    if settings.ranks <= model.heads:
        attention = settings.ranks * kept_by_attention(of_rank(model, settings))
    return others, attention


def fits(model: Model, settings: Settings, seq_len: int, memory_gib: float) -> bool:
    """True where a step fits a GPU of so much memory."""
    return memory_of(model, settings, seq_len).total <= memory_gib * GIB * (1 - LEFT_FREE)


def longest(model: Model, settings: Settings, block: int, memory_gib: float) -> int:
    """The most tokens of a sequence, whole blocks, whose step fits: 0 where none does, `MOST_TOKENS` where more do."""
    low, high = 0, MOST_TOKENS // block
    while low < high:
        middle = (low + high + 1) // 2
        if fits(model, settings, middle * block, memory_gib):
            low = middle
        else:
            high = middle - 1
    return low * block
