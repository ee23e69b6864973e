"""`ds_sparse bench attention`: fused attention on live blocks beside every peer that computes it or a part of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops import block_sparse_attention
from . import flex
from .cases import BREAK_EVEN, GROWTH, TABLE, Case
from .command import add_cases, add_peers, chosen, require_half_precision
from .floors import Ceilings, Size
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Table, also, beside, milliseconds, numbers, over, pair, percent, spans
from .matmul import our_operations
from .reasons import Unsupported
from .references import AttentionProblem, Piece, block_rows
from .registry import Operation, Peer, Result, Row
from .text import columns, lacking, number

OURS = "ds_sparse"

DENSE = {"cpu": "sdpa", "cuda": "cudnn"}
"""The peer that says what dense attention costs on a device."""

DEFAULTS = {
    "cpu": [OURS, "composition", "sdpa", "sdpa-mask", "flex"],
    "cuda": [OURS, "composition", "cudnn", "flash", "flex"],
}
"""Peers of a device."""

QUICK = {"cpu": [OURS, "composition", "sdpa", "sdpa-mask"], "cuda": [OURS, "composition", "cudnn", "flash"]}
"""None of these has to be compiled."""

DESCRIPTION = (
    "Verifies fused attention and its peers against float64, outputs and gradients, then times them in turns. A "
    "peer that does not take a case is named with the reason. TFLOP/s count live blocks alone. 'x floor' is the "
    "ratio to the larger of those FLOPs at the best dense attention's rate and of the bytes of all operands at a "
    "copy's rate, on a CPU to density times the dense time; 'x ours' to ds_sparse's time. On a CPU the cases are "
    "cut to one sequence, four heads and 2,048 tokens, which their names say (-2k), those of --growth to one head."
)


class Problem(AttentionProblem):
    """A case on a device. layout: bool (H or 1, R, C) there."""

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        flex.forget()
        self.case, self.dtype = case, DTYPES[case.dtype]
        self._on_cpu = case.layout()
        self.layout = self._on_cpu.to(device)
        self.size = Size.of(self._on_cpu, case.block, case.batch, case.heads, case.head_dim, self.dtype.itemsize)
        super().__init__((case.batch, case.heads, case.seq_len, case.head_dim), self.dtype, device, case.block)

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        live = self._on_cpu[head % len(self._on_cpu)]
        return block_rows(torch.ones_like(live) if peer.dense else live, self.case.block, self.device)


def fused(problem: Problem) -> Peer:
    index = BlockIndex.build(problem.layout, problem.case.block)
    attention: Callable[..., Any] = block_sparse_attention
    return Peer(lambda query, key, value: attention(query, key, value, index))


def composition(problem: Problem) -> Peer:
    return Peer(our_operations(problem.layout, problem.case.block, problem.case.head_dim)["attention"])


def sdpa_mask(problem: Problem) -> Peer:
    mask = to_token_mask(problem.layout, problem.case.block)[None]
    return Peer(lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask))


def sdpa_by(backend: SDPBackend) -> Callable[[Problem], Peer]:
    """PyTorch's dense attention by one backend, which PyTorch alone would not always choose."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value)

    return lambda problem: Peer(call, dense=True)


def flex_by(tile: int | None, mode: str | None) -> Callable[[Problem], Peer]:
    """FlexAttention, compiled in a mode; its block mask has tiles of so many tokens, or of the layout's block. On a CPU
    it has no backward, and refuses tensors that require gradients."""

    def build(problem: Problem) -> Peer:
        block = problem.case.block
        if tile is None and block >= 128:
            raise Unsupported("the same as flex-max for blocks of 128")
        if tile is None and block < 32:
            raise Unsupported("its backward has no tiles below 32")
        call = flex.compiled(flex.of_layout(problem.layout, block, tile or block), mode)
        if problem.device.type == "cpu":
            return Peer(lambda *qkv: call(*(x.detach() for x in qkv)), no_backward=flex.ON_CPU)
        return Peer(call)

    return build


def options(parser: argparse.ArgumentParser) -> None:
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument(
        "--break-even",
        action="store_true",
        help="random blocks at densities of 10 to 90 %% in place of the table: from which on is dense faster?",
    )
    grids.add_argument(
        "--growth",
        action="store_true",
        help="a window and one global block over 8k to 128k tokens, and one head of 1M, in place of the table",
    )
    add_cases(parser, TABLE, "fixed-*,random-64")
    add_peers(
        parser,
        OPERATION.peers,
        dict.fromkeys(DEFAULTS),
        in_words=f"on a CPU {','.join(DEFAULTS['cpu'])}; on a GPU {','.join(DEFAULTS['cuda'])}, for --break-even "
        "ds_sparse,cudnn, for --growth ds_sparse; flex-max and flex-blocks are autotuned for a minute a case",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a first look: at most 3 rounds, and no peer that has to be compiled"
    )


