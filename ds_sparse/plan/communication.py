"""Bytes that ranks send each other in a step: heads of shared sequences, gradients, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..sequence.deal import deal_heads
from .layers import Walked
from .model import Model
from .operations import FP32, ITEM
from .settings import Settings

NODE = 8
"""GPUs of a node, which NVLink connects."""

ADAPTER_GBITS = 400
"""Gigabits a second of a GPU's network adapter by its vendor's figure (ConnectX-7); nodes are counted to reach it."""

BETWEEN_NODES = 8 / (ADAPTER_GBITS * 1e6)
"""Milliseconds a byte."""


def of_rank(model: Model, settings: Settings) -> Model:
    """The model with the heads alone that one rank attends with, of the rank that has most, where ranks exchange heads.
    Of more ranks than heads some have none."""
    deal = deal_heads([1] * model.heads, model.key_heads, min(settings.ranks, model.heads))
    return replace(model, heads=max(map(len, deal.queries)), key_heads=max(map(len, deal.keys)))


def crosses_nodes(settings: Settings) -> bool:
    """True where ranks of several nodes share a sequence."""
    return settings.gpus > NODE and NODE % settings.ranks != 0


def exchanged(model: Model, settings: Settings, seq_len: int, walks: Sequence[Walked] = ()) -> float:
    """Bytes that leave a rank for attention in a step: its tokens' query, key and value of the heads of the others,
    later the outputs of its own heads, and as many backward; with checkpoints forward once more. In layers whose walks
    say so keys and values go in their place, and, of rows that all ranks compute together, queries and outputs.

    Args:
        walks: what each layer attends to; without them all exchange heads.
    """
    own = of_rank(model, settings)
    of_heads = (settings.ranks - 1) * 2 * (own.attention_width + own.key_width) * settings.tokens(seq_len)
    of_keys = [
        walked.keys.received * model.head_dim * settings.micro_batch for walked in walks if walked and walked.keys
    ]
    ways = settings.accumulation * (3 if settings.checkpoints else 2)
    return float(ways * _item(settings) * ((model.layers - len(of_keys)) * of_heads + sum(of_keys)))


def reduced(model: Model, settings: Settings, seq_len: int) -> float:
    """Bytes of gradients that leave a rank in a step. DeepSpeed (0.19.8) all-reduces them, in ZeRO 1 and 2, too, in
    which it leaves each rank its share; ZeRO 3 alone scatters them, unless ranks share sequences."""
    scatters = settings.zero_stage == 3 and settings.ranks == 1
    times = settings.accumulation if settings.zero_stage >= 2 else 1
    return (1 if scatters else 2) * times * _of_all_others(model, settings, seq_len)


def gathered(model: Model, settings: Settings, seq_len: int) -> float:
    """Bytes of weights that leave a rank in a step: once when they are new, in ZeRO 3 for each forward and backward."""
    times = {0: 0, 3: 2 * settings.accumulation}.get(settings.zero_stage, 1)
    return times * _of_all_others(model, settings, seq_len)


def _of_all_others(model: Model, settings: Settings, seq_len: int) -> float:
    """Bytes of all parameters but a rank's share."""
    return _item(settings) * model.parameters(seq_len) * (1 - 1 / settings.gpus)


def _item(settings: Settings) -> int:
    return FP32 if settings.dtype == "fp32" else ITEM
