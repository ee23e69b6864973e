"""`ds_sparse bench attention`: fused attention on live blocks beside every peer that computes it or a part of it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops import block_sparse_attention
from . import flex
from .cases import BREAK_EVEN, GROWTH, TABLE, Case
from .command import add_cases, add_peers, cases_of
from .floors import Ceilings, Size
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import (
    SHAPE,
    Columns,
    Pair,
    Table,
    also,
    beside,
    in_ms,
    milliseconds,
    numbers,
    over,
    pair,
    percent,
    shape_of,
    spans,
)
from .matmul import our_operations
from .reasons import Unsupported
from .references import AttentionProblem, Piece, block_rows, sdpa
from .registry import Build, Peer
from .run import Medians, Operation
from .runs import Result, Row
from .text import Column, lacking, milliseconds_in, number, table

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
        self.size = Size.of(case, self._on_cpu)
        super().__init__((case.batch, case.heads, case.seq_len, case.head_dim), self.dtype, device, case.block)

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        live = self._on_cpu[head % len(self._on_cpu)]
        return block_rows(torch.ones_like(live) if peer.dense else live, self.case.block, self.device)


def fused(make: Callable[[Problem], dict[str, Any]] = lambda problem: {}, least_error: float = 0.0) -> Build:
    """Fused attention, also with an option that leaves results as they are, to an error: what it costs is the ratio to
    ds_sparse."""

    def build(problem: Problem) -> Peer:
        index, options = BlockIndex.build(problem.layout, problem.case.block), make(problem)
        attention: Callable[..., Any] = block_sparse_attention
        return Peer(lambda query, key, value: attention(query, key, value, index, **options), least_error=least_error)

    return build


def ones(problem: Problem, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ones(shape, dtype=dtype or problem.dtype, device=problem.device)


OPTIONS: dict[str, Build] = {
    "with-mask": fused(lambda p: {"key_padding_mask": ones(p, 1, p.case.seq_len, dtype=torch.float32)}),
    "with-rpe": fused(lambda p: {"rpe": ones(p, p.case.heads, p.case.seq_len, p.case.seq_len)}),
    "with-distance": fused(lambda p: {"distance_bias": ones(p, p.case.heads, 2 * p.case.seq_len - 1)}),
    "with-sinks": fused(lambda p: {"sinks": ones(p, p.case.heads) * float("-inf")}),
    "with-softcap": fused(lambda p: {"softcap": 1024.0}),
    "with-dropout": fused(lambda p: {"dropout_p": 2.0**-15}, least_error=0.5),
}
"""Options of our own calls. A number that is added to all scores changes no softmax, nor does a cap far above them. One
probability in 32,768 that is dropped changes most parts of a result by less than 2 %, though one that few queries see
by up to 30 %; it costs what any other does."""


def composition(problem: Problem) -> Peer:
    return Peer(our_operations(problem.layout, problem.case.block, problem.case.head_dim)["attention"])


def flex_by(tile: int | None, mode: str | None) -> Build:
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
    grids.add_argument(
        "--options",
        action="store_true",
        help="ds_sparse with one option each, in place of the default peers: a mask of keys that is added, rpe, "
        "distance_bias, sinks, a soft cap, dropout; 'x ours' is its ratio to the plain call",
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
    if args.growth:
        return cases_of(args, GROWTH, "peers and the floors", lambda case: case.small(heads=1, seq_len=case.seq_len))
    return cases_of(args, BREAK_EVEN if args.break_even else TABLE, "peers and the floors")


def names(args: argparse.Namespace) -> list[str]:
    if args.options:
        return [*(args.peers or [OURS]), *OPTIONS]
    if args.peers or args.growth:
        return args.peers or [OURS]
    if args.break_even:
        return [OURS, DENSE[args.device]]
    return (QUICK if args.quick else DEFAULTS)[args.device]


def numbers_of(problem: Problem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, float | None]:
    """The rate; and the floor, of a CPU the density times dense attention's time, and what L2 alone asks for, where
    they are known."""
    size, direction, ms = problem.size, row.direction, row.milliseconds
    works = {way: size.attention(way) for way in ((FORWARD, BACKWARD) if direction == TRAIN else (direction,))}
    floor = l2_floor = None
    if problem.device.type == "cpu":
        if dense := medians.get((DENSE["cpu"], direction)):
            floor = size.density * dense
    else:
        ceilings = Ceilings.measure(problem.device, problem.dtype)
        floor = sum(ceilings.attention_floor(work, size.head_dim, way) for way, work in works.items())
        if ceilings.l2_bytes_per_ms is not None and direction != TRAIN:
            l2_floor = works[direction].l2_bytes / ceilings.l2_bytes_per_ms
    found = {"floor_ms": floor, "l2_floor_ms": l2_floor}
    if ms is None:
        return found
    flops = sum(work.flops for work in works.values())
    return found | {"tflops": flops / ms / 1e9, "to_floor": ms / floor if floor else None}


COLUMNS = [
    milliseconds_in(8),
    Column("TFLOP/s", 8, lambda row: f"{row.tflops:.3g}"),
    Column("x floor", 7, lambda row: number(row.to_floor)),
    Column("x ours", 7, lambda row: number(row.to_ours)),
]


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

    yield from table(result, 16, COLUMNS, DIRECTIONS)
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
        best = result.fastest(direction, but=(OURS, *OPTIONS))
        said = f"{best.name} {number(best.to_ours)}" if best else "-"
        yield f"{start} {in_three_digits(row.milliseconds):>8} {row.tflops:8.3g} {number(row.to_floor):>8} {said:>20}"


def break_even(results: list[Result], dense: str) -> Iterator[str]:
    """A line a block size: the density from which on the dense peer is faster, between the densities measured."""
    yield f"density at which {dense} is as fast as ds_sparse, {' / '.join(DIRECTIONS)}"
    for block, densities in crossings(results, dense).items():
        yield f"block {block:4} {' / '.join(densities)}"


def crossings(results: list[Result], dense: str) -> dict[int, list[str]]:
    """For each block size and direction the density where the time of `dense` over ours falls below 1, by a straight
    line in its logarithm."""

    def crossing(of_block: list[Result], direction: str) -> str:
        points = [
            (result.about.density, math.log(row.to_ours))
            for result in of_block
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

    by_block: dict[int, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.case.block, result.about.density)):
        by_block.setdefault(result.case.block, []).append(result)
    return {block: [crossing(found, direction) for direction in DIRECTIONS] for block, found in by_block.items()}


def growth(results: list[Result]) -> Iterator[str]:
    """A line a length: milliseconds of ds_sparse, and over those of half the length."""
    yield f"{'tokens':>10} " + " ".join(f"{direction + ' ms':>20} {'x half':>7}" for direction in DIRECTIONS)
    for result, *cells in over_half(results):
        yield f"{result.case.seq_len:10} " + " ".join(f"{number(x):>20} {number(y):>7}" for x, y in zip(*cells))


def over_half(results: list[Result]) -> Iterator[tuple[Result, Pair, Pair]]:
    """Results with the times of ours in each direction, and these over those of half the length."""
    before: Case | None = None
    past: Pair = ()
    for result in results:
        case, now = result.case, milliseconds(result, OURS, DIRECTIONS)
        is_half = before and (before.batch, before.heads, 2 * before.seq_len) == (case.batch, case.heads, case.seq_len)
        yield result, now, over(now, past if is_half else (None,) * len(DIRECTIONS))
        before, past = case, now


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    if args.break_even:
        dense = DENSE[args.device]
        heading = ["block", *(f"{way}, `{dense}` as fast at" for way in DIRECTIONS)]
        return {"break-even": Table(heading, [[str(n), *found] for n, found in crossings(results, dense).items()])}
    if args.growth:
        grown = list(over_half(results))
        lines = [
            [
                f"{case.seq_len:,}",
                f"{case.batch}, {case.heads}, {case.head_dim}",
                pair(now),
                pair(ratios, "{:.2f}".format),
            ]
            for case, now, ratios in ((result.case, now, ratios) for result, now, ratios in grown)
        ]
        notes = list(spans("Twice the tokens take", "half of them", [ratios for *_, ratios in grown], DIRECTIONS))
        heading = ["tokens", "B, H, D", "ms", "times those of half the tokens"]
        return {"growth": Table(heading, lines, DIRECTIONS, notes)}
    ways, dtypes = (FORWARD, BACKWARD), [result.case.dtype for result in results]
    shown: Columns = {
        "layout, density": lambda r: f"{r.case.structure}, block {r.case.block}, {percent(r.about.density)}",
        SHAPE: lambda r: shape_of(r) + also(dtypes, r.case.dtype),
        "ms": in_ms(OURS, ways),
        "TFLOP/s": lambda r: pair(numbers(r, OURS, ways, "tflops"), "{:.3g}".format),
    }
    peers = {row.name: f"`{row.name}`" for result in results for row in result.rows if row.name != OURS}
    return {"cases": beside(shown, results, OURS, peers, ways)}


OPERATION = Operation(
    name="attention",
    description=DESCRIPTION,
    case=Case,
    problem=Problem,
    peers={
        OURS: fused(),
        **OPTIONS,
        "composition": composition,
        "sdpa": sdpa(),
        "sdpa-mask": sdpa(mask=lambda problem: to_token_mask(problem.layout, problem.case.block)[None]),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
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
