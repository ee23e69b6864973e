"""Fused attention on live blocks beside every peer that computes it or a part of it, in turns in one process.

A peer's outputs and gradients are verified before it is timed; who does not take a case, or is wrong, is named with the
reason. Forward is that of training, which keeps what backward needs; backward is timed alone, on a graph that is kept.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from ..verify.accuracy import attention_by_block_rows, output_and_gradients, random_tensors, require_as_accurate
from . import machine
from .cases import Case
from .floors import Ceilings, Size
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, TRAIN, in_three_digits, in_turns
from .peers import DENSE, OURS, PACKAGES, PEERS, Peer, Problem
from .reasons import in_short
from .runs import restored


@dataclass(frozen=True)
class Row:
    """One peer in one direction; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        tflops: FLOPs of live blocks alone, 4 D a score forward and 10 D backward, a second.
        to_floor: the time over the case's floor.
        to_ours: the time over that of ds_sparse; above 1 ds_sparse is faster.
    """

    peer: str
    direction: str
    milliseconds: float | None = None
    tflops: float | None = None
    to_floor: float | None = None
    to_ours: float | None = None
    rounds: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """A case, measured.

    Attributes:
        floors: milliseconds by direction; of a CPU the density times dense attention's time, empty if that is missing.
        l2_floors: what bringing keys and values (backward: queries and gradients) from L2 takes; empty if not measured.
        preparation: seconds to build, compile and verify, by peer.
    """

    case: Case
    dtype: str
    density: float
    floors: dict[str, float]
    l2_floors: dict[str, float]
    rows: list[Row]
    preparation: dict[str, float]

    def row(self, peer: str, direction: str) -> Row | None:
        """The row of a peer that was measured."""
        found = (row for row in self.rows if (row.peer, row.direction) == (peer, direction) and not row.reason)
        return next(found, None)


def run_case(
    case: Case, names: Sequence[str], device: torch.device, dtype: str, repeats: int, seconds: float
) -> Result:
    """Verifies the peers, then times them in turns: `repeats` rounds, or as many as begin within `seconds`, three at
    least. Never raises for a peer's sake."""
    torch._dynamo.reset()  # what was compiled for the case before
    layout = case.layout()
    problem = Problem(case, layout.to(device), DTYPES[dtype])
    shape = (case.batch, case.heads, case.seq_len, case.head_dim)
    *inputs, grad = random_tensors(4, shape, DTYPES[dtype], device)
    size = Size.of(layout, case.block, case.batch, case.heads, case.head_dim, DTYPES[dtype].itemsize)
    references = References(case, layout, inputs, grad)

    peers: dict[str, Peer] = {}
    reasons: dict[str, str] = {}
    preparation: dict[str, float] = {}
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for name in names:
        start = time.perf_counter()
        try:
            peers[name] = PEERS[name](problem)
            verify(peers[name], references)
        except Exception as error:  # noqa: BLE001 - whatever stops a peer is a line of the table
            reasons[name] = in_short(error)
            continue
        preparation[name] = time.perf_counter() - start
        for direction in DIRECTIONS[: 1 if peers[name].no_backward else None]:
            runs[name, direction] = partial(time_of, peers[name], inputs, grad, direction, device)
    times = in_turns(runs, repeats, seconds, case.name)

    medians = {key: statistics.median(samples) for key, samples in times.items()}
    floors, l2_floors = floors_of(size, device, DTYPES[dtype], medians)
    rows = []
    for name in names:
        for direction in DIRECTIONS:
            if (name, direction) not in medians:
                reason = reasons.get(name) or peers[name].no_backward
                rows.append(Row(name, direction, reason=reason))
                continue
            mine, ours = medians[name, direction], medians.get((OURS, direction))
            rows.append(
                Row(
                    name,
                    direction,
                    mine,
                    tflops=flops(size, direction) / mine / 1e9,
                    to_floor=mine / floors[direction] if floors else None,
                    to_ours=mine / ours if ours else None,
                    rounds=len(times[name, direction]),
                )
            )
    return Result(case, dtype, size.density, floors, l2_floors, rows, preparation)


class References:
    """Outputs and gradients of the first and the last head, in float64 and by plain PyTorch at the inputs' precision.

    Those of the layout and those of dense attention are each computed when a peer first needs them.
    """

    def __init__(self, case: Case, layout: Tensor, inputs: list[Tensor], grad: Tensor) -> None:
        self.case, self.layout, self.inputs, self.grad = case, layout, inputs, grad
        self.places = sorted({(0, 0), (case.batch - 1, case.heads - 1)})
        self._known: dict[bool, list[tuple[list[Tensor], list[Tensor], list[Tensor]]]] = {}

    def of(self, dense: bool) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """For each of `places`: plain, exact, and the sizes of the exact sums' terms; each of the output and of the
        gradients of query, key and value, (T, D)."""
        if dense not in self._known:
            layout = torch.ones_like(self.layout) if dense else self.layout
            self._known[dense] = []
            for batch, head in self.places:
                q, k, v, grad = (x[batch, head] for x in (*self.inputs, self.grad))
                live, block = layout[head % len(layout)], self.case.block
                plain, _ = attention_by_block_rows(q, k, v, grad, live, block)
                exact, terms = attention_by_block_rows(q.double(), k.double(), v.double(), grad.double(), live, block)
                self._known[dense].append((plain, exact, terms))
        return self._known[dense]


