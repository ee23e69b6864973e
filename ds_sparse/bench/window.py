"""Windows: the products, the softmax and attention beside dense PyTorch, and attention beside what else computes it.

A case is data; `run_case` verifies it, times all competitors in turns in one process, and returns rows of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .. import reference
from ..index import WindowIndex
from ..ops import unwindow_matmul, window_attention, window_matmul, window_softmax
from ..verify.accuracy import random_tensors, require_as_accurate, require_same_meaning
from .floors import Size
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits
from .operations import Competitor, Row, competitor, find, measure, without_time
from .runs import rows_by_case

VERIFIED_TOKENS, VERIFIED_HEADS = 1024, 2
"""What outputs and gradients of our operations are verified on, since the reference is dense and in float64; windows
are the same all along the sequence."""

VERIFIED_ROWS = 128
"""Neighbouring rows at the beginning, in the middle and at the end that all attention is verified on at full length."""

DENSE_ATTENTION = "SDPA dense"

DIRECTIONS = (FORWARD, TRAIN)


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


Result = tuple[Case, list[Row]]
"""A case, measured."""


def grid(
    seq_lens: list[int], windows: list[int], dtypes: list[str], batch: int, heads: int, head_dim: int
) -> list[Case]:
    return [
        Case(seq_len, window, dtype, batch, heads, head_dim)
        for dtype in dtypes
        for seq_len in seq_lens
        for window in windows
    ]


def run_case(case: Case, peers: list[str], device: torch.device, repeats: int, seconds: float) -> list[Row]:
    """Verifies the case, then times it: `repeats` rounds, or as many as begin within `seconds`, three at least.

    Raises:
        ArithmeticError: an output or gradient is further from float64 than plain PyTorch's error allows.
    """
    verify_operations(case, device)
    competitors = make_competitors(case, peers, device)
    for runner in competitors:
        if runner.dense == DENSE_ATTENTION and runner.name != DENSE_ATTENTION:
            verify_attention(case, runner)
    dtype = DTYPES[case.dtype]
    size = Size(case.batch, case.heads, case.seq_len, case.head_dim, case.density, dtype.itemsize)
    return measure(competitors, size, dtype, device, repeats, seconds, describe(case), DIRECTIONS)


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
        "window_attention": lambda query, key, value: window_attention(query, key, value, index),
        "attention in parts": in_parts,
    }


def their_meaning(case: Case) -> dict[str, Callable[..., Tensor]]:
    """The same operations from `ds_sparse.reference`, on the CPU."""
    window, scale = case.window, case.scale

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.window_attention(query, key, value, (window,))

    return {
        "window_matmul": lambda query, key: reference.window_matmul(query, key.mT, window),
        "window_softmax": lambda scores: reference.window_softmax(scores, (window,), scale),
        "unwindow_matmul": lambda probs, value: reference.unwindow_matmul(probs, value, window),
        "window_attention": attention,
        "attention in parts": attention,
    }


def make_competitors(case: Case, peers: list[str], device: torch.device) -> list[Competitor]:
    """Ours, what dense PyTorch has for the same job, and the peers by their names in `PEERS`."""
    ours = our_operations(case, case.seq_len, device)
    query, key, value = inputs = dense_inputs(case, case.heads, case.seq_len, device)
    scores = ours["window_matmul"](query, key).detach()
    probs = ours["window_softmax"](scores).detach()
    dense_scores = (query @ key.mT).detach()
    dense_probs = (dense_scores * case.scale).softmax(-1)
    no_backward = {"flex": "on a CPU it is forward only"} if device.type == "cpu" else {}
    return [
        competitor("window_matmul", "dense q @ k^T", ours["window_matmul"], (query, key)),
        competitor("dense q @ k^T", "dense q @ k^T", lambda q, k: q @ k.mT, (query, key)),
        competitor("window_softmax", "dense softmax", ours["window_softmax"], (scores,)),
        competitor("dense softmax", "dense softmax", lambda x: (x * case.scale).softmax(-1), (dense_scores,)),
        competitor("unwindow_matmul", "dense p @ v", ours["unwindow_matmul"], (probs, value)),
        competitor("dense p @ v", "dense p @ v", torch.matmul, (dense_probs, value)),
        *(competitor(name, DENSE_ATTENTION, ours[name], inputs) for name in ("window_attention", "attention in parts")),
        competitor(DENSE_ATTENTION, DENSE_ATTENTION, scaled_dot_product_attention, inputs),
        *(
            competitor(PEERS[name][0], DENSE_ATTENTION, PEERS[name][1](case, device), inputs, no_backward.get(name, ""))
            for name in peers
        ),
    ]


def sdpa_with_mask(case: Case, device: torch.device) -> Callable[..., Tensor]:
    mask = reference.window_mask(case.seq_len, (case.window,)).to(device)
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask)


def sliding_chunks(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """What a user writes without us, after Longformer's PyTorch version: chunks of queries as long as the window, each
    against the three chunks of keys that its windows are in."""
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


def flex_attention(case: Case, device: torch.device) -> Callable[..., Tensor]:
    """Compiled FlexAttention; on the CPU it has no backward."""
    from torch.nn.attention import flex_attention as flex

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= case.window

    # After a few compilations of one function, those of the cases before, it would run uncompiled.
    torch._dynamo.reset()
    mask = flex.create_block_mask(near, None, None, case.seq_len, case.seq_len, device=device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask)


PEERS: dict[str, tuple[str, Callable[[Case, torch.device], Callable[..., Tensor]]]] = {
    "sdpa-mask": ("SDPA band mask", sdpa_with_mask),
    "chunks": ("sliding chunks", sliding_chunks),
    "flex": ("FlexAttention", flex_attention),
}
"""What else computes windowed attention: name on the command line, name in the table, builder."""


def verify_operations(case: Case, device: torch.device) -> None:
    """Holds outputs and gradients of our operations to the reference in float64.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    tokens, heads = min(case.seq_len, VERIFIED_TOKENS), min(case.heads, VERIFIED_HEADS)
    query, key, value = dense_inputs(case, heads, tokens, device)
    ours, theirs = our_operations(case, tokens, device), their_meaning(case)
    scores = ours["window_matmul"](query, key).detach()
    probs = ours["window_softmax"](scores).detach()
    inputs = {
        "window_matmul": (query, key),
        "window_softmax": (scores,),
        "unwindow_matmul": (probs, value),
        "window_attention": (query, key, value),
        "attention in parts": (query, key, value),
    }
    require_same_meaning(str(case), ours, theirs, inputs, torch.device("cpu"))


