"""The time of a training step, from what it computes and how fast the machine is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ops import _flops
from .communication import BETWEEN_NODES, NODE, crosses_nodes, exchanged, gathered, of_rank, reduced
from .layers import BACKWARD, FORWARD, Walked
from .model import Model
from .operations import Part, Work, exchange, layer, logits, whole_model
from .rates import Rates
from .settings import Settings

OPTIMIZER_BYTES = 40
"""Moved for a parameter by a step of Adam with clipping: gradient, fp32 weight and two moments are read, the latter
three and the 16-bit weight written, and the gradient is made fp32 and read once more for its norm."""


@dataclass(frozen=True)
class Step:
    """Milliseconds of an optimizer's step, all its forward passes together.

    Attributes:
        products: matrix products of linear layers.
        kernels: all else but attention: norms, activations, sums, the loss.
        attention: forward and backward.
        checkpoints: forward passes once more.
        optimizer: what it moves in memory.
        training: what DeepSpeed, launches and the program's loop take, as measured; 0 where none was.
        check: DeepSpeed's look for inf and NaN in gradients, as measured; 0 where it was not.
        exchange: what ranks that share a sequence send each other; 0 where none was measured.
        reduction: gradients that ranks send each other, and weights; 0 where none was measured.
    """

    products: float
    kernels: float
    attention: float
    checkpoints: float
    optimizer: float
    training: float
    check: float
    exchange: float
    reduction: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def step_of(rates: Rates, model: Model, settings: Settings, seq_len: int, walks: Sequence[Walked]) -> Step:
    """The milliseconds of a step, where `walks` say what each layer attends to."""
    tokens = settings.tokens(seq_len)
    passes, alike = settings.accumulation, Counter(walks)
    copies = exchange(model) if settings.ranks > 1 else Part()
    work = (whole_model(model) + copies * model.layers).both * tokens
    ways = {
        way: sum(count * attention_of(rates, model, settings, seq_len, walked, way) for walked, count in alike.items())
        for way in (FORWARD, BACKWARD)
    }
    forward = rates.work((layer(model) + copies).forward * (model.layers * tokens)) + ways[FORWARD]
    again = forward if settings.checkpoints else 0.0
    updated = model.parameters(seq_len) / (settings.gpus if settings.zero_stage else 1)
    optimizer = 0.0 if settings.offloads else rates.work(Work(moved=OPTIMIZER_BYTES * updated))
    share = model.layers / rates.measured.layers
    return Step(
        products=passes * rates.work(replace(work, moved=0)),
        kernels=passes * rates.work(Work(moved=work.moved)),
        attention=passes * sum(ways.values()),
        checkpoints=passes * again,
        optimizer=optimizer,
        training=(rates.training or 0.0) * share,
        # Each GPU looks at the gradients that it keeps.
        check=(rates.check or 0.0) * share / settings.gpus if settings.checks else 0.0,
        exchange=_sent(exchanged(model, settings, seq_len, walks), rates.exchange, crosses_nodes(settings)),
        reduction=_sent(
            reduced(model, settings, seq_len) + gathered(model, settings, seq_len),
            rates.reduction,
            settings.gpus > NODE,
        ),
    )


def attention_of(rates: Rates, model: Model, settings: Settings, seq_len: int, walked: Walked, way: str) -> float:
    """Milliseconds of attention in one layer and direction, on the rank that computes most."""
    if walked is not None and walked.keys is not None:
        return rates.attention(walked, settings.micro_batch * walked.keys.share, model, seq_len, way)
    return rates.attention(walked, settings.micro_batch, of_rank(model, settings), seq_len, way)


def _sent(size: float, rate: float | None, between_nodes: bool) -> float:
    """Milliseconds that so many bytes take to leave a rank; 0 where no rate was measured."""
    if rate is None:
        return 0.0
    return size * (max(rate, BETWEEN_NODES) if between_nodes else rate)


def odd_vocabulary(rates: Rates, model: Model, settings: Settings, seq_len: int) -> float:
    """Milliseconds of a step that rows of logits of an odd length cost; 0 where they are not odd."""
    tokens = model.labelled * settings.tokens(seq_len) * settings.accumulation
    return max(0.0, rates.odd_products - rates.products) * (logits(model) * tokens).both.odd_flops


def flops_of(model: Model, settings: Settings, seq_len: int, live: Sequence[float | None]) -> tuple[float, float]:
    """FLOPs of a GPU in a step: of linear layers, and of attention, live blocks alone.

    Args:
        live: scores of live blocks in each layer, mean over heads; None is dense attention.
    """
    passes = settings.accumulation
    work = whole_model(model).both
    whole = float(seq_len**2) / (2 if model.does.causal else 1)
    scores = sum(whole if of_layer is None else of_layer for of_layer in live)
    width: float = of_rank(model, settings).attention_width
    if settings.ranks > model.heads:
        width = model.attention_width / settings.ranks
    each = (_flops.FORWARD + _flops.BACKWARD) * settings.micro_batch * width
    return passes * settings.tokens(seq_len) * (work.flops + work.odd_flops), passes * each * scores
