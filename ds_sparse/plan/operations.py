"""Work of a model beside attention, operation by operation: products, bytes that kernels move, bytes that are kept.

Everything is of one token. Kernels are those of eager PyTorch: each reads and writes its tensors once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from .model import Model

ITEM, FP32 = 2, 4
"""Bytes of a number of 16 bits, and of 32."""

ALIGNED = 8
"""Numbers of 16 bits that matrix products load together: rows of other lengths take slower kernels."""


class _Added:
    """A dataclass of which two are added, and one multiplied, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def __mul__(self, count: float) -> Self:
        return type(self)(*(a * count for a in vars(self).values()))


@dataclass(frozen=True)
class Work(_Added):
    """Attributes:
    flops: of matrix products.
    odd_flops: of those whose rows are not `ALIGNED`.
    moved: bytes that all other kernels read and write.
    """

    flops: float = 0
    odd_flops: float = 0
    moved: float = 0


@dataclass(frozen=True)
class Part(_Added):
    """Work forward and backward, and the bytes that wait for the backward pass."""

    forward: Work = Work()
    backward: Work = Work()
    saved: float = 0

    @property
    def both(self) -> Work:
        """Work of a forward and a backward pass."""
        return self.forward + self.backward


def linear(inputs: int, outputs: int, bias: bool = True, saves: bool = True, trains: bool = True) -> Part:
    """y = x W + b. `saves` is False where another operation keeps x; without `trains` no gradient arrives."""
    flops = 2.0 * inputs * outputs
    odd = outputs % ALIGNED != 0 or inputs % ALIGNED != 0
    forward = Work(odd_flops=flops) if odd else Work(flops)
    reduced = Work(moved=ITEM * outputs if bias else 0)
    backward = forward * 2 + reduced if trains else Work()
    return Part(forward, backward, ITEM * inputs if saves else 0)


def elementwise(numbers: float, forward: float, backward: float, saved: float = 0, item: int = ITEM) -> Part:
    """A kernel that reads and writes so many tensors of `numbers`."""
    size = item * numbers
    return Part(Work(moved=forward * size), Work(moved=backward * size), saved * size)


def norm(numbers: int, rms: bool = False) -> Part:
    """Backward the gradient of the input and those of the weights each read input and gradient. An RMS norm is several
    kernels: to fp32, squared, meaned, scaled, back, times the weight; the input is kept in fp32."""
    if rms:
        return elementwise(numbers, 16, 20, 3)
    return elementwise(numbers, 2, 5, 1) + Part(saved=2 * FP32)


def activation(numbers: int) -> Part:
    return elementwise(numbers, 2, 3, 1)


def dropout(numbers: int, p: float) -> Part:
    """A product with a mask, which is a byte a number."""
    return elementwise(numbers, 2, 2) + Part(Work(moved=numbers), Work(moved=numbers), numbers) if p else Part()


def rotation(numbers: float) -> Part:
    """q cos + rotate_half(q) sin, in fp32: two products, a sum, halves negated and joined, and casts."""
    return elementwise(numbers, 10, 10, item=FP32)


def layer(model: Model, attends: bool = True) -> Part:
    """One layer without the kernel of attention. Without `attends` that returns the value, as in `ds_sparse bench
    bert`, so that query and key have no backward pass."""
    does, hidden, middle = model.does, model.hidden, model.intermediate
    width, key_width = model.attention_width, model.key_width
    projections = (
        linear(hidden, width, does.biases, saves=False, trains=attends)
        + linear(hidden, key_width, does.biases, saves=False, trains=attends)
        + linear(hidden, key_width, does.biases, saves=False)
        + elementwise(hidden, 0, 3 * (2 if attends else 0))  # gradients of what three projections read
    )
    if attends:
        # Gradients are put into the order of tokens.
        copies = elementwise(width + 2 * key_width, 0, 2)
        attention = Part(saved=kept_by_attention(model)) + rotation(does.rotary * (width + key_width)) + copies
    else:
        attention = elementwise(width, 2, 2, 1)
    output = linear(width, hidden, does.biases, saves=False) + dropout(hidden, model.dropout)
    inner = activation(middle)
    if does.gated:  # activation(a) * b, a and b halves of one tensor
        inner += elementwise(middle, 3, 6, 2) + elementwise(middle, 0, 4)
    feed_forward = (
        linear(hidden, middle * (2 if does.gated else 1), does.biases)
        + inner
        + linear(middle, hidden, does.biases)
        + dropout(hidden, model.dropout)
    )
    # Two sums, and backward the sums of their gradients.
    around = (norm(hidden, does.rms_norm) + elementwise(hidden, 3, 3)) * 2 + Part(saved=ITEM * hidden)
    return projections + attention + output + feed_forward + around


def kept_by_attention(model: Model) -> int:
    """Bytes of a token that attention keeps in a layer: query, key, value, output, and each head's lse."""
    return ITEM * 2 * (model.attention_width + model.key_width) + FP32 * model.heads


def exchange(model: Model) -> Part:
    """Copies of a layer whose sequence ranks share, by heads or by keys: query, key, value and output once each way.
    (Gradients of the first three are copied once more; a layer has that copy, which puts them into the order of
    tokens.) The output is kept twice, as attention gives it and as the projection reads it."""
    numbers = 2 * (model.attention_width + model.key_width)
    return elementwise(numbers, 2, 2) + Part(saved=ITEM * model.attention_width)


def embeddings(model: Model) -> Part:
    """Tables looked up and summed; backward their gradients are scattered."""
    tables = 3 if model.does.learned_positions else 1
    looked_up = elementwise(model.hidden, 2 * tables + 3 * (tables - 1), 3 * tables)
    return looked_up + norm(model.hidden, model.does.rms_norm) + dropout(model.hidden, model.dropout)


def logits(model: Model) -> Part:
    """Everything after the last layer, of a token that has logits, with the cross-entropy."""
    words, in_fp32 = model.vocabulary, model.does.logits_in_fp32
    # log_softmax forward reads and writes; backward zeros are written, and three tensors pass.
    found = linear(model.hidden, words) + elementwise(words, 2, 4, 1, FP32 if in_fp32 else ITEM)
    if model.does.transform:
        found += linear(model.hidden, model.hidden) + activation(model.hidden) + norm(model.hidden)
    return found + elementwise(words, 3, 3) if in_fp32 else found


def logits_at_the_highest(model: Model) -> float:
    """Bytes of a token's logits when most of them are there: the gradient of the loss, log_softmax, its gradient."""
    return 3 * model.vocabulary * (FP32 if model.does.logits_in_fp32 else ITEM)


def whole_model(model: Model) -> Part:
    """A token's part of a step, without the kernels of attention."""
    return layer(model) * model.layers + embeddings(model) + logits(model) * model.labelled
