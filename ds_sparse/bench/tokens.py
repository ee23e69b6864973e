"""The steps from dense attention to `sparse_attn` side by side, over lists of token pairs that all heads share.

A step's output and gradients are verified before it is timed, in turns in one process; one that does not take a case,
or is wrong, is named with the reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
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
from ..verify.accuracy import attention_by_block_rows, output_and_gradients, random_tensors, require_as_accurate
from .floors import bytes_of_gathers, l2_read_rate
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits, in_turns, time_of
from .reasons import Unsupported
from .runs import by_case, restored

DIRECTIONS = (FORWARD, TRAIN)

COLUMNS = 5
"""Sparsities beside each other in a table; more go below."""

L2_FLOOR = "gather from L2"
"""The line of what no kernel over pairs can pass without sharing what it reads."""

MEMORY = 4 << 30
"""Bytes of temporaries that a step may take; of more, it is not run."""

OURS, DENSE, SDPA, TORCH_SPARSE, FLEX = "sparse_attn", "masked", "sdpa", "torch.sparse", "flex"


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

    def mask(self) -> Tensor:
        """bool (T, T) on the CPU, the same at every call."""
        return PATTERNS[self.pattern](self.seq_len, 1 - self.sparsity)


def random_mask(tokens: int, density: float) -> Tensor:
    return torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(0)) < density


def window_mask(block: int) -> Callable[[int, float], Tensor]:
    """A window of blocks around the diagonal, the first block row and column, with the width that comes nearest to the
    density."""

    def build(tokens: int, density: float) -> Tensor:
        side = torch.arange(-(-tokens // block))
        far = (side[:, None] - side).abs()
        first = (side[:, None] == 0) | (side == 0)
        layouts = [first | (far <= width) for width in range(len(side))]
        live = min(layouts, key=lambda layout: abs(layout.double().mean().item() - density))
        return live.repeat_interleave(block, 0).repeat_interleave(block, 1)[:tokens, :tokens]

    return build


PATTERNS = {"random": random_mask, "window-16": window_mask(16), "window-64": window_mask(64)}


@dataclass(frozen=True)
class Problem:
    """A case on a device: its mask, and the index of its pairs."""

    case: Case
    mask: Tensor
    index: TokenIndex


@dataclass(frozen=True)
class Step:
    """`build(problem)` gives a call with query, key and value, (B, H, T, D) each.

    Attributes:
        dense: it computes all scores, whatever the lists say.
        no_backward: why it cannot be differentiated; empty where it can.
        numbers: how many numbers of temporaries there are of a pair, for a head size, while it is differentiated.
        numbers_of_all: the same of each of the T * T scores.
    """

    build: Callable[[Problem], Callable[[Tensor, Tensor, Tensor], Tensor]]
    dense: bool = False
    no_backward: str = ""
    numbers: Callable[[int], int] = lambda head_dim: 0
    numbers_of_all: int = 0


def of_pairs(function: Callable[..., Any], **options: Any) -> Step:
    return Step(lambda problem: lambda q, k, v: function(q, k, v, problem.index), **options)


def native_scores(product: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, index: TokenIndex) -> Tensor:
    """A native product alone: `product(q, k, index)` gives the scores, `index_add` the rest."""
    scores = product(q, k, index).flatten(0, 1) * q.shape[-1] ** -0.5
    sums, totals = weighted_sums(index, scores, v.flatten(0, 1))
    return (sums / totals.masked_fill(totals == 0, 1).unsqueeze(-1)).to(q.dtype).view(v.shape)


def flex_attention(problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention, which leaves out tiles without a pair and looks the mask up in the others."""
    from torch.nn.attention import flex_attention as flex

    mask = problem.mask
    if mask.device.type != "cuda":
        raise Unsupported("on CUDA only: on a CPU it has no backward")

    def live(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[q, k]

    # After a few compilations of one function, those of the cases before, it would run uncompiled.
    torch._dynamo.reset()
    queries, keys = mask.shape
    tiles = flex.create_block_mask(live, None, None, queries, keys, device=mask.device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=tiles)


STEPS: dict[str, Step] = {
    DENSE: Step(lambda problem: lambda q, k, v: masked_attention(q, k, v, problem.mask), numbers_of_all=6),
    "gather": of_pairs(gather_attention, numbers=lambda head_dim: 8 * head_dim),
    "jagged": of_pairs(jagged_attention, numbers=lambda head_dim: 8 * head_dim),
    TORCH_SPARSE: of_pairs(torch_sparse_attention, numbers=lambda head_dim: 16),
    "sparse_matmul": of_pairs(partial(native_scores, sparse_matmul), numbers=lambda head_dim: 4 * head_dim),
    "sparse_matmul_vo": of_pairs(partial(native_scores, sparse_matmul_vo), numbers=lambda head_dim: 4 * head_dim),
    OURS: of_pairs(sparse_attn, numbers=lambda head_dim: 2),
    SDPA: Step(lambda problem: scaled_dot_product_attention, dense=True),
    "sdpa+mask": Step(
        lambda problem: lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=problem.mask), numbers_of_all=1
    ),
    FLEX: Step(flex_attention),
}
"""The ladder (sparse_matmul, sparse_matmul_vo: of the native operations the scores alone), and beside it PyTorch's
dense attention, that with a mask, FlexAttention, and the loop a learner writes in C++."""


