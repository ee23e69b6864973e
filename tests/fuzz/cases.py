"""Cases: what one is, and how its parts are drawn. A case is a function of its seed, its number and the device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from helpers import OPERAND_VIEWS, as_view
from torch import Tensor

import ds_sparse

from .meanings import Meaning, Tensors

T = TypeVar("T")

VIEWS = ("contiguous", "contiguous", *OPERAND_VIEWS)
VALUES = ("normal",) * 6 + (
    "large",
    "very large",
    "tiny",
    "rows alike",
    "constant rows",
    "whole numbers",
    "zeros",
    "of all sizes",
)
DENSITIES = (0.5, 0.5, 0.2, 0.8, 1.0, 0.05, 0.0)


Gradients = Callable[[str, Tensor], Tensor]
"""Gradients of results, by name and exact result: numbers of the result's dtype."""


def normal_gradients(view: str = "contiguous", seed: int = 0) -> Gradients:
    def grad(name: str, like: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        x = torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like.dtype)
        return as_view(x, "contiguous" if x.dim() != 4 and view in ("tokens_first", "packed") else view)

    return grad


@dataclass(frozen=True)
class Case:
    """A call of an operation, and what it means.

    Attributes:
        tensors: what it is given, on the CPU, with the strides of the case.
        wanted: those that have a gradient.
        call: computes results by the operation, of tensors on the device.
        grads: how the gradients of the results are drawn and laid out.
        composed: the operation is made of PyTorch's, which round each step.
        words: what was drawn, to be read.
        poisoned: memory that PyTorch hands out uninitialised holds NaN.
        threads: of the CPU, that the operation has.
        planted: by name, tokens (B, H, T) of an operand, or of the output's gradient, whose numbers are `number`; the
            meaning is of zeros there.
    """

    operation: str
    dtype: torch.dtype
    tensors: Tensors
    wanted: tuple[str, ...]
    call: Callable[[Tensors], Tensors]
    meaning: Meaning
    grads: Gradients = field(default_factory=normal_gradients)
    words: dict[str, Any] = field(default_factory=dict)
    composed: bool = False
    poisoned: bool = True
    threads: int = 1
    planted: dict[str, Tensor] = field(default_factory=dict)
    number: float = 0.0


