"""Packed documents: ours beside itself without documents and with padding, and beside what others have for them.

A peer's outputs and gradients are verified before it is timed, in turns in one process; who does not take a case, is
wrong or fails, is named with the reason. Forward is that of training, which keeps what backward needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..verify.accuracy import attention_of_documents, output_and_gradients, random_tensors, require_as_accurate
from . import machine
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits, in_turns
from .packed_cases import Case
from .packed_peers import ALWAYS, OURS, PADDED, PEERS, UNPACKED, Peer, Problem, on_documents
from .reasons import in_short
from .runs import restored

DIRECTIONS = (FORWARD, TRAIN)

PART = 64
"""Tokens whose errors are compared with those of plain PyTorch together."""

INDICES = 5
"""Times that the cost of an index is measured; it is their median."""


@dataclass(frozen=True)
class Row:
    """One peer in one direction; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        tokens_per_second: documents' tokens, without padding.
        of_unpacked: live scores a second over those of the batch without documents. Who computes others besides, as
            dense attention does, has no more live ones for it.
        to_ours: the time over that of ds_sparse; above 1 ds_sparse is faster. Not of the batch without documents,
            whose scores are others.
    """

    peer: str
    direction: str
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    of_unpacked: float | None = None
    to_ours: float | None = None
    rounds: int = 0
    reason: str = ""


@dataclass(frozen=True)
class About:
    """What a case comes to, beside its times.

    Attributes:
        documents, shortest, longest: how many there are, and tokens of the shortest and of the longest.
        batch, sequence: sequences of the batch without documents, and tokens of each.
        filled: the part of the computed scores that is live; the rest is what blocks have beyond a document, above the
            diagonal or beside a window. None where ours was not built.
        unpacked_filled: the same of the batch without documents.
        index_ms: what a new batch costs before its first layer: the time to make the index, with what its first use
            adds. None where ours was not measured.
    """

    dtype: str
    documents: int
    shortest: int
    longest: int
    batch: int
    sequence: int
    filled: float | None = None
    unpacked_filled: float | None = None
    index_ms: float | None = None

    @property
    def left(self) -> float | None:
        """The part of the rate without documents that partial blocks leave to packed ones."""
        return self.filled / self.unpacked_filled if self.filled and self.unpacked_filled else None


@dataclass(frozen=True)
class Result:
    """A case, measured."""

    case: Case
    about: About
    rows: list[Row]

    def row(self, peer: str, direction: str) -> Row | None:
        """The row of a peer that was measured."""
        found = (row for row in self.rows if (row.peer, row.direction) == (peer, direction) and not row.reason)
        return next(found, None)


def run_case(
    case: Case, names: Sequence[str], device: torch.device, dtype: str, repeats: int, seconds: float
) -> Result:
    """Verifies ours and the peers, then times them in turns: `repeats` rounds, or as many as begin within `seconds`,
    three at least. Never raises for a peer's sake."""
    names = list(dict.fromkeys([*ALWAYS, *names]))
    problem = Problem(case, device)
    *inputs, grad = random_tensors(4, (1, case.heads, case.tokens, case.head_dim), DTYPES[dtype], device)
    references = References(problem, inputs, grad)

    peers: dict[str, Peer] = {}
    reasons: dict[str, str] = {}
    runs: dict[tuple[str, str], Callable[[], float]] = {}
    for name in names:
        try:
            peer = PEERS[name](problem)
            verify(peer, references)
        except Exception as error:  # noqa: BLE001 - whatever stops a peer is a line of the table
            reasons[name] = in_short(error)
            continue
        peers[name] = peer
        arranged = [peer.arranged(x) for x in (*inputs, grad)]
        for direction in DIRECTIONS:
            runs[name, direction] = partial(time_unless_wrong, reasons, name, peer, arranged, direction, device)
    index_ms = cost_of_index(problem, inputs, grad) if OURS in peers else None
    times = in_turns(runs, repeats, seconds, case.name)

    medians = {key: statistics.median(samples) for key, samples in times.items() if key[0] not in reasons}
    batch, sequence = case.unpacked(problem.layout)
    work = dict.fromkeys(names, (case.tokens, case.live_scores(problem.layout, problem.lengths)))
    work[UNPACKED] = batch * sequence, batch * case.live_scores(problem.layout, [sequence])
    rows = [
        Row(name, direction, reason=reasons[name])
        if name in reasons
        else row_of(name, direction, work, medians, len(times[name, direction]))
        for name in names
        for direction in DIRECTIONS
    ]
    filled, unpacked_filled = (peers[name].filled if name in peers else None for name in ALWAYS)
    about = About(
        dtype, len(problem.lengths), min(problem.lengths), problem.longest, batch, sequence, filled, unpacked_filled,
        index_ms,
    )  # fmt: skip
    return Result(case, about, rows)


