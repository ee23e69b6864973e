"""The plan of a training run: FLOPs, memory, time, the gain over dense, where dense is faster, what fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..sequence.deal import check_ranks
from .advice import Advice, advise
from .layers import (
    BACKWARD,
    DENSE,
    FORWARD,
    Kind,
    Walked,
    kinds_of,
    layers_in_words,
    spread,
    walks_of,
)
from .limits import said_of
from .model import Model
from .rates import Rates
from .reach import Recall, recall_of
from .settings import RANKS, Settings
from .step import Step, attention_of, flops_of, odd_vocabulary, step_of
from .untimed import Known, known_of, why_untimed

SHORTEST = 512
"""Tokens of the shortest sequence that dense and sparse are compared at."""


@dataclass(frozen=True)
class Layers:
    """Layers that attend alike, in one forward and backward pass.

    Attributes:
        layers: as in the JSON: "0-5,7".
        density: live part of the scores; 1 for dense.
        computed: part of the scores that tiles multiply, mean of forward and backward.
        loaded: part of the scores in whole tiles.
        waste: part of what is computed that no live block has.
        milliseconds, dense_milliseconds: of attention in one layer.
        takes_structure: they have no window of the model's own, which no entry of "layers" changes.
    """

    layers: str
    attention: str
    count: int
    density: float
    computed: float
    loaded: float
    waste: float
    milliseconds: float
    dense_milliseconds: float
    takes_structure: bool

    @property
    def is_faster_dense(self) -> bool:
        """Tells if null in "layers" makes them faster."""
        return self.takes_structure and self.milliseconds > self.dense_milliseconds


@dataclass(frozen=True)
class AtLength:
    """Milliseconds of a step with sequences of this length, the tokens in a step being the same."""

    seq_len: int
    sparse: float
    dense: float


@dataclass(frozen=True)
class Plan(Known):
    """Attributes:
    errors: by what rates were taken from, how far they are from it: relative, in the median and at most.
    measured_tokens: the shortest and the longest sequences whose attention was measured.
    model_flops, attention_flops: of a GPU in a step, live blocks alone.
    dense_attention_flops: the same where all is dense.
    null_step: with null for those layers alone that it makes faster; None where there are none, or all are.
    advice: the parallelism to take; None where nothing fits, or the memory is not known.
    odd_vocabulary: milliseconds that a vocabulary of an odd size costs in a step.
    lengths: ascending, to the length of the plan.
    remarks: what is assumed, and what lies outside of what was measured.
    """

    machine: str
    rates_from: tuple[str, ...]
    errors: dict[str, tuple[float, float]]
    measured_tokens: tuple[int, int]
    layers: list[Layers]
    recall: Recall
    model_flops: float
    attention_flops: float
    dense_attention_flops: float
    step: Step
    dense_step: Step
    null_step: Step | None
    advice: Advice | None
    odd_vocabulary: float
    lengths: list[AtLength]
    remarks: list[str]

    @property
    def tokens(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.seq_len * self.settings.sequences

    @property
    def is_dense(self) -> bool:
        """True where no layer is sparse."""
        return all(of.attention == DENSE for of in self.layers)

    @property
    def gain(self) -> float:
        """The time of a dense step over that of a sparse one."""
        return self.dense_step.total / self.step.total

    @property
    def dense_is_faster_to(self) -> int | None:
        """The longest of the lengths compared at which a dense step is faster; None: at none."""
        return max((at.seq_len for at in self.lengths if at.dense < at.sparse), default=None)


def make_plan(
    block: Mapping[str, Any] | None,
    source: str,
    model: Model,
    settings: Settings,
    rates: Rates,
    seq_len: int,
    document_tokens: int | None = None,
    memory_gib: float | None = None,
) -> Plan:
    """Plans a run.

    Args:
        block: the `sparse_attention` block; None trains dense.
        document_tokens: mean tokens of a sequence that are text, the rest being padding.

    Raises:
        ValueError: a block that is wrong, a length that it has no layout for, documents longer than sequences; more
            ranks of a sequence than heads where these exchange heads, or several without a block; layers that choose
            their blocks, of which `plan_untimed` says what is known.
    """
    if settings.ranks > 1 and block is None:
        raise ValueError(
            f"{source}: {RANKS} is {settings.ranks}, and there is no sparse_attention block, without which ds_sparse "
            f'does not cut sequences; add one, of mode "dense" for dense attention, or leave {RANKS} out.'
        )
    kinds = kinds_of(block, model, source)
    if (why := why_untimed(kinds)) is not None:
        raise ValueError(f"{source}: {why}.")
    known = known_of(kinds, source, model, settings, seq_len, document_tokens, memory_gib)
    padded = known.padded
    walks = walks_of(kinds, model, settings, padded)
    if not all(walked and walked.keys for walked in walks):
        check_ranks(model.heads, settings.ranks)
    of_layers = spread(kinds, walks)
    layers = [_layers(kind, walked, rates, model, settings, padded) for kind, walked in zip(kinds, walks)]
    faster = [None if of.is_faster_dense else walked for of, walked in zip(spread(kinds, layers), of_layers)]
    may_be_null = any(faster) and faster != of_layers and settings.ranks <= model.heads

    def of_others(others: Settings) -> list[Walked]:
        return spread(kinds, walks_of(kinds, model, others, padded))

    dense: list[Walked] = [None] * model.layers
    live = [walked.live if walked else None for walked in of_layers]
    linear_flops, attention_flops = flops_of(model, settings, padded, live)
    return Plan(
        **vars(known),
        machine=rates.machine,
        rates_from=rates.sources,
        errors=rates.errors,
        measured_tokens=rates.measured.tokens,
        layers=layers,
        recall=recall_of(kinds, model, padded),
        model_flops=linear_flops,
        attention_flops=attention_flops,
        dense_attention_flops=flops_of(model, settings, seq_len, [None] * model.layers)[1],
        step=step_of(rates, model, settings, padded, of_layers),
        dense_step=step_of(rates, model, settings, seq_len, dense),
        null_step=step_of(rates, model, settings, padded, faster) if may_be_null else None,
        advice=None
        if memory_gib is None
        else advise(rates, model, settings, padded, of_others, memory_gib, model.heads if block is not None else 1),
        odd_vocabulary=odd_vocabulary(rates, model, settings, padded),
        lengths=compare(rates, model, settings, kinds, seq_len),
        remarks=said_of(rates, model, settings, kinds, of_layers, seq_len),
    )


def compare(rates: Rates, model: Model, settings: Settings, kinds: Sequence[Kind], seq_len: int) -> list[AtLength]:
    """Steps at half the length, a quarter and so on, with as many tokens; lengths without a layout are left out."""
    found: list[AtLength] = []
    length, batch = seq_len, settings.micro_batch
    while length >= SHORTEST:
        try:
            walks = spread(kinds, walks_of(kinds, model, settings, length))
        except ValueError:
            break
        same_tokens = replace(settings, micro_batch=batch)
        sparse, dense = (
            step_of(rates, model, same_tokens, length, of_layers).total for of_layers in (walks, [None] * model.layers)
        )
        found.append(AtLength(length, sparse, dense))
        length, batch = length // 2, batch * 2
    return found[::-1]


def _layers(kind: Kind, walked: Walked, rates: Rates, model: Model, settings: Settings, seq_len: int) -> Layers:
    sparse, dense = (
        sum(attention_of(rates, model, settings, seq_len, those, way) for way in (FORWARD, BACKWARD))
        for those in (walked, None)
    )
    parts = (walked.density, walked.computed, walked.loaded, walked.waste) if walked else (1.0, 1.0, 1.0, 0.0)
    of_kind = layers_in_words(kind.layers), kind.in_words(), len(kind.layers)
    return Layers(*of_kind, *parts, sparse, dense, kind.window is None)
