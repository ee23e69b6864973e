"""Operations beside others that do the same job: what competes, and its times in turns in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .floors import Ceilings, Size, operation_floor
from .machine import DIRECTIONS, FORWARD, in_turns, time_of


@dataclass(frozen=True)
class Competitor:
    """`call(*inputs)`, differentiated by all inputs.

    Attributes:
        dense: the name of the competitor that does the same job densely.
        output_grad: None where it cannot be differentiated.
        no_backward: why it cannot be differentiated; empty where it can.
    """

    name: str
    dense: str
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    output_grad: Tensor | None
    no_backward: str = ""


def competitor(
    name: str, dense: str, call: Callable[..., Tensor], inputs: Sequence[Tensor], no_backward: str = ""
) -> Competitor:
    with torch.no_grad():
        output_grad = None if no_backward else torch.randn_like(call(*inputs))
    return Competitor(name, dense, call, tuple(inputs), output_grad, no_backward)


@dataclass(frozen=True)
class Row:
    """One competitor in one direction; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        to_dense: its time over that of the dense competitor.
        floor_ms: on a GPU what its `Ceilings` allow for live blocks alone. A CPU has none: what bounds an operation
            there depends on which of its operands and results lie in caches and in memory that is already its own.
        to_floor: its time over that.
        bound: what the floor is made of, see `Ceilings.floor`.
    """

    name: str
    direction: str
    dense: str
    milliseconds: float | None = None
    to_dense: float | None = None
    floor_ms: float | None = None
    to_floor: float | None = None
    bound: str = ""
    rounds: int = 0
    reason: str = ""


def measure(
    competitors: list[Competitor],
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    seconds: float,
    title: str,
    directions: Sequence[str] = DIRECTIONS,
) -> list[Row]:
    """Times the competitors in turns, each in all directions that it has; a row for each."""
    ceilings = Ceilings.measure(device, dtype) if device.type == "cuda" else None
    runs = {
        (runner.name, direction): partial(time_of, runner.call, runner.inputs, runner.output_grad, direction, device)
        for runner in competitors
        for direction in directions
        if direction == FORWARD or not runner.no_backward
    }
    times = in_turns(runs, repeats, seconds, title)
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    rows = []
    for runner in competitors:
        for direction in directions:
            mine = medians.get((runner.name, direction))
            if mine is None:
                rows.append(Row(runner.name, direction, runner.dense, reason=runner.no_backward))
                continue
            dense = medians[runner.dense, direction]
            row = Row(
                runner.name, direction, runner.dense, mine, mine / dense, rounds=len(times[runner.name, direction])
            )
            if ceilings is not None:
                floor, bound = operation_floor(ceilings, size, runner.dense, direction)
                row = replace(row, floor_ms=floor, to_floor=mine / floor, bound=bound)
            rows.append(row)
    return rows


def find(rows: Sequence[Row], name: str, direction: str) -> Row | None:
    """The row of a competitor that was measured."""
    return next((row for row in rows if (row.name, row.direction) == (name, direction) and not row.reason), None)


def without_time(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each reason why rows have no time, with all whom it concerns."""
    directions = dict.fromkeys(row.direction for row in rows)
    missing: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row.reason:
            missing.setdefault(row.reason, {}).setdefault(row.name, []).append(row.direction)
    for reason, concerned in missing.items():
        for lacking in dict.fromkeys(map(tuple, concerned.values())):
            names = ", ".join(name for name, these in concerned.items() if tuple(these) == lacking)
            yield f"{names}: no {'time' if len(lacking) == len(directions) else ' or '.join(lacking)}: {reason}"