def row_of(
    name: str,
    direction: str,
    work: Mapping[str, tuple[int, int]],
    medians: Mapping[tuple[str, str], float],
    rounds: int,
) -> Row:
    """work: by peer, its tokens and the live scores of a head."""
    (tokens, scores), mine = work[name], medians[name, direction]
    unpacked, ours = medians.get((UNPACKED, direction)), medians.get((OURS, direction))
    return Row(
        name,
        direction,
        mine,
        tokens_per_second=tokens / mine * 1e3,
        of_unpacked=scores / mine / (work[UNPACKED][1] / unpacked) if unpacked else None,
        to_ours=mine / ours if ours and name != UNPACKED else None,
        rounds=rounds,
    )


def time_unless_wrong(
    reasons: dict[str, str], name: str, peer: Peer, arranged: list[Tensor], direction: str, device: torch.device
) -> float:
    """Milliseconds of one call; of a peer that fails, the reason is noted, and it is not called again."""
    if name in reasons:
        return float("nan")
    *inputs, grad = arranged
    leaves = [x.detach().requires_grad_() for x in inputs]
    try:
        return machine.time_of(peer.call, leaves, grad, direction, device)
    except Exception as error:  # noqa: BLE001 - whatever stops a peer is a line of the table
        reasons[name] = in_short(error)
        return float("nan")


def cost_of_index(problem: Problem, inputs: list[Tensor], grad: Tensor) -> float:
    """Milliseconds, on the clock: a first step with a new index less a step with one that was used before. Making an
    index waits for the device, so that what the device does meanwhile is in it."""
    costs = []
    for _ in range(INDICES):
        wait_for(problem.device)
        start = time.perf_counter()
        call, _ = on_documents(problem)
        output_and_gradients(call, inputs, grad)
        wait_for(problem.device)
        with_index = time.perf_counter()
        output_and_gradients(call, inputs, grad)
        wait_for(problem.device)
        costs.append((with_index - start) - (time.perf_counter() - with_index))
    return max(0.0, statistics.median(costs)) * 1e3


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class References:
    """Outputs and gradients of the first and the last head, in float64 and by plain PyTorch at the inputs' precision,
    of the documents of a peer, each computed when a peer first needs them."""

    def __init__(self, problem: Problem, inputs: list[Tensor], grad: Tensor) -> None:
        self.problem, self.inputs, self.grad = problem, inputs, grad
        self.heads = sorted({0, problem.case.heads - 1})
        self._known: dict[tuple[bool, tuple[int, ...]], list[tuple[list[Tensor], list[Tensor], list[Tensor]]]] = {}

    def of(self, dense: bool, lengths: tuple[int, ...]) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """For each of `heads`: plain, exact, and the sizes of the exact sums' terms; each of the output and of the
        gradients of query, key and value, (T', D)."""
        if (dense, lengths) not in self._known:
            masks: dict[int, Tensor] = {}

            def mask(length: int) -> Tensor:
                if length not in masks:
                    masks[length] = self._mask(dense, length)
                return masks[length]

            tokens = sum(lengths)
            found = self._known[dense, lengths] = []
            for head in self.heads:
                q, k, v, grad = (x[0, head, :tokens] for x in (*self.inputs, self.grad))
                plain, _ = attention_of_documents(q, k, v, grad, lengths, mask)
                wide = q.double(), k.double(), v.double(), grad.double()
                exact, terms = attention_of_documents(*wide, lengths, mask)
                found.append((plain, exact, terms))
        return self._known[dense, lengths]

    def _mask(self, dense: bool, length: int) -> Tensor:
        case, device = self.problem.case, self.problem.device
        if not dense:
            return case.mask(self.problem.layout, length, device)
        live = torch.ones(length, length, dtype=torch.bool, device=device)
        return live.tril() if case.causal else live


def verify(peer: Peer, references: References) -> None:
    """Holds the output and the gradients of the whole row to the references, `PART` tokens by `PART` tokens.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    lengths = tuple(references.problem.lengths) if peer.lengths is None else peer.lengths
    inputs, grad = [peer.arranged(x) for x in references.inputs], peer.arranged(references.grad)
    results = [peer.as_row(x) for x in output_and_gradients(peer.call, inputs, grad)]
    what = ("output", "gradient of query", "gradient of key", "gradient of value")
    rest = (0, 0, 0, -sum(lengths) % PART)
    for head, of_head in zip(references.heads, references.of(peer.dense, lengths), strict=True):
        for name, mine, *others in zip(what, results, *of_head, strict=True):
            mine, plain, exact, terms = (pad(x, rest) for x in (mine[0, head], *others))
            require_as_accurate(f"{name}, head {head}", mine, plain, exact, len(mine) // PART, terms)


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: a table a result, as they come, and for each dtype the summary."""
    seen = []
    for result in results:
        seen.append(result)
        yield table(result)
    for dtype in dict.fromkeys(result.about.dtype for result in seen):
        yield summary([result for result in seen if result.about.dtype == dtype])


