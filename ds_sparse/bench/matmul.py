"""`ds_sparse bench matmul`: MatMul and Softmax, alone and as attention, beside what PyTorch offers for the same job."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from .. import reference
from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops import MatMul, Softmax
from ..tools.block_sizes import BLOCK_SIZES
from .bsr import NO_BACKWARD, bsr_operations
from .command import NO_FLOOR, add_by_device, add_sizes, listed, one_of
from .floors import ATTENTION, SCORES, SOFTMAX, TRANSPOSED, VALUES, Size
from .layouts import LAYOUTS, make_layout
from .machine import BACKWARD, DIRECTIONS, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Columns, Table, also, beside, in_ms, percent, shape_of, takes
from .references import Piece, block_rows, sdpa
from .registry import Build, Peer
from .run import Operation
from .runs import Result, Row
from .steps import FIELDS, Calls, StepsProblem, dense, has_floors, ours, over_floor, page
from .text import Column, lacking, milliseconds_in, table

JOBS = {"sdd": SCORES, "softmax": SOFTMAX, "dsd": VALUES, "dds": TRANSPOSED, "attention": ATTENTION}
"""Our operations, which take live blocks alone, and who does the same job densely. Softmax gets scores that are scaled
already: others would need a pass of their own for that."""

BSR = "torch.sparse"

MASK, IN_PARTS, LOOP = "SDPA bool mask", "dense attention in parts", "loop over block rows"
"""Other ways to attention."""

SCORES_ON_A_GPU = 48 * 4096**2
"""Scores, live or not, of all heads and sequences: with as many, cases take 50 us and more. Without a batch it is as
many sequences on a GPU as there is room for, one at least."""

DESCRIPTION = (
    "Verifies the operations against float64, then times them in turns beside dense PyTorch and, on a GPU, "
    "torch.sparse's block-sparse operations. 'x dense' is the ratio to the dense counterpart. 'of floor', on a "
    "GPU, is the share of what perfect sparsity allows: the largest of the bytes of live blocks and operands at "
    "the rate of a copy, of FLOPs at that of a matrix product, and of the bytes from L2 that tiles of 128 rows ask "
    "for at that of reads from L2, all measured here, with the name of the one that binds. "
    f"{NO_FLOOR} 'break-even' is the density from which on dense would be faster. A peer that does not take a case "
    "is named with the reason."
)


@dataclass(frozen=True)
class Case:
    """One line of the grid. T x T scores of H heads with D numbers each, in B sequences."""

    layout: str
    block: int
    dtype: str
    batch: int = 1
    heads: int = 12
    seq_len: int = 2048
    head_dim: int = 64

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def name(self) -> str:
        return f"{self.layout} block {self.block} {self.dtype}"


class Problem(StepsProblem):
    """A case on a device. layout: bool (1, R, R) there.

    Raises:
        UsageError: tokens or a block that the layout cannot have.
    """

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        self.layout = make_layout(case.layout, case.block, case.seq_len).to(device)
        ours, size = our_operations(self.layout, case.block, case.head_dim), Size.of(case, self.layout)
        super().__init__(case, size, device, ours, JOBS, scale_first=True, part=case.seq_len)

    @cached_property
    def bsr(self) -> Calls:
        with warnings.catch_warnings():
            # That block-sparse rows are in beta state, and that their parameters are not tuned for this GPU.
            warnings.simplefilter("ignore")
            return bsr_operations(self.layout, self.case.block, self.case.batch * self.case.heads, self.dtype)

    def verify(self, name: str, peer: Peer) -> None:
        if name == LOOP:  # in half precision its gradients round from block row to block row
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().verify(name.removeprefix(f"{BSR} "), peer)

    def meaning(self) -> Calls:
        layout, block = self.layout, self.case.block
        return {
            "sdd": lambda query, key: reference.matmul(query, key, layout, block, "sdd", False, True),
            "softmax": lambda scores: reference.softmax(scores, layout, block, 1),
            "dsd": lambda probs, value: reference.matmul(probs, value, layout, block, "dsd", False, False),
            "dds": lambda value, probs: reference.matmul(value, probs, layout, block, "dds", False, True),
        }

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        return block_rows(self.layout[0].cpu(), self.case.block, self.device)


def our_operations(layout: Tensor, block: int, head_dim: int) -> Calls:
    index, scale = BlockIndex.build(layout, block), head_dim**-0.5
    sdd, dsd = MatMul(index, block, "sdd", trans_b=True), MatMul(index, block, "dsd")
    softmax = Softmax(index, block)
    return {
        "sdd": sdd,
        "softmax": softmax,
        "dsd": dsd,
        "dds": MatMul(index, block, "dds", trans_b=True),
        "attention": lambda query, key, value: dsd(softmax(sdd(query, key), scale=scale), value),
    }


def bsr(name: str) -> Build:
    def build(problem: Problem) -> Peer:
        inputs = None if name == "attention" else problem.operands(name)
        return Peer(problem.bsr[name], inputs, JOBS[name], no_backward=NO_BACKWARD)

    return build


def in_parts(problem: Problem) -> Peer:
    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * problem.case.scale).softmax(-1) @ value

    return Peer(call, beside=ATTENTION, dense=True)


def loop(problem: Problem) -> Peer:
    """Attention as a user writes it without us: each block row against its gathered keys."""
    block, live_tokens = problem.case.block, problem.layout[0].repeat_interleave(problem.case.block, 1)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = []
        for row, live in enumerate(live_tokens):
            tokens = live.nonzero().flatten()
            keys, values = key.index_select(2, tokens), value.index_select(2, tokens)
            scores = query[:, :, row * block : (row + 1) * block] @ keys.mT * problem.case.scale
            rows.append(scores.softmax(-1) @ values)
        return torch.cat(rows, dim=2)

    return Peer(call, beside=ATTENTION)


def options(parser: argparse.ArgumentParser) -> None:
    operations = {"cpu": list(JOBS), "cuda": [name for name in JOBS if name != "attention"]}
    add_by_device(parser, "--operations", listed(one_of(JOBS)), ", ".join(JOBS), operations)
    layouts = {
        "cpu": ["fixed", "bslongformer", "bslongformer-1"],
        "cuda": ["bslongformer-9", "random-5", "random-25", "dense-row"],
    }
    said = f"{', '.join(LAYOUTS)}, with the density in percent"
    add_by_device(parser, "--layout", listed(one_of(LAYOUTS)), said, layouts)
    sizes = f"block sizes: {', '.join(map(str, BLOCK_SIZES))}"
    add_by_device(parser, "--block", listed(block), sizes, {"cpu": [64, 16], "cuda": [16, 32, 64, 128]})
    add_sizes(
        parser,
        seq_len={"cpu": [2048], "cuda": [4096]},
        heads={"cpu": [12], "cuda": [4]},
        batch={"cpu": [1], "cuda": None},
        in_words="1; on a GPU as many as have 48 x 4096 x 4096 scores",
    )


def block(text: str) -> int:
    """argparse type: a block size that layouts can have."""
    return int(one_of(list(map(str, BLOCK_SIZES)))(text))


def cases(args: argparse.Namespace) -> list[Case]:
    grid = product(args.heads, args.batch or [None], args.dtype, args.seq_len, args.head_dim, args.layout, args.block)
    return [
        Case(layout, block, dtype, batch or max(1, SCORES_ON_A_GPU // (heads * seq_len**2)), heads, seq_len, head_dim)
        for heads, batch, dtype, seq_len, head_dim, layout, block in grid
    ]


def names(args: argparse.Namespace) -> list[str]:
    """Operation by operation: ours, that of torch.sparse, and dense PyTorch's."""
    found = []
    for name in args.operations:
        found += [name, f"{BSR} {name}", JOBS[name], *((MASK, IN_PARTS, LOOP) if name == "attention" else ())]
    return found


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, ratio to the dense counterpart, on a GPU the share of the floor; the break-even densities.

    That is the density at which the time would be the dense one's if it grew with the density, as it does but for the
    bytes of dense operands; "none" where it would be shorter even with all blocks.
    """
    (result,) = results
    case, live = result.case, result.about.density
    yield (
        f"{case.name}, density {live:.1%}, B {case.batch}, H {case.heads}, T {case.seq_len}, D {case.head_dim}; "
        f"medians of {result.rounds} rounds"
    )
    columns = [
        milliseconds_in(8),
        Column("x dense", 8, lambda row: to_dense(row, in_three_digits)),
        Column("of floor", 10, lambda row: f"{1 / row.to_floor:.0%} {row.bound}" if row.to_floor else ""),
    ]
    yield from table(result, 25, columns[: 3 if has_floors(results) else 2], DIRECTIONS, dash="<")

    def break_even(row: Row | None) -> str:
        if row is None or not row.to_dense:
            return "-"
        return f"{live / row.to_dense:.1%}" if live < row.to_dense else "none"

    if mine := measured_of_ours(results):
        densities = (f"{name} {' / '.join(break_even(result.row(name, way)) for way in DIRECTIONS)}" for name in mine)
        yield f"break-even {' / '.join(DIRECTIONS)}: {', '.join(densities)}"
    yield from lacking(result)


def to_dense(row: Row, write: Callable[[float], str]) -> str:
    return "-" if row.to_dense is None else write(row.to_dense)


def measured_of_ours(results: list[Result]) -> list[str]:
    return [name for name in JOBS if any(result.row(name, FORWARD) for result in results)]


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    """Milliseconds of ours in all cases, and who is faster how often."""
    yield [*of_cases(results), "", *verdicts(results)]


def of_cases(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: our milliseconds, and the share of the floor that they reach, or the ratio to the
    dense counterpart where there is no floor."""
    shown = measured_of_ours(results)
    yield f"ms ({'of floor' if has_floors(results) else 'x dense'})"
    heading = f"{'layout':14}{'block':>5} {'dtype':5}{'T':>7}{'D':>4} {'live':>6} {'':8}"
    yield heading + "".join(f"{name:>13}" for name in shown)

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        dense = to_dense(row, lambda x: f"{x:.2f}" if x < 10 else f"{x:.0f}")
        milliseconds = f"{row.milliseconds:.3f}" if row.milliseconds < 1 else in_three_digits(row.milliseconds)
        return f"{milliseconds} ({f'{1 / row.to_floor:.0%}' if row.to_floor else dense})"

    for result, way in product(results, (FORWARD, BACKWARD)):
        case = result.case
        about = f"{case.layout:14}{case.block:5} {case.dtype:5}{case.seq_len:7}{case.head_dim:4}"
        cells = (f"{cell(result.row(name, way)):>13}" for name in shown)
        yield f"{about} {result.about.density:6.1%} {way:8}" + "".join(cells)