@dataclass(frozen=True)
class Row:
    """One step in one direction; without a time, `reason` says why.

    Attributes:
        to_dense: its time over that of `masked_attention`; below 1 it is faster.
        to_ours: its time over that of `sparse_attn`; above 1 `sparse_attn` is faster.
    """

    step: str
    direction: str
    milliseconds: float | None = None
    to_dense: float | None = None
    to_ours: float | None = None
    rounds: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """A case, measured.

    Attributes:
        pairs: of one head.
        operators: the top ones of each step, if they were asked for.
        l2_floors: milliseconds by direction to bring the rows of all pairs from L2; empty if that is not measured.
    """

    case: Case
    pairs: int
    rows: list[Row]
    operators: dict[str, list[str]]
    l2_floors: dict[str, float]

    def row(self, step: str, direction: str) -> Row | None:
        """The row of a step that was measured."""
        found = (row for row in self.rows if (row.step, row.direction) == (step, direction) and not row.reason)
        return next(found, None)


def run_case(
    case: Case, names: Sequence[str], device: torch.device, repeats: int, seconds: float, top: int = 0
) -> Result:
    """Verifies the steps, then times them in turns: `repeats` rounds, or as many as begin within `seconds`, three at
    least; names the `top` operators of each by time. Never raises for a step's sake."""
    mask = case.mask()
    problem = Problem(case, mask.to(device), TokenIndex.from_mask(mask).to(device).prepared())
    shape = (case.batch, case.heads, case.seq_len, case.head_dim)
    *inputs, grad = random_tensors(4, shape, DTYPES[case.dtype], device)
    references = References(mask, inputs, grad)

    calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    reasons: dict[str, str] = {}
    for name in names:
        step = STEPS[name]
        try:
            refuse_too_large(step, problem)
            calls[name] = step.build(problem)
            verify(calls[name], step, inputs, grad, references)
        except (Unsupported, ArithmeticError, RuntimeError, ValueError) as error:
            reasons[name] = str(error).strip().splitlines()[0]
    runs = {
        (name, direction): partial(time_of, call, inputs, grad, direction, device)
        for name, call in calls.items()
        if name not in reasons
        for direction in DIRECTIONS[: 1 if STEPS[name].no_backward else None]
    }
    times = in_turns(runs, repeats, seconds, describe(case))
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    rows = []
    for name in names:
        for direction in DIRECTIONS:
            mine = medians.get((name, direction))
            if mine is None:
                rows.append(Row(name, direction, reason=reasons.get(name) or STEPS[name].no_backward))
                continue
            dense, ours = (medians.get((other, direction)) for other in (DENSE, OURS))
            rows.append(
                Row(
                    name, direction, mine, mine / dense if dense else None, mine / ours if ours else None,
                    len(times[name, direction]),
                )
            )  # fmt: skip
    done = dict.fromkeys(name for name, _ in runs)
    operators = {name: top_operators(calls[name], STEPS[name], inputs, grad, top) for name in done if top}
    return Result(case, problem.index.num_pairs, rows, operators, l2_floors(case, problem.index.num_pairs, device))


