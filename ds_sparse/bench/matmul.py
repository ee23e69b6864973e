"""MatMul and Softmax, alone and as attention, beside what PyTorch offers for the same job.

A case is data; `run_case` verifies it, times all competitors in turns in one process, and returns rows of numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import reference
from ..index import BlockIndex
from ..layout import density, to_token_mask
from ..ops import MatMul, Softmax
from ..sparsity import BigBirdSparsityConfig, BSLongformerSparsityConfig, FixedSparsityConfig, SparsityConfig
from .floors import Ceilings, Size, operation_floor
from .machine import DTYPES, FORWARD, TRAIN, in_turns, time_of
from .verification import random_tensors, require_same_meaning

LAYOUTS: dict[str, tuple[type[SparsityConfig], dict[str, Any]]] = {
    "fixed": (FixedSparsityConfig, {}),
    "bslongformer": (BSLongformerSparsityConfig, {}),
    "bslongformer-1": (BSLongformerSparsityConfig, {"num_sliding_window_blocks": 1}),
    "bslongformer-9": (BSLongformerSparsityConfig, {"num_sliding_window_blocks": 9}),
    "bigbird-3": (BigBirdSparsityConfig, {"num_random_blocks": 3, "num_global_blocks": 2, "seed": 0}),
}
"""Name to structure, all heads alike: DeepSpeed's defaults, narrow and wide windows, and random blocks."""

OURS = ("sdd", "softmax", "dsd", "dds", "attention")
"""Names of our competitors, which take live blocks alone."""

VERIFIED_HEADS = 2
"""Heads of the verification in float64, which is dense and quadratic; the heads of a layout are alike."""


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


@dataclass(frozen=True)
class Row:
    """One measured competitor in one direction.

    The floor of a GPU is what its `Ceilings` allow for the bytes and FLOPs of live blocks alone, that of a CPU density
    times the time of the dense competitor.
    """

    name: str
    direction: str
    dense: str
    milliseconds: float
    to_dense: float
    to_floor: float
    rounds: int


@dataclass(frozen=True)
class Competitor:
    """`call(*inputs)`, differentiated by all inputs unless it is `forward_only`; `dense` names the competitor that does
    the same job densely."""

    name: str
    dense: str
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    output_grad: Tensor
    forward_only: bool = False


def competitor(
    name: str, dense: str, call: Callable[..., Tensor], inputs: Sequence[Tensor], forward_only: bool = False
) -> Competitor:
    with torch.no_grad():
        return Competitor(name, dense, call, tuple(inputs), torch.randn_like(call(*inputs)), forward_only)


def grid(
    layouts: list[str], blocks: list[int], dtypes: list[str], batch: int, heads: int, seq_len: int, head_dim: int
) -> list[Case]:
    return [
        Case(layout, block, dtype, batch, heads, seq_len, head_dim)
        for dtype in dtypes
        for layout in layouts
        for block in blocks
    ]


def run_case(case: Case, device: torch.device, repeats: int, seconds: float) -> tuple[float, list[Row]]:
    """Verifies the case, then times it: `repeats` rounds, or as many as begin within `seconds`, three at least.

    Returns:
        The layout's density, and the rows.

    Raises:
        ArithmeticError: an output or gradient is further from float64 than plain PyTorch's error allows.
    """
    structure, options = LAYOUTS[case.layout]
    layout = structure(num_heads=case.heads, block=case.block, **options).make_bool_layout(case.seq_len)
    verify(case, layout, device)
    live, dtype = density(layout), DTYPES[case.dtype]
    size = Size(case.batch, case.heads, case.seq_len, case.head_dim, live, dtype.itemsize)
    competitors = make_competitors(case, layout.to(device))
    return live, measure(competitors, size, dtype, device, repeats, seconds, describe(case, live))


def measure(
    competitors: list[Competitor],
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    seconds: float,
    title: str,
) -> list[Row]:
    """Times the competitors in turns, each in both directions unless it has one."""
    ceilings = Ceilings.measure(device, dtype) if device.type == "cuda" else None
    runs = {
        (runner.name, direction): partial(time_of, runner.call, runner.inputs, runner.output_grad, direction, device)
        for runner in competitors
        for direction in ((FORWARD,) if runner.forward_only else (FORWARD, TRAIN))
    }
    times = in_turns(runs, repeats, seconds, title)
    medians = {key: statistics.median(samples) for key, samples in times.items()}
    dense_names = {runner.name: runner.dense for runner in competitors}
    rows = []
    for (name, direction), mine in medians.items():
        dense_name = dense_names[name]
        dense = medians[dense_name, direction]
        floor = size.density * dense if ceilings is None else operation_floor(ceilings, size, dense_name, direction)
        rounds = len(times[name, direction])
        rows.append(Row(name, direction, dense_name, mine, mine / dense, mine / floor, rounds))
    return rows