def verdicts(results: list[Result]) -> Iterator[str]:
    """A line an operation and direction: in how many cases it is faster than the others."""
    for (name, job), way in product(JOBS.items(), (FORWARD, BACKWARD)):
        said = []
        for other in (job, f"{BSR} {name}"):
            pairs = [takes(result, other, name, (way,)) for result in results]
            ratios = [ratio for (ratio,) in pairs if ratio is not None]
            if ratios:
                said.append(f"faster than {other} in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}")
        if said:
            yield f"{name} {way}: " + ", ".join(said)


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    """Our operations with the part of their floor that they reach, notes on who else computes them; and attention."""
    dtypes = [result.case.dtype for result in results]
    start: Columns = {
        "layout, density": lambda r: (
            f"{r.case.layout}, block {r.case.block}, {percent(r.about.density)}" + also(dtypes, r.case.dtype)
        ),
        SHAPE: shape_of,
    }
    found = {}
    shown = measured_of_ours(results)
    if others := {name: (JOBS[name], f"{BSR} {name}") for name in shown if name != "attention"}:
        found["operations"] = page(start, results, list(others), others, (FORWARD, BACKWARD))
    if "attention" in shown:
        ways = (FORWARD, TRAIN)
        mine: Columns = {"`attention`, ms": in_ms("attention", ways)}
        attentions = {name: name for name in (ATTENTION, MASK, LOOP)}
        found["attention"] = beside({**start, **mine}, results, "attention", attentions, ways)
    return found


OPERATION = Operation(
    name="matmul",
    description=DESCRIPTION,
    dtypes={"cpu": ["fp32", "bf16"], "cuda": ["bf16"]},
    seconds={"cpu": 60, "cuda": 5},
    case=Case,
    problem=Problem,
    peers={
        **ours(JOBS),
        **{f"{BSR} {name}": bsr(name) for name in JOBS},
        **{job: dense(job) for job in JOBS.values() if job != ATTENTION},
        ATTENTION: sdpa(beside=ATTENTION),
        MASK: sdpa(beside=ATTENTION, mask=lambda problem: to_token_mask(problem.layout, problem.case.block)[None]),
        IN_PARTS: in_parts,
        LOOP: loop,
    },
    ours=tuple(JOBS),
    options=options,
    cases=cases,
    names=names,
    numbers=over_floor,
    lines=lines,
    summary=summary,
    pages=pages,
    key="name",
    fields=FIELDS,
    rates=True,
)
