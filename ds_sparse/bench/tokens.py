"""`ds_sparse bench tokens`: the steps from dense attention to `sparse_attn`, over token pairs that all heads share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from ..index import TokenIndex
from ..ops import (
    gather_attention,
    jagged_attention,
    masked_attention,
    sparse_attn,
    sparse_matmul,
    sparse_matmul_vo,
    torch_sparse_attention,
)
from ..ops.token_steps import weighted_sums
from ..tools.arguments import number, positive
from ..verify.accuracy import output_and_gradients
from . import flex
from .command import add_peers, add_sizes, listed, one_of
from .floors import l2_read_rate
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Columns, Table, in_ms, made_of, milliseconds, notes_on, numbers, pair, percent, shape_of
from .reasons import Unsupported
from .references import AttentionProblem, Piece, block_rows, sdpa
from .registry import Build, Peer
from .run import Medians, Operation
from .runs import Result, Row

DIRECTIONS = (FORWARD, TRAIN)

COLUMNS = 5
"""Sparsities beside each other in a table; more go below."""

L2_FLOOR = "gather from L2"
"""The line of what no kernel over pairs can pass without sharing what it reads."""

MEMORY = 4 << 30
"""Bytes of temporaries that a step may take; of more, it is not run."""

OURS, DENSE, SDPA, TORCH_SPARSE, FLEX, LOOP = "sparse_attn", "masked", "sdpa", "torch.sparse", "flex", "C++ loop"

SHOWN = (OURS, TORCH_SPARSE, SDPA, FLEX, LOOP)
"""Steps that a table for a page has a column of, as far as they were measured."""

DESCRIPTION = (
    "The steps from dense attention to sparse_attn over token pairs, which all heads share: each is verified "
    "against float64, output and gradients, then all are timed in turns. Says from which sparsity on a step beats "
    "dense attention. A step that does not take a case is named with the reason."
)


@dataclass(frozen=True)
class Case:
    """One line of the grid. d_model / heads numbers a head; `pattern` is one of `PATTERNS`."""

    seq_len: int
    d_model: int
    heads: int
    sparsity: float
    pattern: str = "random"
    dtype: str = "fp32"
    batch: int = 1

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def name(self) -> str:
        return (
            f"T {self.seq_len}, d_model {self.d_model}, heads {self.heads}, {self.sparsity:.0%} sparse {self.pattern}"
        )

    def mask(self) -> Tensor:
        """bool (T, T) on the CPU, the same at every call."""
        return PATTERNS[self.pattern](self.seq_len, 1 - self.sparsity)


@dataclass(frozen=True)
class Pairs:
    """Facts of a case: pairs of one head."""

    pairs: int


def random_mask(tokens: int, density: float) -> Tensor:
    return torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0)) < density


def window_mask(block: int, tokens: int, density: float) -> Tensor:
    """A window of blocks around the diagonal, the first block row and column, with the width that comes nearest to the
    density."""
    side = torch.arange(-(-tokens // block))
    far = (side[:, None] - side).abs()
    first = (side[:, None] == 0) | (side == 0)
    layouts = [first | (far <= width) for width in range(len(side))]
    live = min(layouts, key=lambda layout: abs(layout.double().mean().item() - density))
    return live.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]


PATTERNS: dict[str, Callable[[int, float], Tensor]] = {
    "random": random_mask,
    "window-16": partial(window_mask, 16),
    "window-64": partial(window_mask, 64),
}
"""Patterns of pairs: from tokens and a density to bool (T, T)."""


class Problem(AttentionProblem):
    """A case on a device: its mask, and the index of its pairs; the last head of the last sequence is verified."""

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        self.case, self.top = case, args.profile
        self._on_cpu = case.mask()
        self.mask, self.index = self._on_cpu.to(device), TokenIndex.from_mask(self._on_cpu).to(device).prepared()
        shape = (case.batch, case.heads, case.seq_len, case.head_dim)
        super().__init__(shape, DTYPES[case.dtype], device, case.seq_len, [(case.batch - 1, case.heads - 1)])

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        return block_rows(torch.ones_like(self._on_cpu) if peer.dense else self._on_cpu, 1, self.device)

    def refuse(self, numbers_a_pair: int, numbers_a_score: int = 0) -> None:
        """Raises Unsupported where so many numbers of temporaries of each pair, and of each of the T * T scores, take
        more than `MEMORY`."""
        numbers = numbers_a_pair * self.index.num_pairs + numbers_a_score * self.case.seq_len**2
        size = numbers * self.case.batch * self.case.heads * DTYPES[self.case.dtype].itemsize
        if size > MEMORY:
            raise Unsupported(f"takes {size / 2**30:.1f} GiB")


def of_pairs(function: Callable[..., Any], numbers: Callable[[int], int]) -> Build:
    """A step over the pairs. numbers: how many of temporaries there are of a pair, for a head size, while it is
    differentiated."""

    def build(problem: Problem) -> Peer:
        problem.refuse(numbers(problem.case.head_dim))
        return Peer(lambda q, k, v: function(q, k, v, problem.index), beside=DENSE)

    return build


def of_scores(function: Callable[..., Any], numbers: int, word: str) -> Build:
    """A step over all scores that takes the mask by a word, with so many numbers of temporaries of each score."""

    def build(problem: Problem) -> Peer:
        problem.refuse(0, numbers)
        return Peer(partial(function, **{word: problem.mask}), beside=DENSE)

    return build


def native_scores(product: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, index: TokenIndex) -> Tensor:
    """A native product alone: `product(q, k, index)` gives the scores, `index_add` the rest."""
    scores = product(q, k, index).flatten(0, 1) * q.shape[-1] ** -0.5
    sums, totals = weighted_sums(index, scores, v.flatten(0, 1))
    return (sums / totals.masked_fill(totals == 0, 1).unsqueeze(-1)).to(q.dtype).view(v.shape)


def flex_attention(problem: Problem) -> Peer:
    """Compiled FlexAttention, which leaves out tiles without a pair and looks the mask up in the others."""
    if problem.device.type != "cuda":
        raise Unsupported("on CUDA only: on a CPU it has no backward")
    mask = problem.mask
    flex.forget()
    tiles = flex.of_scores(lambda b, h, q, k: mask[q, k], 1, problem.case.seq_len, problem.device)
    return Peer(flex.compiled(tiles), beside=DENSE)


percentage = number(float, "a percentage from 0 to below 100", lambda x: 0 <= x < 100)


def options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, seq_len=[512, 1024, 2048], heads=[1, 12])
    parser.add_argument(
        "--sparsity",
        type=listed(lambda text: percentage(text) / 100),
        default=[0.5, 0.75, 0.9, 0.95, 0.99],
        help="percent of the scores that are not computed (default: 50,75,90,95,99)",
    )
    parser.add_argument(
        "--pairs",
        type=listed(one_of(PATTERNS)),
        default=["random"],
        help=f"{', '.join(PATTERNS)}: how they lie (default: random)",
    )
    add_peers(parser, OPERATION.peers, list(OPERATION.peers), in_words="all")
    parser.add_argument(
        "--profile", type=positive, default=0, metavar="N", help="also name the N operators that take a step's time"
    )


def cases(args: argparse.Namespace) -> list[Case]:
    shapes = product(args.dtype, args.pairs, args.seq_len, args.heads, args.head_dim, args.batch, args.sparsity)
    return [
        Case(seq_len, heads * head_dim, heads, sparsity, pattern, dtype, batch)
        for dtype, pattern, seq_len, heads, head_dim, batch, sparsity in shapes
    ]


def numbers_of(problem: Problem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, Any]:
    """The time of what attention over the pairs of each head has to bring from L2 where nothing is shared: a key and a
    value row for each pair; backward those for the gradients of queries, and a query and a gradient row for those of
    keys and values. And the operators, if they were asked for."""
    case = problem.case
    found: dict[str, Any] = {}
    rate = l2_read_rate(problem.device) if problem.device.type == "cuda" else None
    if rate is not None:
        rows = case.batch * case.heads * problem.index.num_pairs * {FORWARD: 2, TRAIN: 6}[row.direction]
        found["l2_floor_ms"] = rows * case.head_dim * DTYPES[case.dtype].itemsize / rate
    if problem.top and peer is not None and row.milliseconds is not None and row.direction == FORWARD:
        found["operators"] = top_operators(problem, peer)
    return found


def top_operators(problem: Problem, peer: Peer) -> list[str]:
    """The operators of a call that take most time by themselves, each with its share and how often it is called."""
    on_cuda = problem.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities) as measured:
        if peer.no_backward:
            peer.call(*problem.inputs)
        else:
            output_and_gradients(peer.call, problem.inputs, problem.grad)
        if on_cuda:
            torch.cuda.synchronize()
    events = measured.key_averages()

    def own_time(event: Any) -> float:
        return event.self_device_time_total if on_cuda else event.self_cpu_time_total

    total = sum(map(own_time, events))
    largest = sorted(events, key=own_time, reverse=True)[: problem.top]
    return [f"{own_time(event) / total:.0%} {event.key} x{event.count}" for event in largest if total]


def lines(results: list[Result]) -> Iterator[str]:
    """The results of one shape and pattern: milliseconds, a line a step and a column a sparsity, and who beats
    dense."""
    case = results[0].case
    steps = list(dict.fromkeys(row.name for row in results[0].rows))
    yield (
        f"B {case.batch}, T {case.seq_len}, d_model {case.d_model}, heads {case.heads}, {case.pattern} pairs, "
        f"{case.dtype}; ms of {FORWARD} / {TRAIN}"
    )

    def in_line(name: str, texts: Iterable[str]) -> str:
        return f"{name:16}" + "".join(f"{text:>20}" for text in texts)

    for first in range(0, len(results), COLUMNS):
        some = results[first : first + COLUMNS]
        yield in_line("sparsity", (f"{sparsity_of(result):.1%}" for result in some))
        yield in_line("pairs", (str(result.about.pairs) for result in some))
        for name in steps:
            yield in_line(name, (pair(milliseconds(result, name, DIRECTIONS)) or "- / -" for result in some))
        if results[0].by_direction("l2_floor_ms"):
            yield in_line(L2_FLOOR, (pair(result.by_direction("l2_floor_ms").values()) for result in some))
    for other in (name for name in (DENSE, SDPA) if name in steps):
        beats = (
            f"{name} {' / '.join(beats_from(results, name, other, direction) for direction in DIRECTIONS)}"
            for name in steps
            if name != other
        )
        yield f"beats {other} from: {', '.join(beats)}"
    reasons: dict[tuple[str, str], list[Case]] = {}
    for result in results:
        for name, reason in dict.fromkeys((row.name, row.reason) for row in result.rows if row.reason):
            reasons.setdefault((name, reason), []).append(result.case)
    for (name, reason), whose in reasons.items():
        where = ", ".join(f"{case.sparsity:.0%}" for case in whose) + " " if len(whose) < len(results) else ""
        yield f"{where}{name}: {reason}"
    for result in results:
        for row in result.rows:
            if row.operators and row.direction == FORWARD:
                yield f"{result.case.sparsity:.0%} {row.name}: {', '.join(row.operators)}"


def sparsity_of(result: Result) -> float:
    return 1 - result.about.pairs / result.case.seq_len**2


def beats_from(results: list[Result], name: str, other: str, direction: str) -> str:
    """The sparsity from which on, of those measured, a step is faster than another; '-' if it is not at the highest."""
    least = "-"
    for result in sorted(results, key=lambda result: result.case.sparsity, reverse=True):
        mine, theirs = result.row(name, direction), result.row(other, direction)
        if mine is None or theirs is None or mine.milliseconds >= theirs.milliseconds:
            break
        least = f"{result.case.sparsity:.0%}"
    return least


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    """A line a step: its time over that of `sparse_attn`, the least and the largest of all cases."""
    steps = dict.fromkeys(row.name for result in results for row in result.rows if row.to_ours and row.name != OURS)
    if not steps:
        return

    def spread(step: str, direction: str) -> str:
        ratios = [x for result in results for x in numbers(result, step, (direction,), "to_ours") if x is not None]
        return f"{in_three_digits(min(ratios))} - {in_three_digits(max(ratios))}" if ratios else "-"

    yield [
        f"over the time of {OURS}, least and largest of {len(results)} cases",
        f"{'':16}" + "".join(f"{direction:>20}" for direction in DIRECTIONS),
        *(f"{step:16}" + "".join(f"{spread(step, direction):>20}" for direction in DIRECTIONS) for step in steps),
    ]


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    """A line a case: ours and others, forward / forward and backward."""
    steps = [step for step in SHOWN if any(result.row(step, FORWARD) for result in results)]
    several = [name for name in ("dtype", "pattern") if len({getattr(r.case, name) for r in results}) > 1]
    shown: Columns = {
        SHAPE: lambda r: ", ".join([shape_of(r), *(getattr(r.case, name) for name in several)]),
        "sparsity": lambda r: percent(sparsity_of(r)),
    }
    times = {f"`{step}`, ms": in_ms(step, DIRECTIONS) for step in steps}
    others = steps[1:] if OURS in steps else []
    notes = [note for step in others for note in notes_on(results, step, OURS, DIRECTIONS)]
    return {"pairs": made_of({**shown, **times}, results, DIRECTIONS, notes)}


OPERATION = Operation(
    name="tokens",
    description=DESCRIPTION,
    dtypes={"cpu": ["fp32"], "cuda": ["fp32"]},
    case=Case,
    about=Pairs,
    problem=Problem,
    peers={
        DENSE: of_scores(masked_attention, 6, "mask"),
        "gather": of_pairs(gather_attention, lambda head_dim: 8 * head_dim),
        "jagged": of_pairs(jagged_attention, lambda head_dim: 8 * head_dim),
        TORCH_SPARSE: of_pairs(torch_sparse_attention, lambda head_dim: 16),
        "sparse_matmul": of_pairs(partial(native_scores, sparse_matmul), lambda head_dim: 4 * head_dim),
        "sparse_matmul_vo": of_pairs(partial(native_scores, sparse_matmul_vo), lambda head_dim: 4 * head_dim),
        OURS: of_pairs(sparse_attn, lambda head_dim: 2),
        SDPA: sdpa(beside=DENSE),
        "sdpa+mask": of_scores(scaled_dot_product_attention, 1, "attn_mask"),
        FLEX: flex_attention,
    },
    ours=(OURS,),
    options=options,
    cases=cases,
    names=lambda args: args.peers,
    abouts=lambda problem, peers: Pairs(problem.index.num_pairs),
    numbers=numbers_of,
    lines=lines,
    summary=summary,
    pages=pages,
    key="step",
    fields=("l2_floor_ms", "operators", "to_dense", "to_ours"),
    directions=DIRECTIONS,
    shape=lambda case: replace(case, sparsity=0),
)
"""The ladder (sparse_matmul, sparse_matmul_vo: of the native operations the scores alone), and beside it PyTorch's
dense attention, that with a mask, and FlexAttention."""