def verify_attention(case: Case, runner: Competitor) -> None:
    """Holds some rows of the first and the last head at full length to float64.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    with torch.no_grad():
        output = runner.call(*runner.inputs)
    tokens, rows = case.seq_len, min(VERIFIED_ROWS, case.seq_len)
    for batch, head in {(0, 0), (case.batch - 1, case.heads - 1)}:
        query, key, value = (x[batch, head] for x in runner.inputs)
        for first in (0, (tokens - rows) // 2, tokens - rows):
            row = torch.arange(first, first + rows, device=query.device)[:, None]
            near = (row - torch.arange(tokens, device=query.device)).abs() <= case.window

            def attend(q: Tensor, k: Tensor, v: Tensor, near: Tensor = near) -> Tensor:
                return (q @ k.mT * case.scale).masked_fill(~near, float("-inf")).softmax(-1) @ v

            arguments = (query[first : first + rows], key, value)
            what = f"{case}: output of {runner.name}, batch {batch}, head {head}, rows from {first} on,"
            mine = output[batch, head, first : first + rows]
            require_as_accurate(what, mine, attend(*arguments), attend(*(x.double() for x in arguments)))


def dense_inputs(case: Case, heads: int, tokens: int, device: torch.device) -> list[Tensor]:
    """Query, key and value."""
    return random_tensors(3, (case.batch, heads, tokens, case.head_dim), DTYPES[case.dtype], device)


def describe(case: Case) -> str:
    return f"window {case.window} {case.dtype}, T {case.seq_len}, density {case.density:.1%}"


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: a table a case, as they come."""
    return (table(case, rows) for case, rows in results)


def table(case: Case, rows: list[Row]) -> Iterator[str]:
    """Lines: milliseconds, ratio to the dense competitor, on a GPU ratio to the floor."""
    yield f"{describe(case)}, B {case.batch}, H {case.heads}, D {case.head_dim}; medians of {rows[0].rounds} rounds"
    floors = any(row.to_floor is not None for row in rows)
    heading = f"{'ms':>9} {'x dense':>8}" + f" {'x floor':>8}" * floors
    yield f"{'':20}" + " ".join(f"{direction:>{len(heading)}}" for direction in DIRECTIONS)
    yield f"{'':20}{heading} {heading}"
    for name in dict.fromkeys(row.name for row in rows):
        cells = (cell(find(rows, name, direction)) for direction in DIRECTIONS)
        yield f"{name:20}" + " ".join(f"{text:>{len(heading)}}" for text in cells)
    yield from without_time(rows)


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    floor = f" {row.to_floor:8.2f}" if row.to_floor else ""
    return f"{in_three_digits(row.milliseconds):>9} {row.to_dense:8.3f}{floor}"


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    case, rows = result
    return [asdict(case) | {"density": case.density} | asdict(row) for row in rows]


def restore(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    return rows_by_case(Case, Row, rows)
