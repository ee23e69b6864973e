"""Rates of a machine, by which work and attention take milliseconds, and those that are committed."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from .layers import Walked
from .model import Model
from .operations import ITEM, Work

H200 = "NVIDIA H200"

MEMORY_GIB = {H200: 139.0}
"""GiB of a machine's GPU as torch tells them, where no GPU is here to be asked."""

FILE = Path(__file__).with_name("h200.json")
"""The committed `Rates`, written by the program that compares plans with the committed results."""


@dataclass(frozen=True)
class Measured:
    """The range that rates come from, beyond which they are extrapolated.

    Attributes:
        tokens: the fewest and the most, of one sequence.
        blocks, head_dims: of the layouts.
        layers: of the model whose steps were measured.
        hidden: its size.
    """

    tokens: tuple[int, int]
    dense_tokens: tuple[int, int]
    blocks: tuple[int, ...]
    head_dims: tuple[int, ...]
    layers: int
    hidden: int


@dataclass(frozen=True)
class Rates:
    """Attributes:
    products, odd_products, moved: milliseconds a FLOP of matrix products, of those whose rows have odd lengths, and
        a byte of all other kernels.
    sparse, dense: the coefficients of attention's time, by direction and head size (see `key_of`); `attention_row`
        says of what.
    dropout: milliseconds that dropout adds a score, forward and backward, of sparse and of dense attention.
    training: milliseconds of a training step that are neither of these: what DeepSpeed, the optimizer's launches and
        the program's loop take. None where no training was measured.
    check: milliseconds in which DeepSpeed looks for inf and NaN in the gradients of as many layers; None as before.
    exchange, reduction: milliseconds a byte that leaves a rank, of what ranks of a sequence exchange, and of gradients;
        None where no steps on several GPUs were measured.
    itemsize: bytes of a number in what was measured.
    errors: by what was fitted, the relative errors of the fit without sign: in the median, and at most.
    """

    machine: str
    sources: tuple[str, ...]
    products: float
    odd_products: float
    moved: float
    sparse: dict[str, list[float]]
    dense: dict[str, list[float]]
    dropout: dict[str, float]
    training: float | None
    measured: Measured
    itemsize: int = ITEM
    check: float | None = None
    exchange: float | None = None
    reduction: float | None = None
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)

    def work(self, work: Work) -> float:
        """Milliseconds of what is not attention."""
        wide = self.itemsize / ITEM
        return self.products * work.flops + self.odd_products * work.odd_flops + self.moved * wide * work.moved

    def attention(self, walked: Walked, batch: float, model: Model, seq_len: int, direction: str) -> float:
        """Milliseconds of attention in one layer, in one direction."""
        heads = batch * model.heads
        scores = seq_len**2 / (2 if model.does.causal else 1)
        table, kind = self.dense, "dense"
        if walked is not None:
            scores, table, kind = getattr(walked, direction).computed, self.sparse, "sparse"
        coefficients = table[_nearest(model.head_dim, direction, table)]
        milliseconds = times(coefficients, attention_row(walked, heads, scores, seq_len, direction))
        return milliseconds + (self.dropout[kind] * heads * scores / 2 if model.attention_dropout else 0.0)


def times(coefficients: Sequence[float], row: Sequence[float]) -> float:
    """The sum of products."""
    return sum(c * x for c, x in zip(coefficients, row, strict=True))


def attention_row(walked: Walked, heads: float, scores: float, seq_len: int, direction: str) -> list[float]:
    """The quantities that the time of attention goes by: scores computed, tokens, and a constant; of sparse attention,
    after the first, scores of the tiles loaded and entries of their lists."""
    if walked is None:
        return [heads * scores, heads * seq_len, 1.0]
    side = getattr(walked, direction)
    return [heads * side.computed, heads * side.loaded, heads * side.entries, heads * seq_len, 1.0]


def key_of(head_dim: int, direction: str) -> str:
    """The key of a head size and a direction in `Rates.sparse` and `Rates.dense`."""
    return f"{direction} {head_dim}"


def _nearest(head_dim: int, direction: str, table: Mapping[str, list[float]]) -> str:
    """The smallest head size that was measured and has room for this one; else the largest."""
    sizes = sorted(int(key.split()[1]) for key in table if key.startswith(f"{direction} "))
    return key_of(next((size for size in sizes if size >= head_dim), sizes[-1]), direction)


@functools.cache
def committed_rates() -> Rates:
    """The rates of an H200."""
    return TypeAdapter(Rates).validate_json(FILE.read_bytes())