@dataclass
class Draw:
    """Draws parts of a case, and keeps what was drawn."""

    seed: str
    device: str
    words: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = torch.Generator().manual_seed(self.random.getrandbits(60))

    def pick(self, name: str, choices: Sequence[T]) -> T:
        chosen = self.random.choice(choices)
        if name:
            self.words[name] = str(chosen).removeprefix("torch.")
        return chosen

    def size(self, name: str, choices: Sequence[int]) -> int:
        """One of them, now and then 0."""
        return self.pick(name, (0,) if self.maybe(0.02) else choices)

    def maybe(self, chance: float) -> bool:
        return self.random.random() < chance

    def dtype(self, float64_on_cuda: bool = True) -> torch.dtype:
        choices = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
        if self.device == "cpu" or float64_on_cuda:
            choices.append(torch.float64)
        return self.pick("dtype", choices)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.numbers)

    def values(self, name: str, shape: Sequence[int], dtype: torch.dtype, views: Sequence[str] = VIEWS) -> Tensor:
        """A tensor of one of the kinds of values, behind one of the kinds of strides."""
        kind = self.random.choice(VALUES)
        x = torch.randn(tuple(shape), generator=self.numbers, dtype=torch.float64)
        x = spoiled_values(x, kind, self.uniform(*shape[:-1], 1) if shape else x).to(dtype)
        view = self.random.choice([view for view in views if x.dim() == 4 or view not in ("tokens_first", "packed")])
        self.words[name] = f"{'x'.join(map(str, shape))} {kind}, {view}"
        return as_view(x, view)

    def bias(self, name: str, shape: Sequence[int], dtype: torch.dtype, may_be_bool: bool = True) -> Tensor:
        """Something that is added to scores, or a bool mask; some of it masks."""
        kept = self.uniform(*shape) < self.pick("", (0.7, 0.9, 1.0, 0.3))
        if may_be_bool and self.maybe(0.5):
            self.words[name] = f"{'x'.join(map(str, shape))} bool"
            return kept
        low = self.pick("", (-torch.inf, -torch.inf, -10000.0, *(torch.finfo(dtype).min,) * 2, 1.0))
        x = self.values(name, shape, dtype)
        self.words[name] += f", {str(dtype).removeprefix('torch.')}, {low} in places"
        return x if torch.equal(kept, torch.ones_like(kept)) else x.masked_fill(~kept, low)

    def scale(self) -> float | None:
        return self.pick("scale", (None, None, None, 0.3, -0.5, 1.0, 1e-6, 0.0, 2.5))

    def softcap(self) -> float:
        return self.pick("softcap", (0.0, 0.0, 0.0, 0.3, 2.0, 50.0))

    def subset(self, sizes: Sequence[int], dims: int) -> tuple[int, ...]:
        """The last dims of the sizes, any of them perhaps 1."""
        return (*(1 if self.maybe(0.35) else size for size in sizes[-dims:-1]), 1 if self.maybe(0.05) else sizes[-1])

    def grads(self) -> Gradients:
        view = self.pick("gradients", ("contiguous", "transposed", "expanded", "tokens_first"))
        return normal_gradients(view, int(self.random.random() * 2**40))

    def layout(self, heads: int, rows: int, columns: int, block: int) -> Tensor:
        """bool (1 or heads, rows, columns), of a structure or random."""
        if rows == columns and heads and self.maybe(0.4):
            return self.structure(heads, rows, block)
        density = self.pick("density of the layout", DENSITIES)
        layout = self.uniform(heads if heads and self.maybe(0.6) else 1, rows, columns) < density
        for dim in range(3):
            if layout.numel() and self.maybe(0.15):
                layout.select(dim, self.random.randrange(layout.shape[dim])).fill_(self.maybe(0.3))
        self.words["layout"] = f"random {tuple(layout.shape)}"
        return layout

    def structure(self, heads: int, blocks: int, block: int) -> Tensor:
        name = self.random.choice(("Dense", "Fixed", "Variable", "BigBird", "BSLongformer", "LocalSlidingWindow"))
        options: dict[str, Any] = {} if name in ("Dense", "Fixed") else {"seed": self.random.randrange(99)}
        if name == "Fixed":
            options = {"num_local_blocks": 1, "num_global_blocks": 1}
        elif name == "BigBird":
            options |= {"num_random_blocks": 1, "num_global_blocks": 1}
            options |= {"num_sliding_window_blocks": self.random.randrange(2)}
        elif name != "Dense" and name != "Variable":
            options |= {"num_sliding_window_blocks": self.random.randrange(2)}
        elif name == "Variable":
            options |= {"num_random_blocks": self.random.randrange(2), "local_window_blocks": [1, 2]}
        self.words["layout"] = f"{name} {options} of {blocks} blocks"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ds_sparse.SparsityWarning)
            config = getattr(ds_sparse, f"{name}SparsityConfig")(num_heads=heads, block=block, **options)
        return config.make_layout(blocks * block).bool()


def spoiled_values(x: Tensor, kind: str, rows: Tensor) -> Tensor:
    """rows: a uniform number for each row of x."""
    if kind in ("large", "very large"):
        return x * (6 if kind == "large" else 30)
    if kind == "tiny":
        return x * 2.0**-10
    if kind == "rows alike" and x.dim() > 1:
        return x[..., :1, :].expand_as(x).clone() if x.shape[-2] else x
    if kind == "constant rows":
        return x[..., :1].expand_as(x).clone() if x.shape[-1] else x
    if kind == "whole numbers":
        return x.round()
    if kind == "zeros":
        return x * (rows < 0.5)
    if kind == "of all sizes":
        return x * 10 ** (4 * rows.double() - 3)
    return x