def l2_floors(case: Case, pairs: int, device: torch.device) -> dict[str, float]:
    rate = l2_read_rate(device) if device.type == "cuda" else None
    if rate is None:
        return {}
    sizes = pairs, case.batch * case.heads, case.head_dim, DTYPES[case.dtype].itemsize
    return {direction: bytes_of_gathers(*sizes, direction) / rate for direction in DIRECTIONS}


def refuse_too_large(step: Step, problem: Problem) -> None:
    case = problem.case
    numbers = step.numbers(case.head_dim) * problem.index.num_pairs + step.numbers_of_all * case.seq_len**2
    size = numbers * case.batch * case.heads * DTYPES[case.dtype].itemsize
    if size > MEMORY:
        raise Unsupported(f"takes {size / 2**30:.1f} GiB")


class References:
    """Output and gradients of the last head of the last sequence, in float64 and by plain PyTorch at the inputs'
    precision, (T, D) each; with the mask and dense, each computed when it is first needed."""

    def __init__(self, mask: Tensor, inputs: list[Tensor], grad: Tensor) -> None:
        self.mask = mask
        self.mine = [x[-1, -1] for x in (*inputs, grad)]
        self._known: dict[bool, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}

    def of(self, dense: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Plain, exact, and the sizes of the exact sums' terms."""
        if dense not in self._known:
            mask = torch.ones_like(self.mask) if dense else self.mask
            q, k, v, grad = self.mine
            plain, _ = attention_by_block_rows(q, k, v, grad, mask, 1)
            exact, terms = attention_by_block_rows(q.double(), k.double(), v.double(), grad.double(), mask, 1)
            self._known[dense] = plain, exact, terms
        return self._known[dense]


def verify(call: Callable[..., Tensor], step: Step, inputs: list[Tensor], grad: Tensor, references: References) -> None:
    """Holds output and gradients to the references, token by token.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    results = [call(*inputs)] if step.no_backward else output_and_gradients(call, inputs, grad)
    what = ("output", "gradient of query", "gradient of key", "gradient of value")
    for name, mine, plain, exact, terms in zip(what, results, *references.of(step.dense), strict=False):
        require_as_accurate(name, mine[-1, -1], plain, exact, 1, terms)


def top_operators(call: Callable[..., Tensor], step: Step, inputs: list[Tensor], grad: Tensor, top: int) -> list[str]:
    """The operators of a call that take most time by themselves, each with its share and how often it is called."""
    on_cuda = inputs[0].device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities) as measured:
        _ = call(*inputs) if step.no_backward else output_and_gradients(call, inputs, grad)
        if on_cuda:
            torch.cuda.synchronize()
    events = measured.key_averages()

    def own_time(event: Any) -> float:
        return event.self_device_time_total if on_cuda else event.self_cpu_time_total

    total = sum(map(own_time, events))
    largest = sorted(events, key=own_time, reverse=True)[:top]
    return [f"{own_time(event) / total:.0%} {event.key} x{event.count}" for event in largest if total]


def describe(case: Case) -> str:
    return f"T {case.seq_len}, d_model {case.d_model}, heads {case.heads}, {case.sparsity:.0%} sparse {case.pattern}"


def report(results: Iterable[Iterable[Result]]) -> Iterator[Iterable[str]]:
    """What is printed of results by shape and pattern: a table of each, as they come, and the `ratios` of all."""
    seen = []
    for of_shape in results:
        some = list(of_shape)
        seen += some
        yield table(some)
    if lines := list(ratios(seen)):
        yield lines


def table(results: list[Result]) -> Iterator[str]:
    """Lines of the results of one shape and pattern: milliseconds, a line a step and a column a sparsity, and who beats
    dense."""
    case = results[0].case
    names = list(dict.fromkeys(row.step for row in results[0].rows))
    yield (
        f"B {case.batch}, T {case.seq_len}, d_model {case.d_model}, heads {case.heads}, {case.pattern} pairs, "
        f"{case.dtype}; ms of {FORWARD} / {TRAIN}"
    )
    for first in range(0, len(results), COLUMNS):
        some = results[first : first + COLUMNS]
        yield f"{'sparsity':16}" + "".join(f"{1 - result.pairs / case.seq_len**2:>20.1%}" for result in some)
        yield f"{'pairs':16}" + "".join(f"{result.pairs:>20}" for result in some)
        for name in names:
            yield f"{name:16}" + "".join(f"{cell(result, name):>20}" for result in some)
        if results[0].l2_floors:
            floors = (" / ".join(map(in_three_digits, result.l2_floors.values())) for result in some)
            yield f"{L2_FLOOR:16}" + "".join(f"{text:>20}" for text in floors)
    for other in (DENSE, SDPA):
        if other in names:
            beats = (
                f"{name} {' / '.join(beats_from(results, name, other, direction) for direction in DIRECTIONS)}"
                for name in names
                if name != other
            )
            yield f"beats {other} from: {', '.join(beats)}"
    reasons = {(row.step, row.reason): None for result in results for row in result.rows if row.reason}
    for name, reason in reasons:
        cases = [r.case for r in results if any((row.step, row.reason) == (name, reason) for row in r.rows)]
        where = ", ".join(f"{case.sparsity:.0%}" for case in cases) + " " if len(cases) < len(results) else ""
        yield f"{where}{name}: {reason}"
    for result in results:
        for name, operators in result.operators.items():
            yield f"{result.case.sparsity:.0%} {name}: {', '.join(operators)}"


def cell(result: Result, name: str) -> str:
    rows = [result.row(name, direction) for direction in DIRECTIONS]
    return " / ".join("-" if row is None else in_three_digits(row.milliseconds) for row in rows)


def beats_from(results: list[Result], name: str, other: str, direction: str) -> str:
    """The sparsity from which on, of those measured, a step is faster than another; '-' if it is not at the highest."""
    least = "-"
    for result in sorted(results, key=lambda result: result.case.sparsity, reverse=True):
        mine, theirs = result.row(name, direction), result.row(other, direction)
        if mine is None or theirs is None or mine.milliseconds >= theirs.milliseconds:
            break
        least = f"{result.case.sparsity:.0%}"
    return least


def ratios(results: list[Result]) -> Iterator[str]:
    """A line a step: its time over that of `sparse_attn`, the least and the largest of all cases."""
    steps = dict.fromkeys(row.step for result in results for row in result.rows if row.to_ours and row.step != OURS)
    if not steps:
        return
    yield f"over the time of {OURS}, least and largest of {len(results)} cases"
    yield f"{'':16}" + "".join(f"{direction:>20}" for direction in DIRECTIONS)
    for step in steps:
        yield f"{step:16}" + "".join(f"{spread(results, step, direction):>20}" for direction in DIRECTIONS)


def spread(results: list[Result], step: str, direction: str) -> str:
    rows = [result.row(step, direction) for result in results]
    ratios = [row.to_ours for row in rows if row is not None and row.to_ours is not None]
    return f"{in_three_digits(min(ratios))} - {in_three_digits(max(ratios))}" if ratios else "-"


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    return [
        asdict(result.case)
        | {
            "pairs": result.pairs,
            "l2_floor_ms": result.l2_floors.get(row.direction),
            "operators": result.operators.get(row.step, []),
        }
        | asdict(row)
        for row in result.rows
    ]


@dataclass(frozen=True)
class Recorded:
    """What a row of the JSON has beside its case and its `Row`."""

    pairs: int
    step: str
    direction: str
    l2_floor_ms: float | None = None
    operators: list[str] = field(default_factory=list)


def restore(rows: Sequence[dict[str, Any]]) -> list[list[Result]]:
    """The results whose `record` these are, by shape and pattern.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    results = []
    for case, of_case in by_case(Case, rows):
        recorded = [restored(Recorded, row) for row in of_case]
        operators = {row.step: row.operators for row in recorded if row.operators}
        floors = {row.direction: row.l2_floor_ms for row in recorded if row.l2_floor_ms is not None}
        results.append(Result(case, recorded[0].pairs, [restored(Row, row) for row in of_case], operators, floors))
    return [list(group) for _, group in groupby(results, key=lambda result: replace(result.case, sparsity=0))]