def table(result: Result) -> Iterator[str]:
    """Lines: milliseconds, tokens and live scores a second, and ratios to ds_sparse, of every peer."""
    case, about = result.case, result.about
    rounds = max((row.rounds for row in result.rows), default=0)
    yield (
        f"{case.name}: {structure_of(case)}, {about.documents} documents of {lengths_of(about)} tokens, T {case.tokens}"
        f", H {case.heads}, D {case.head_dim}, {about.dtype}; medians of {rounds} rounds"
    )
    yield f"unpacked: {about.batch} x {about.sequence} tokens{filled_of(about)}"
    if about.index_ms is not None:
        forward = result.row(OURS, FORWARD)
        beside = f", {about.index_ms / forward.milliseconds:.1f} forwards" if forward else ""
        yield f"index of a batch, for all its layers: {in_three_digits(about.index_ms)} ms{beside}"
    heading = f"{'ms':>7} {'Mtokens/s':>9} {'of unpacked':>11} {'x ours':>7}"
    yield f"{'':12}" + " ".join(f"{direction:>37}" for direction in DIRECTIONS)
    yield f"{'':12}" + " ".join(f"{heading:>37}" for _ in DIRECTIONS)
    for name in dict.fromkeys(row.peer for row in result.rows if not row.reason):
        yield f"{name:12}" + " ".join(cell(result.row(name, direction)) for direction in DIRECTIONS)
    for name, reason in dict.fromkeys((row.peer, row.reason) for row in result.rows if row.reason):
        yield f"{name:12}  no time: {reason}"


def structure_of(case: Case) -> str:
    what = f"{'' if case.is_window else 'block '}{case.size}"
    return f"{case.structure}{' ' if case.is_window else ', '}{what}{', causal' if case.causal else ''}"


def lengths_of(about: About) -> str:
    if about.shortest == about.longest:
        return f"{about.longest:,}"
    return f"{about.shortest:,} to {about.longest:,}"


def filled_of(about: About) -> str:
    if about.left is None:
        return ""
    return (
        f"; live of what blocks compute {about.filled:.0%}, unpacked {about.unpacked_filled:.0%}: partial blocks leave "
        f"{about.left:.0%} of the unpacked rate"
    )


def cell(row: Row | None) -> str:
    if row is None:
        return f"{'-':>37}"
    rate = "-" if row.of_unpacked is None else f"{row.of_unpacked:.0%}"
    ratio = "-" if row.to_ours is None else f"{row.to_ours:.2f}" if row.to_ours < 999.5 else f"{row.to_ours:.3g}"
    speed = in_three_digits(row.tokens_per_second / 1e6)
    return f"{in_three_digits(row.milliseconds):>7} {speed:>9} {rate:>11} {ratio:>7}"


def summary(results: Sequence[Result]) -> Iterator[str]:
    """A line a case and direction: ours, its rate over the unpacked one and over what partial blocks leave of that,
    tokens a second over those with padding, and the fastest other's time over ours."""
    yield (f"{OURS:32}{'':16} {'ms':>8} {'of unpacked':>11} {'of what is left':>15} {'x padded':>8} {'best peer':>18}")
    for result in results:
        for direction in DIRECTIONS:
            row = result.row(OURS, direction)
            start = f"{result.case.name:32}{direction:16}"
            if row is None:
                yield f"{start} {'-':>8}"
                continue
            left, others = of_left(result, direction), best_peer(result, direction)
            padding = result.row(PADDED, direction)
            yield (
                f"{start} {in_three_digits(row.milliseconds):>8} {percent(row.of_unpacked):>11} {percent(left):>15} "
                f"{'-' if padding is None else in_three_digits(padding.to_ours):>8} "
                f"{f'{others.peer} {in_three_digits(others.to_ours)}' if others else '-':>18}"
            )


def of_left(result: Result, direction: str) -> float | None:
    """Our rate over what partial blocks leave of the rate without documents: what is computed a second, over that."""
    row, left = result.row(OURS, direction), result.about.left
    return row.of_unpacked / left if row and row.of_unpacked and left else None


def best_peer(result: Result, direction: str) -> Row | None:
    """The fastest of those that are not ours."""
    ours = (*ALWAYS, PADDED)
    others = [row for row in result.rows if row.direction == direction and not row.reason and row.peer not in ours]
    return min(others, key=lambda row: row.milliseconds, default=None)


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    about = asdict(result.case) | asdict(result.about) | {"left": result.about.left}
    return [about | asdict(row) for row in result.rows]


def restore(rows: Sequence[Mapping[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    by_case = groupby(rows, key=lambda row: (restored(Case, row), restored(About, row)))
    return [Result(case, about, [restored(Row, row) for row in of_case]) for (case, about), of_case in by_case]