def verify(peer: Peer, references: References) -> None:
    """Holds the output and the gradients of the whole case to the references, block row by block row.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    inputs, grad = in_order(peer, references.inputs), in_order(peer, [references.grad])[0]
    if peer.no_backward:
        results = [peer.call(*inputs)]
    else:
        results = output_and_gradients(peer.call, inputs, grad)
    what = ("output", "gradient of query", "gradient of key", "gradient of value")
    parts = references.case.seq_len // references.case.block
    for (batch, head), of_head in zip(references.places, references.of(peer.dense), strict=True):
        for name, mine, plain, exact, terms in zip(what, results, *of_head, strict=False):
            place = f"{name}, batch {batch}, head {head}"
            require_as_accurate(place, mine[batch, head], plain, exact, parts, terms)


def time_of(peer: Peer, inputs: list[Tensor], grad: Tensor, direction: str, device: torch.device) -> float:
    """Milliseconds of one call."""
    leaves = [x.detach().requires_grad_() for x in in_order(peer, inputs)]
    return machine.time_of(peer.call, leaves, in_order(peer, [grad])[0], direction, device)


def in_order(peer: Peer, tensors: list[Tensor]) -> list[Tensor]:
    """(B, H, T, D) in the memory order that the peer takes without a copy."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors] if peer.tokens_first else tensors


def flops(size: Size, direction: str) -> float:
    if direction == TRAIN:
        return size.attention(FORWARD).flops + size.attention(BACKWARD).flops
    return size.attention(direction).flops