def cases(args: argparse.Namespace) -> list[Case]:
    require_half_precision(args, "peers and the floors")
    grid = chosen(BREAK_EVEN if args.break_even else GROWTH if args.growth else TABLE, args.cases)
    if args.device == "cpu":
        small = [case.small(heads=1, seq_len=case.seq_len) if args.growth else case.small() for case in grid]
        # Cases that differ in what was cut away are one.
        grid = list({case.name: case for case in small}.values())
    return [replace(case, dtype=dtype) for dtype, case in product(args.dtype, grid)]


def names(args: argparse.Namespace) -> list[str]:
    if args.peers or args.growth:
        return args.peers or [OURS]
    if args.break_even:
        return [OURS, DENSE[args.device]]
    return (QUICK if args.quick else DEFAULTS)[args.device]


def numbers_of(
    problem: Problem, peer: Peer | None, row: Row, medians: Mapping[tuple[str, str], float]
) -> dict[str, float | None]:
    floors, l2_floors = floors_of(problem.size, problem.device, problem.dtype, medians)
    floor = floors.get(row.direction)
    found = {"floor_ms": floor, "l2_floor_ms": l2_floors.get(row.direction)}
    if row.milliseconds is None:
        return found
    ways = (FORWARD, BACKWARD) if row.direction == TRAIN else (row.direction,)
    flops = sum(problem.size.attention(way).flops for way in ways)
    to_floor = row.milliseconds / floor if floor else None
    return found | {"tflops": flops / row.milliseconds / 1e9, "to_floor": to_floor}


def floors_of(
    size: Size, device: torch.device, dtype: torch.dtype, medians: Mapping[tuple[str, str], float]
) -> tuple[dict[str, float], dict[str, float]]:
    """By direction: the floor, of a CPU the density times dense attention's time, and what L2 alone asks for; empty
    where they are not known."""
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


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, TFLOP/s on live blocks, ratios to the floor and to ds_sparse, of every peer."""
    (result,) = results
    case = result.case
    yield (
        f"{case.name}: {case.structure}, block {case.block}, density {result.about.density:.1%}, B {case.batch}, "
        f"H {case.heads}, T {case.seq_len}, D {case.head_dim}, {case.dtype}; medians of {result.rounds} rounds"
    )
    if floors := result.by_direction("floor_ms"):
        line = "floor " + " / ".join(f"{floors[direction]:.3f}" for direction in DIRECTIONS) + " ms"
        if of_l2 := result.by_direction("l2_floor_ms"):
            line += ", from L2 alone " + " / ".join(f"{ms:.3f}" for ms in of_l2.values()) + " ms"
        yield line

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        ratios = f"{number(row.to_floor):>7} {number(row.to_ours):>7}"
        return f"{in_three_digits(row.milliseconds):>7} {row.tflops:8.3g} {ratios}"

    yield from columns(result, 16, f" {'ms':>7} {'TFLOP/s':>8} {'x floor':>7} {'x ours':>7}", cell, DIRECTIONS)
    yield from lacking(result, 16)
    times = {row.name: row.preparation_s for row in result.rows if row.preparation_s is not None}
    spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in times.items() if seconds >= 1)
    if spent:
        yield f"seconds to build and verify: {spent}"


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    """For each dtype ours beside the fastest peer, and the densities or lengths that were asked for."""
    for dtype in dict.fromkeys(result.case.dtype for result in results):
        of_dtype = [result for result in results if result.case.dtype == dtype]
        yield fastest(of_dtype)
        if args.break_even:
            yield break_even(of_dtype, DENSE[args.device])
        if args.growth:
            yield growth(of_dtype)


def fastest(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: ds_sparse, and the fastest peer's time over ours."""
    yield f"{'ds_sparse':24}{'':8} {'ms':>8} {'TFLOP/s':>8} {'x floor':>8} {'best peer':>20}"
    for result, direction in product(results, (FORWARD, BACKWARD)):
        row = result.row(OURS, direction)
        start = f"{result.case.name:24}{direction:8}"
        if row is None:
            yield f"{start} {'-':>8}"
            continue
        others = [other for name in result.measured if name != OURS and (other := result.row(name, direction))]
        best = min(others, key=lambda other: other.milliseconds, default=None)
        said = f"{best.name} {number(best.to_ours)}" if best else "-"
        yield f"{start} {in_three_digits(row.milliseconds):>8} {row.tflops:8.3g} {number(row.to_floor):>8} {said:>20}"


def by_block(results: list[Result]) -> dict[int, list[Result]]:
    """Results by block size and rising density."""
    ordered = sorted(results, key=lambda result: (result.case.block, result.about.density))
    return {
        block: [x for x in ordered if x.case.block == block] for block in dict.fromkeys(x.case.block for x in ordered)
    }


