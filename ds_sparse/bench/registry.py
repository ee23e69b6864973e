"""Where the operations of `ds_sparse bench` are found, and who computes a case of theirs.

A program adds operations, or peers of an operation, before it calls the command line: `OPERATIONS["bert"] = "a line"`,
`MODULES["bert"] = "benchmarks.bert"`, `operation("attention").peers["fa4"] = build`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

BF16_ON_A_GPU = {"cpu": ["fp32"], "cuda": ["bf16"]}
"""Dtypes that a device measures, if an operation has no others."""

MODULES: dict[str, str] = {}
"""Modules of operations that are not in this package."""


def operation(name: str) -> Any:
    """The `OPERATION` of a module: a `run.Operation`, or anything else with its `add`, `measure`, `restore`, `report`
    and `tables`."""
    return import_module(MODULES.get(name, f"{__package__}.{name}")).OPERATION


def as_given(x: Tensor) -> Tensor:
    return x


def tokens_first(x: Tensor) -> Tensor:
    """(B, H, T, D) with the memory order (B, T, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class Peer:
    """Whoever computes a case: `call(*inputs)`, and what to know of it.

    Attributes:
        inputs: of the call; None: those of the problem.
        beside: the name of the peer that does the same job densely; "" if there is none.
        dense: it computes every score, whatever the structure says.
        no_backward: why it cannot be differentiated, or has no other direction than the first; "" if it can.
        arranged: from an input of the problem to what `call` takes, such as `tokens_first`.
        as_row: from what `call` takes or returns to the shape of the problem's inputs.
        lengths: of the documents that it computes, from the row's start; None: all of the case.
        least_error: the relative error of a result that is allowed at any rate: of one that drops something.
        filled: the part of the scores in the blocks that are computed that is live; None where it is not known.
    """

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] | None = None
    beside: str = ""
    dense: bool = False
    no_backward: str = ""
    arranged: Callable[[Tensor], Tensor] = as_given
    as_row: Callable[[Tensor], Tensor] = as_given
    lengths: tuple[int, ...] | None = None
    least_error: float = 0.0
    filled: float | None = None


Build = Callable[[Any], Peer]
"""Makes a peer for a problem, or raises the reason why there is none."""
