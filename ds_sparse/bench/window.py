"""`ds_sparse bench window`: products, softmax and attention of windows, beside dense PyTorch and what else computes
windowed attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .. import reference
from ..index import WindowIndex
from ..ops import unwindow_matmul, window_attention, window_matmul, window_softmax
from ..tools.arguments import positive
from ..verify.accuracy import require_as_accurate
from . import flex
from .command import NO_FLOOR, add_peers, add_sizes, listed
from .floors import Size, over_floor
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Table, also, beside_operation, has_floors, operations
from .references import random_tensors, require_same_meaning
from .registry import Build, Operation, Peer, Result, Row
from .text import columns, lacking_together

VERIFIED_TOKENS, VERIFIED_HEADS = 1024, 2
"""Sizes that outputs and gradients of our operations are verified on, since the reference is dense and in float64;
windows are the same all along the sequence."""

VERIFIED_ROWS = 128
"""Neighbouring rows at the beginning, in the middle and at the end that all attention is verified on at full length."""

DIRECTIONS = (FORWARD, TRAIN)

ATTENTION, DENSE_ATTENTION = "window_attention", "SDPA dense"

DENSE = {
    "window_matmul": "dense q @ k^T",
    "window_softmax": "dense softmax",
    "unwindow_matmul": "dense p @ v",
    ATTENTION: DENSE_ATTENTION,
    "attention in parts": DENSE_ATTENTION,
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
    def title(self) -> str:
        return f"window {self.window} {self.dtype}, T {self.seq_len}, density {self.density:.1%}"


class Problem:
    """A case on a device, and the operands of each operation."""

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        self.size = Size(case.batch, case.heads, case.seq_len, case.head_dim, case.density, self.dtype.itemsize)
        self.ours = our_operations(case, case.seq_len, device)

    @cached_property
    def inputs(self) -> dict[str, tuple[Tensor, ...]]:
        return self._inputs(self.ours, self.case.heads, self.case.seq_len)

    def _inputs(self, ours: dict[str, Callable[..., Tensor]], heads: int, tokens: int) -> dict[str, tuple[Tensor, ...]]:
        shape = (self.case.batch, heads, tokens, self.case.head_dim)
        query, key, value = random_tensors(3, shape, self.dtype, self.device)
        scores = ours["window_matmul"](query, key)
        return {
            "window_matmul": (query, key),
            "window_softmax": (scores,),
            "unwindow_matmul": (ours["window_softmax"](scores), value),
            ATTENTION: (query, key, value),
            "attention in parts": (query, key, value),
        }

    @cached_property
    def few(self) -> tuple[dict[str, Callable[..., Tensor]], dict[str, tuple[Tensor, ...]]]:
        """Our operations on `VERIFIED_TOKENS`, and their inputs of `VERIFIED_HEADS`."""
        tokens = min(self.case.seq_len, VERIFIED_TOKENS)
        ours = our_operations(self.case, tokens, self.device)
        return ours, self._inputs(ours, min(self.case.heads, VERIFIED_HEADS), tokens)

    def verify(self, name: str, peer: Peer) -> None:
        """Holds our operations to the reference on some tokens, and all windowed attention to some rows of the case, in
        float64.

        Raises:
            ArithmeticError: an error larger than `require_as_accurate` allows.
        """
        if name in DENSE:
            ours, inputs = self.few
            meaning = their_meaning(self.case)[name]
            require_same_meaning(f"{self.case.title}, {name}", ours[name], meaning, inputs[name], torch.device("cpu"))
        if peer.beside == DENSE_ATTENTION and name != DENSE_ATTENTION:
            self.verify_rows(peer)

    def verify_rows(self, peer: Peer) -> None:
        """Holds some rows of the first and the last head at full length to float64."""
        case = self.case
        with torch.no_grad():
            output = peer.call(*peer.inputs)
        tokens, rows = case.seq_len, min(VERIFIED_ROWS, case.seq_len)
        for batch, head in sorted({(0, 0), (case.batch - 1, case.heads - 1)}):
            query, key, value = (x[batch, head] for x in peer.inputs)
            for first in (0, (tokens - rows) // 2, tokens - rows):
                row = torch.arange(first, first + rows, device=query.device)[:, None]
                near = (row - torch.arange(tokens, device=query.device)).abs() <= case.window

                def attend(q: Tensor, k: Tensor, v: Tensor, near: Tensor = near) -> Tensor:
                    return (q @ k.mT * case.scale).masked_fill(~near, float("-inf")).softmax(-1) @ v

                arguments = (query[first : first + rows], key, value)
                what = f"output, batch {batch}, head {head}, rows from {first} on,"
                mine = output[batch, head, first : first + rows]
                require_as_accurate(what, mine, attend(*arguments), attend(*(x.double() for x in arguments)))


def our_operations(case: Case, tokens: int, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    window, scale = case.window, case.scale
    index = WindowIndex.build(tokens, window, device=device)

    def in_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        probs = window_softmax(window_matmul(query, key.mT, window), window, scale=scale)
        return unwindow_matmul(probs, value, window)

    return {
        "window_matmul": lambda query, key: window_matmul(query, key.mT, window),
        "window_softmax": lambda scores: window_softmax(scores, window, scale=scale),
        "unwindow_matmul": lambda probs, value: unwindow_matmul(probs, value, window),
        ATTENTION: lambda query, key, value: window_attention(query, key, value, index),
        "attention in parts": in_parts,
    }


def their_meaning(case: Case) -> dict[str, Callable[..., Tensor]]:
    """Our operations as `ds_sparse.reference` has them."""
    window, scale = case.window, case.scale

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.window_attention(query, key, value, (window,))

    return {
        "window_matmul": lambda query, key: reference.window_matmul(query, key.mT, window),
        "window_softmax": lambda scores: reference.window_softmax(scores, (window,), scale),
        "unwindow_matmul": lambda probs, value: reference.unwindow_matmul(probs, value, window),
        ATTENTION: attention,
        "attention in parts": attention,
    }


def ours(name: str) -> Build:
    return lambda problem: Peer(problem.ours[name], problem.inputs[name], DENSE[name])


def dense_scores(problem: Problem) -> Peer:
    return Peer(lambda q, k: q @ k.mT, problem.inputs["window_matmul"], DENSE["window_matmul"])


def dense_softmax(problem: Problem) -> Peer:
    query, key = problem.inputs["window_matmul"]
    return Peer(lambda x: (x * problem.case.scale).softmax(-1), (query @ key.mT,), DENSE["window_softmax"])


def dense_values(problem: Problem) -> Peer:
    query, key, value = problem.inputs[ATTENTION]
    probs = (query @ key.mT * problem.case.scale).softmax(-1)
    return Peer(torch.matmul, (probs, value), DENSE["unwindow_matmul"])


def attention_by(make: Callable[[Problem], Callable[..., Tensor]]) -> Build:
    return lambda problem: Peer(make(problem), problem.inputs[ATTENTION], DENSE_ATTENTION)


def band_mask(problem: Problem) -> Callable[..., Tensor]:
    mask = reference.window_mask(problem.case.seq_len, (problem.case.window,)).to(problem.device)
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask)


def sliding_chunks(problem: Problem) -> Callable[..., Tensor]:
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

    return call


def flex_attention(problem: Problem) -> Peer:
    """Compiled FlexAttention; on the CPU it has no backward."""
    case = problem.case

    def near(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= case.window

    flex.forget()
    call = flex.compiled(flex.of_scores(near, 1, case.seq_len, problem.device))
    no_backward = flex.ON_CPU if problem.device.type == "cpu" else ""
    return Peer(call, problem.inputs[ATTENTION], DENSE_ATTENTION, no_backward=no_backward)


def options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, seq_len="1024,4096", heads="4")
    parser.add_argument(
        "--window", type=listed(positive), default=[64, 256], help="tokens seen on each side (default: 64,256)"
    )
    everybody = list(OTHERS)
    add_peers(
        parser, everybody, {"cpu": everybody, "cuda": everybody}, "; flex is compiled for each case", in_words="all"
    )


def cases(args: argparse.Namespace) -> list[Case]:
    grid = product(args.batch, args.heads, args.head_dim, args.dtype, args.seq_len, args.window)
    return [Case(seq_len, window, dtype, batch, heads, dim) for batch, heads, dim, dtype, seq_len, window in grid]


def names(args: argparse.Namespace) -> list[str]:
    """Ours, what dense PyTorch has for the same job, and the peers."""
    products = [name for ours in DENSE for name in (ours, DENSE[ours]) if DENSE[ours] != DENSE_ATTENTION]
    return [*products, ATTENTION, "attention in parts", DENSE_ATTENTION, *(OTHERS[name] for name in args.peers)]


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, ratio to the dense counterpart, on a GPU ratio to the floor."""
    (result,) = results
    case = result.case
    rounds = result.rows[0].rounds
    yield f"{case.title}, B {case.batch}, H {case.heads}, D {case.head_dim}; medians of {rounds} rounds"

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        dense = "-" if row.to_dense is None else f"{row.to_dense:.3f}"
        floor = f" {row.to_floor:8.2f}" if row.to_floor else ""
        return f"{in_three_digits(row.milliseconds):>9} {dense:>8}{floor}"

    heading = f"{'ms':>9} {'x dense':>8}" + f" {'x floor':>8}" * has_floors(results)
    yield from columns(result, 20, heading, cell, DIRECTIONS)
    yield from lacking_together(result)


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    dtypes = [result.case.dtype for result in results]
    start: dict[str, Callable[[Result], str]] = {
        "window, each side": lambda r: f"{r.case.window}{also(dtypes, r.case.dtype)}",
        SHAPE: lambda r: f"{r.case.batch}, {r.case.heads}, {r.case.seq_len}, {r.case.head_dim}",
    }
    names = {row.name: row.name for result in results for row in result.rows if row.dense == DENSE_ATTENTION}
    others = {name: name for name in names if name not in (ATTENTION, "attention in parts")}
    products = {name: (dense,) for name, dense in DENSE.items() if dense != DENSE_ATTENTION}
    return {
        "attention": beside_operation(start, results, ATTENTION, others, DIRECTIONS),
        "products": operations(
            start, results, ["window_matmul", "unwindow_matmul", "window_softmax"], products, DIRECTIONS
        ),
    }


OPERATION = Operation(
    name="window",
    description=DESCRIPTION,
    dtypes={"cpu": ["fp32", "bf16"], "cuda": ["fp32", "bf16"]},
    case=Case,
    problem=Problem,
    peers={
        **{name: ours(name) for name in DENSE},
        DENSE["window_matmul"]: dense_scores,
        DENSE["window_softmax"]: dense_softmax,
        DENSE["unwindow_matmul"]: dense_values,
        DENSE_ATTENTION: attention_by(lambda problem: scaled_dot_product_attention),
        OTHERS["sdpa-mask"]: attention_by(band_mask),
        OTHERS["chunks"]: attention_by(sliding_chunks),
        OTHERS["flex"]: flex_attention,
    },
    ours=tuple(DENSE),
    options=options,
    cases=cases,
    names=names,
    numbers=lambda problem, peer, row, medians: over_floor(row, problem.size, problem.dtype, problem.device),
    lines=lines,
    pages=pages,
    key="name",
    fields=("dense", "to_dense", "floor_ms", "to_floor", "bound"),
    directions=DIRECTIONS,
    rates=True,
)