def break_even(results: list[Result], dense: str) -> Iterator[str]:
    """A line a block size: the density from which on the dense peer is faster, between the densities measured."""
    yield f"density at which {dense} is as fast as ds_sparse, {' / '.join(DIRECTIONS)}"
    for block, of_block in by_block(results).items():
        yield f"block {block:4} " + " / ".join(crossing(of_block, dense, direction) for direction in DIRECTIONS)


def crossing(results: list[Result], dense: str, direction: str) -> str:
    """Where the time of `dense` over ours falls below 1, by a straight line in its logarithm."""
    points = [
        (result.about.density, math.log(row.to_ours))
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


def over_half(results: list[Result]) -> Iterator[tuple[Result, tuple[float | None, ...], tuple[float | None, ...]]]:
    """Results with the times of ours in each direction, and these over those of half the length."""
    for before, result in zip([None, *results], results):
        case, now = result.case, milliseconds(result, OURS, DIRECTIONS)
        half: tuple[float | None, ...] = (None,) * len(now)
        if before and (before.case.batch, before.case.heads, 2 * before.case.seq_len) == (
            case.batch,
            case.heads,
            case.seq_len,
        ):
            half = milliseconds(before, OURS, DIRECTIONS)
        yield result, now, over(now, half)


def growth(results: list[Result]) -> Iterator[str]:
    """A line a length: milliseconds of ds_sparse, and over those of half the length."""
    yield f"{'tokens':>10} " + " ".join(f"{direction + ' ms':>20} {'x half':>7}" for direction in DIRECTIONS)
    for result, *cells in over_half(results):
        yield f"{result.case.seq_len:10} " + " ".join(f"{number(x):>20} {number(y):>7}" for x, y in zip(*cells))


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    if args.break_even:
        dense = DENSE[args.device]
        found = [
            [str(block), *(crossing(of_block, dense, way) for way in DIRECTIONS)]
            for block, of_block in by_block(results).items()
        ]
        return {"break-even": Table(["block", *(f"{way}, `{dense}` as fast at" for way in DIRECTIONS)], found)}
    if args.growth:
        grown = list(over_half(results))
        found = [
            [
                f"{result.case.seq_len:,}",
                f"{result.case.batch}, {result.case.heads}, {result.case.head_dim}",
                pair(now),
                pair(ratios, lambda x: f"{x:.2f}"),
            ]
            for result, now, ratios in grown
        ]
        notes = list(spans("Twice the tokens take", "half of them", [ratios for *_, ratios in grown], DIRECTIONS))
        return {
            "growth": Table(["tokens", "B, H, D", "ms", "times those of half the tokens"], found, DIRECTIONS, notes)
        }
    ways = (FORWARD, BACKWARD)
    dtypes = [result.case.dtype for result in results]
    shown: dict[str, Callable[[Result], str]] = {
        "layout, density": lambda r: f"{r.case.structure}, block {r.case.block}, {percent(r.about.density)}",
        SHAPE: lambda r: (
            f"{r.case.batch}, {r.case.heads}, {r.case.seq_len}, {r.case.head_dim}{also(dtypes, r.case.dtype)}"
        ),
        "ms": lambda r: pair(milliseconds(r, OURS, ways)),
        "TFLOP/s": lambda r: pair(numbers(r, OURS, ways, "tflops"), lambda tflops: f"{tflops:.3g}"),
    }
    peers = {row.name: f"`{row.name}`" for result in results for row in result.rows if row.name != OURS}
    return {"cases": beside(shown, results, OURS, peers, ways)}


OPERATION = Operation(
    name="attention",
    description=DESCRIPTION,
    case=Case,
    problem=Problem,
    peers={
        OURS: fused,
        "composition": composition,
        "sdpa": lambda problem: Peer(scaled_dot_product_attention, dense=True),
        "sdpa-mask": sdpa_mask,
        "cudnn": sdpa_by(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa_by(SDPBackend.FLASH_ATTENTION),
        "flex": flex_by(flex.TILE, None),
        "flex-max": flex_by(flex.TILE, "max-autotune-no-cudagraphs"),
        "flex-blocks": flex_by(None, "max-autotune-no-cudagraphs"),
    },
    ours=(OURS,),
    options=options,
    cases=cases,
    names=names,
    numbers=numbers_of,
    lines=lines,
    summary=summary,
    pages=pages,
    fields=("floor_ms", "l2_floor_ms", "preparation_s", "tflops", "to_floor", "to_ours"),
    trains=True,
    rates=True,
    packages=["triton"],
)
"""MatMul, Softmax and MatMul are the composition; sdpa is dense, by the backend of PyTorch's choice; flex-max and
flex-blocks are autotuned, which takes long, and flex-blocks has the layout's own blocks for tiles."""