def make_competitors(case: Case, layout: Tensor) -> list[Competitor]:
    """Ours first, then dense PyTorch's parts and whole, masked and looping over block rows."""
    ours = our_operations(layout, case.block, case.head_dim)
    query, key, value = inputs = tuple(dense_inputs(case, case.heads, layout.device))
    scores = ours["sdd"](query, key).detach()
    probs = ours["softmax"](scores).detach()
    dense_scores = (query @ key.transpose(-1, -2)).detach()
    dense_probs = (dense_scores * case.head_dim**-0.5).softmax(-1)
    mask = to_token_mask(layout, case.block)[None]

    def dense_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-1, -2) * case.head_dim**-0.5).softmax(-1) @ value

    def masked_sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_by_block_rows(query, key, value, layout[0], case.block)

    return [
        competitor("sdd", "dense q @ k^T", ours["sdd"], (query, key)),
        competitor("dense q @ k^T", "dense q @ k^T", lambda q, k: q @ k.transpose(-1, -2), (query, key)),
        competitor("softmax", "dense softmax", ours["softmax"], (scores,)),
        competitor("dense softmax", "dense softmax", lambda x: (x * case.head_dim**-0.5).softmax(-1), (dense_scores,)),
        competitor("dsd", "dense p @ v", ours["dsd"], (probs, value)),
        competitor("dense p @ v", "dense p @ v", torch.matmul, (dense_probs, value)),
        competitor("dds", "dense v^T @ p^T", ours["dds"], (value.mT, probs)),
        competitor("dense v^T @ p^T", "dense v^T @ p^T", lambda v, p: v @ p.mT, (value.mT, dense_probs)),
        competitor("attention", "SDPA dense", ours["attention"], inputs),
        competitor("SDPA dense", "SDPA dense", scaled_dot_product_attention, inputs),
        competitor("SDPA bool mask", "SDPA dense", masked_sdpa, inputs),
        competitor("dense attention in parts", "SDPA dense", dense_attention, inputs),
        competitor("loop over block rows", "SDPA dense", loop, inputs),
    ]


def our_operations(layout: Tensor, block: int, head_dim: int) -> dict[str, Callable[..., Tensor]]:
    index, scale = BlockIndex.build(layout, block), head_dim**-0.5
    sdd, dsd = MatMul(index, block, "sdd", trans_b=True), MatMul(index, block, "dsd")
    softmax = Softmax(index, block)
    return {
        "sdd": sdd,
        "softmax": lambda scores: softmax(scores, scale=scale),
        "dsd": dsd,
        "dds": MatMul(index, block, "dds", trans_b=True),
        "attention": lambda query, key, value: dsd(softmax(sdd(query, key), scale=scale), value),
    }


def their_meaning(case: Case, layout: Tensor, heads: int) -> dict[str, Callable[..., Tensor]]:
    """The same operations from `ds_sparse.reference`."""
    block, scale = case.block, case.head_dim**-0.5
    return {
        "sdd": lambda query, key: reference.matmul(query, key, layout, block, "sdd", False, True),
        "softmax": lambda scores: reference.softmax(scores, layout, block, heads, scale=scale),
        "dsd": lambda probs, value: reference.matmul(probs, value, layout, block, "dsd", False, False),
        "dds": lambda value, probs: reference.matmul(value, probs, layout, block, "dds", False, True),
        "attention": lambda query, key, value: reference.attention(query, key, value, layout, block, scale=scale),
    }


def attention_by_block_rows(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, block: int) -> Tensor:
    """What a user writes without us: each block row against its gathered keys. layout: (R, C)."""
    rows = []
    for row, live in enumerate(layout):
        tokens = live.repeat_interleave(block).nonzero().flatten()
        keys, values = key.index_select(2, tokens), value.index_select(2, tokens)
        scores = query[:, :, row * block : (row + 1) * block] @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        rows.append(scores.softmax(-1) @ values)
    return torch.cat(rows, dim=2)


def verify(case: Case, layout: Tensor, device: torch.device) -> None:
    """Holds outputs and gradients of our operations to the reference in float64.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    heads = min(case.heads, VERIFIED_HEADS)
    layout = layout[:heads].to(device)
    query, key, value = dense_inputs(case, heads, device)
    ours, theirs = our_operations(layout, case.block, case.head_dim), their_meaning(case, layout, heads)
    scores = ours["sdd"](query, key).detach()
    probs = ours["softmax"](scores).detach()
    inputs = {
        "sdd": (query, key),
        "softmax": (scores,),
        "dsd": (probs, value),
        "dds": (value.mT, probs),
        "attention": (query, key, value),
    }
    require_same_meaning(str(case), ours, theirs, inputs, device)


def dense_inputs(case: Case, heads: int, device: torch.device) -> list[Tensor]:
    """Query, key and value."""
    return random_tensors(3, (case.batch, heads, case.seq_len, case.head_dim), DTYPES[case.dtype], device)


def describe(case: Case, live: float) -> str:
    return f"{case.layout} block {case.block} {case.dtype}, density {live:.1%}"


def table(case: Case, live: float, rows: list[Row]) -> Iterator[str]:
    """Lines: milliseconds, ratio to the dense competitor, ratio to the floor, and the break-even density.

    That is the density at which the time would be the dense competitor's if it grew with the density, as it does but
    for the bytes of dense operands.
    """
    rounds = rows[0].rounds
    yield (
        f"{describe(case, live)}, B {case.batch}, H {case.heads}, T {case.seq_len}, D {case.head_dim}; "
        f"medians of {rounds} rounds"
    )
    heading = f"{'ms':>9} {'x dense':>8} {'x floor':>8} {'break-even':>10}"
    yield f"{'':26}{FORWARD:>38}{TRAIN:>39}"
    yield f"{'':26}{heading} {heading}"
    for forward, train in zip(rows[::2], rows[1::2], strict=True):
        cells = [
            f"{row.milliseconds:9.2f} {row.to_dense:8.2f} {row.to_floor:8.2f} {break_even(row, live):>10}"
            for row in (forward, train)
        ]
        yield f"{forward.name:26}{cells[0]} {cells[1]}".rstrip()


def break_even(row: Row, live: float) -> str:
    """In per cent; nothing for competitors that do not leave anything out."""
    return f"{live / row.to_dense:.1%}" if row.name in OURS else ""


def record(case: Case, live: float, rows: list[Row]) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    return [asdict(case) | {"density": live} | asdict(row) for row in rows]
