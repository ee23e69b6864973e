"""`ds_sparse bench window`: products, softmax and attention of windows, beside dense PyTorch and what else computes
windowed attention."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import reference
from ..index import WindowIndex
from ..ops import unwindow_matmul, window_attention, window_matmul, window_softmax
from ..tools.arguments import UsageError, positive
from . import flex
from .command import NO_FLOOR, add_peers, add_sizes, listed
from .floors import ATTENTION, SCORES, SOFTMAX, VALUES, Size
from .machine import FORWARD, TRAIN
from .markdown import SHAPE, Columns, Table, also, beside, in_ms, shape_of
from .references import Piece, sdpa
from .registry import Peer
from .run import Operation
from .runs import Result
from .steps import FIELDS, Calls, StepsProblem, dense, has_floors, ours, over_floor, page
from .text import Column, lacking, milliseconds_in, table

VERIFIED_TOKENS = 1024
"""Tokens that our products and softmax are verified on, since the reference is dense and in float64; windows are the
same all along the sequence."""

PART = 128
"""Neighbouring rows of attention whose errors are compared with those of plain PyTorch together."""

DIRECTIONS = (FORWARD, TRAIN)

JOBS = {
    "window_matmul": SCORES,
    "window_softmax": SOFTMAX,
    "unwindow_matmul": VALUES,
    "window_attention": ATTENTION,
    "attention in parts": ATTENTION,
}
"""Our operations, and who does the same job densely."""

OTHERS = {"sdpa-mask": "SDPA band mask", "chunks": "sliding chunks", "flex": "FlexAttention"}
"""Other ways to windowed attention: name on the command line, and in the table."""

DESCRIPTION = (
    "Verifies the operations of windows against float64, then times them in turns beside dense PyTorch and other "
    "ways to windowed attention. 'x dense' is the ratio to the dense counterpart; 'x floor', on a GPU, that to "
    "what perfect sparsity costs: bytes and FLOPs of the windows at the rates of a copy and of a matrix product "
    f"measured here. {NO_FLOOR}"
)


@dataclass(frozen=True)
class Case:
    """One line of the grid. T tokens of H heads with D numbers each, in B sequences; tokens at most `window` apart."""

    seq_len: int
    window: int
    dtype: str
    batch: int = 1
    heads: int = 4
    head_dim: int = 64

    @property
    def density(self) -> float:
        """The part of T x T scores that are in windows."""
        reach = min(self.window, self.seq_len - 1)
        return ((2 * reach + 1) * self.seq_len - reach * (reach + 1)) / self.seq_len**2

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def name(self) -> str:
        return f"window {self.window} {self.dtype}, T {self.seq_len}, density {self.density:.1%}"


class Problem(StepsProblem):
    """A case on a device."""

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        window, scale = case.window, case.scale
        index = WindowIndex.build(case.seq_len, window, device=device)
        ours: Calls = {
            "window_matmul": lambda query, key: window_matmul(query, key.mT, window),
            "window_softmax": lambda scores: window_softmax(scores, window, scale=scale),
            "unwindow_matmul": lambda probs, value: unwindow_matmul(probs, value, window),
            "window_attention": lambda query, key, value: window_attention(query, key, value, index),
            "attention in parts": lambda query, key, value: unwindow_matmul(
                window_softmax(window_matmul(query, key.mT, window), window, scale=scale), value, window
            ),
        }
        super().__init__(case, Size.of(case), device, ours, JOBS, scale_first=False, part=PART)

    def meaning(self) -> Calls:
        window = self.case.window
        return {
            "window_matmul": lambda query, key: reference.window_matmul(query, key.mT, window),
            "window_softmax": lambda scores: reference.window_softmax(scores, (window,), self.case.scale),
            "unwindow_matmul": lambda probs, value: reference.unwindow_matmul(probs, value, window),
        }

    @cached_property
    def few(self) -> StepsProblem:
        if self.case.seq_len <= VERIFIED_TOKENS:
            return self
        return Problem(replace(self.case, seq_len=VERIFIED_TOKENS), self.device, argparse.Namespace())

    def pieces(self, head: int, peer: Peer) -> Iterator[Piece]:
        tokens = self.case.seq_len
        token, reach = torch.arange(tokens, device=self.device), self.case.window
        for first in range(0, tokens, PART):
            keys = slice(max(0, first - reach), first + PART + reach)
            yield slice(first, first + PART), keys, (token[first : first + PART, None] - token[keys]).abs() <= reach


def band_mask(problem: Problem) -> Tensor:
    return reference.window_mask(problem.case.seq_len, (problem.case.window,)).to(problem.device)


def sliding_chunks(problem: Problem) -> Peer:
    """Windows as a user writes them without us, after Longformer's PyTorch version: chunks of queries as long as the
    window, each against the three chunks of keys that its windows are in."""
    case, device = problem.case, problem.device
    tokens, side = case.seq_len, max(1, case.window)
    rest = -tokens % side
    place, other = torch.arange(side, device=device)[:, None], torch.arange(3 * side, device=device) - side
    token = torch.arange(0, tokens, side, device=device)[:, None, None] + other
    dead = ((other - place).abs() > case.window) | (token < 0) | (token >= tokens)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chunks = pad(query, (0, 0, 0, rest)).unflatten(2, (-1, side))
        keys, values = (pad(x, (0, 0, side, side + rest)).unfold(2, 3 * side, side) for x in (key, value))
        scores = (chunks @ keys * case.scale).masked_fill(dead, torch.finfo(query.dtype).min)
        return (scores.softmax(-1) @ values.mT).flatten(2, 3)[:, :, :tokens]

    return Peer(call, beside=ATTENTION)


def flex_attention(problem: Problem) -> Peer:
    """Compiled FlexAttention; on the CPU it has no backward."""
    window = problem.case.window

    def near(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= window

    flex.forget()
    call = flex.compiled(flex.of_scores(near, 1, problem.case.seq_len, problem.device))
    return Peer(call, beside=ATTENTION, no_backward=flex.ON_CPU if problem.device.type == "cpu" else "")


def options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, seq_len=[1024, 4096], heads=[4])
    parser.add_argument(
        "--window", type=listed(positive), default=[64, 256], help="tokens seen on each side (default: 64,256)"
    )
    add_peers(parser, OTHERS, list(OTHERS), "; flex is compiled for each case", in_words="all")


def cases(args: argparse.Namespace) -> list[Case]:
    if (widest := max(args.window)) >= (shortest := min(args.seq_len)):
        raise UsageError(
            f"--window {widest} is not below --seq-len {shortest}, whose tokens would all see each other; give "
            "--window a smaller number."
        )
    grid = product(args.batch, args.heads, args.head_dim, args.dtype, args.seq_len, args.window)
    return [Case(seq_len, window, dtype, batch, heads, dim) for batch, heads, dim, dtype, seq_len, window in grid]


def names(args: argparse.Namespace) -> list[str]:
    """Ours, what dense PyTorch has for the same job, and the peers."""
    products = [name for ours, job in JOBS.items() for name in (ours, job) if job != ATTENTION]
    attentions = [name for name, job in JOBS.items() if job == ATTENTION]
    return [*products, *attentions, ATTENTION, *(OTHERS[name] for name in args.peers)]


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, ratio to the dense counterpart, on a GPU ratio to the floor."""
    (result,) = results
    case = result.case
    yield f"{case.name}, B {case.batch}, H {case.heads}, D {case.head_dim}; medians of {result.rounds} rounds"
    columns = [
        milliseconds_in(9),
        Column("x dense", 8, lambda row: "-" if row.to_dense is None else f"{row.to_dense:.3f}"),
        Column("x floor", 8, lambda row: f"{row.to_floor:.2f}" if row.to_floor else ""),
    ]
    yield from table(result, 20, columns[: 3 if has_floors(results) else 2], DIRECTIONS)
    yield from lacking(result)


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    dtypes = [result.case.dtype for result in results]
    start: Columns = {
        "window, each side": lambda r: f"{r.case.window}{also(dtypes, r.case.dtype)}",
        SHAPE: shape_of,
    }
    mine: Columns = {"`window_attention`, ms": in_ms("window_attention", DIRECTIONS)}
    found = (row.name for result in results for row in result.rows if row.dense == ATTENTION)
    others = {name: name for name in found if name not in JOBS}
    jobs = {name: (JOBS[name],) for name in ("window_matmul", "unwindow_matmul", "window_softmax")}
    return {
        "attention": beside({**start, **mine}, results, "window_attention", others, DIRECTIONS),
        "products": page(start, results, list(jobs), jobs, DIRECTIONS),
    }


OPERATION = Operation(
    name="window",
    description=DESCRIPTION,
    dtypes={"cpu": ["fp32", "bf16"], "cuda": ["fp32", "bf16"]},
    case=Case,
    problem=Problem,
    peers={
        **ours(JOBS),
        **{job: dense(job) for job in (SCORES, SOFTMAX, VALUES)},
        ATTENTION: sdpa(beside=ATTENTION),
        OTHERS["sdpa-mask"]: sdpa(beside=ATTENTION, mask=band_mask),
        OTHERS["chunks"]: sliding_chunks,
        OTHERS["flex"]: flex_attention,
    },
    ours=tuple(JOBS),
    options=options,
    cases=cases,
    names=names,
    numbers=over_floor,
    lines=lines,
    pages=pages,
    key="name",
    fields=FIELDS,
    directions=DIRECTIONS,
    rates=True,
)