def floors_of(
    size: Size, device: torch.device, dtype: torch.dtype, medians: dict[tuple[str, str], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """By direction: the floor, and what L2 alone asks for; empty where they are not known."""
    if device.type == "cpu":
        dense = DENSE["cpu"]
        return {d: size.density * medians[dense, d] for d in DIRECTIONS if (dense, d) in medians}, {}
    ceilings = Ceilings.measure(device, dtype)
    ways = (FORWARD, BACKWARD)
    floors = {way: ceilings.attention_floor(size.attention(way), size.head_dim, way) for way in ways}
    floors[TRAIN] = floors[FORWARD] + floors[BACKWARD]
    if ceilings.l2_bytes_per_ms is None:
        return floors, {}
    return floors, {way: size.attention(way).l2_bytes / ceilings.l2_bytes_per_ms for way in ways}


def report(results: Iterable[Result], break_even_with: str = "", grows: bool = False) -> Iterator[Iterable[str]]:
    """What is printed: a table a result, as they come, and for each dtype the summary, and where they are asked for the
    densities of `break_even` with a dense peer and the lengths of `growth`."""
    seen = []
    for result in results:
        seen.append(result)
        yield table(result)
    for dtype in dict.fromkeys(result.dtype for result in seen):
        of_dtype = [result for result in seen if result.dtype == dtype]
        yield summary(of_dtype)
        if break_even_with:
            yield break_even(of_dtype, break_even_with)
        if grows:
            yield growth(of_dtype)


def best_peer(result: Result, direction: str) -> Row | None:
    """The fastest of those beside us."""
    others = [row for row in result.rows if row.direction == direction and not row.reason and row.peer != OURS]
    return min(others, key=lambda row: row.milliseconds, default=None)


def table(result: Result) -> Iterator[str]:
    """Lines: milliseconds, TFLOP/s on live blocks, ratios to the floor and to ds_sparse, of every peer."""
    case = result.case
    rounds = max((row.rounds for row in result.rows), default=0)
    yield (
        f"{case.name}: {case.structure}, block {case.block}, density {result.density:.1%}, B {case.batch}, "
        f"H {case.heads}, T {case.seq_len}, D {case.head_dim}, {result.dtype}; medians of {rounds} rounds"
    )
    if result.floors:
        line = "floor " + " / ".join(f"{result.floors[direction]:.3f}" for direction in DIRECTIONS) + " ms"
        if result.l2_floors:
            line += ", from L2 alone " + " / ".join(f"{ms:.3f}" for ms in result.l2_floors.values()) + " ms"
        yield line
    heading = f"{'ms':>7} {'TFLOP/s':>8} {'x floor':>7} {'x ours':>7}"
    yield f"{'':16}" + " ".join(f"{direction:>33}" for direction in DIRECTIONS)
    yield f"{'':16}" + " ".join(f"{heading:>33}" for _ in DIRECTIONS)
    measured = {row.peer for row in result.rows if not row.reason}
    for name in dict.fromkeys(row.peer for row in result.rows if row.peer in measured):
        cells = (cell(result.row(name, direction)) for direction in DIRECTIONS)
        yield f"{name:16}" + " ".join(cells)
    missing: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        if row.reason:
            missing.setdefault((row.peer, row.reason), []).append(row.direction)
    for (name, reason), directions in missing.items():
        yield f"{name:16}  no {'time' if len(directions) == len(DIRECTIONS) else ' or '.join(directions)}: {reason}"
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in result.preparation.items() if seconds >= 1)
    if spent:
        yield f"seconds to build and verify: {spent}"


def cell(row: Row | None) -> str:
    if row is None:
        return f"{'-':>33}"
    ratios = f"{number(row.to_floor):>7} {number(row.to_ours):>7}"
    return f" {in_three_digits(row.milliseconds):>7} {row.tflops:8.3g} {ratios}"


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if x < 999.5 else in_three_digits(x)


def summary(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: ds_sparse, and the fastest peer's time over ours."""
    yield f"{'ds_sparse':24}{'':8} {'ms':>8} {'TFLOP/s':>8} {'x floor':>8} {'best peer':>20}"
    for result in results:
        for direction in (FORWARD, BACKWARD):
            row, best = result.row(OURS, direction), best_peer(result, direction)
            start = f"{result.case.name:24}{direction:8}"
            if row is None:
                yield f"{start} {'-':>8}"
                continue
            beside = f"{best.peer} {number(best.to_ours)}" if best else "-"
            yield (
                f"{start} {in_three_digits(row.milliseconds):>8} {row.tflops:8.3g} {number(row.to_floor):>8} "
                f"{beside:>20}"
            )


def break_even(results: list[Result], dense: str) -> Iterator[str]:
    """A line a block size: the density from which on the dense peer is faster, between the densities measured."""
    yield f"density at which {dense} is as fast as ds_sparse, {' / '.join(DIRECTIONS)}"
    for block in sorted({result.case.block for result in results}):
        of_block = sorted((r for r in results if r.case.block == block), key=lambda result: result.density)
        yield f"block {block:4} " + " / ".join(crossing(of_block, dense, direction) for direction in DIRECTIONS)


def crossing(results: list[Result], dense: str, direction: str) -> str:
    """Where the time of `dense` over ours falls below 1, by a straight line in its logarithm."""
    points = [
        (result.density, math.log(row.to_ours))
        for result in results
        if (row := result.row(dense, direction)) is not None and row.to_ours is not None
    ]
    if not points:
        return "-"
    if points[0][1] < 0:
        return f"below {points[0][0]:.2f}"
    for (low, faster), (high, slower) in pairwise(points):
        if slower < 0:
            return f"{low + (high - low) * faster / (faster - slower):.2f}"
    return f"above {points[-1][0]:.2f}"


def growth(results: list[Result]) -> Iterator[str]:
    """A line a length: milliseconds of ds_sparse, and over those of half the length."""
    yield f"{'tokens':>10} " + " ".join(f"{direction + ' ms':>20} {'x half':>7}" for direction in DIRECTIONS)
    for before, result in zip([None, *results], results, strict=False):
        cells = []
        for direction in DIRECTIONS:
            row = result.row(OURS, direction)
            half = before.row(OURS, direction) if before and doubles(before.case, result.case) else None
            ratio = row.milliseconds / half.milliseconds if row and half else None
            cells.append(f"{number(row.milliseconds if row else None):>20} {number(ratio):>7}")
        yield f"{result.case.seq_len:10} " + " ".join(cells)


def doubles(before: Case, case: Case) -> bool:
    return (before.batch, before.heads, 2 * before.seq_len) == (case.batch, case.heads, case.seq_len)


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    about = asdict(result.case) | {"dtype": result.dtype, "density": result.density}
    return [
        about
        | {
            "floor_ms": result.floors.get(row.direction),
            "l2_floor_ms": result.l2_floors.get(row.direction),
            "preparation_s": result.preparation.get(row.peer),
        }
        | asdict(row)
        for row in result.rows
    ]


@dataclass(frozen=True)
class Recorded:
    """What a row of the JSON has beside its case and its `Row`."""

    dtype: str
    density: float
    direction: str
    peer: str
    floor_ms: float | None = None
    l2_floor_ms: float | None = None
    preparation_s: float | None = None


def restore(rows: Sequence[Mapping[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    results = []
    for (case, dtype), group in groupby(rows, key=lambda row: (restored(Case, row), restored(Recorded, row).dtype)):
        recorded, measured = [], []
        for row in group:
            recorded.append(restored(Recorded, row))
            measured.append(restored(Row, row))
        results.append(
            Result(
                case,
                dtype,
                recorded[0].density,
                {row.direction: row.floor_ms for row in recorded if row.floor_ms is not None},
                {row.direction: row.l2_floor_ms for row in recorded if row.l2_floor_ms is not None},
                measured,
                {row.peer: row.preparation_s for row in recorded if row.preparation_s is not None},
            )
        )
    return results


def versions() -> dict[str, str]:
    """Those of the peers' packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found
