"""MatMul and Softmax, alone and as attention, beside what PyTorch offers for the same job.

A case is data; `run_case` verifies it, times all competitors in turns in one process, and returns rows of numbers. Who
does not take a case, or is wrong, is named with the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import reference
from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops import MatMul, Softmax
from ..verify.accuracy import random_tensors, require_as_accurate, require_same_meaning
from .bsr import NO_BACKWARD, bsr_operations
from .floors import Size
from .layouts import make_layout
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, in_three_digits
from .operations import Competitor, Row, competitor, find, measure, without_time
from .reasons import Unsupported, in_short
from .runs import by_case, restored

DENSE = {
    "sdd": "dense q @ k^T",
    "softmax": "dense softmax",
    "dsd": "dense p @ v",
    "dds": "dense v^T @ p^T",
    "attention": "SDPA dense",
}
"""Our operations, which take live blocks alone, and who does the same job densely. Softmax gets scores that are scaled
already: others would need a pass of their own for that."""

BSR = "torch.sparse"

VERIFIED = 2
"""Sequences and heads of the verification in float64, which is dense and quadratic; the heads of a layout are alike."""

SCORES_ON_A_GPU = 48 * 4096**2
"""Live or not, of all heads and sequences: with as many, cases take 50 us and more."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "operations": list(DENSE),
        "layout": ["fixed", "bslongformer", "bslongformer-1"],
        "block": [64, 16],
        "dtype": ["fp32", "bf16"],
        "seq_len": [2048],
        "head_dim": [64],
        "heads": [12],
        "batch": [1],
        "seconds": 60,
    },
    "cuda": {
        "operations": ["sdd", "softmax", "dsd", "dds"],
        "layout": ["bslongformer-9", "random-5", "random-25", "dense-row"],
        "block": [16, 32, 64, 128],
        "dtype": ["bf16"],
        "seq_len": [4096],
        "head_dim": [64],
        "heads": [4],
        "batch": None,
        "seconds": 5,
    },
}
"""What a device is measured on. Without a batch it is what `SCORES_ON_A_GPU` has room for, one sequence at least."""


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


@dataclass(frozen=True)
class Result:
    """A case, measured."""

    case: Case
    density: float
    rows: list[Row]


def grid(
    layouts: list[str],
    blocks: list[int],
    dtypes: list[str],
    seq_lens: list[int],
    head_dims: list[int],
    heads: int,
    batch: int | None,
) -> list[Case]:
    return [
        Case(layout, block, dtype, batch or fitting_batch(heads, seq_len), heads, seq_len, head_dim)
        for dtype in dtypes
        for seq_len in seq_lens
        for head_dim in head_dims
        for layout in layouts
        for block in blocks
    ]


def fitting_batch(heads: int, seq_len: int) -> int:
    return max(1, SCORES_ON_A_GPU // (heads * seq_len**2))


def run_case(case: Case, operations: Sequence[str], device: torch.device, repeats: int, seconds: float) -> Result:
    """Verifies the case, then times it: `repeats` rounds, or as many as begin within `seconds`, three at least.

    Raises:
        ValueError: tokens or a block that the layout cannot have.
        ArithmeticError: an output or gradient of ours is further from float64 than plain PyTorch's error allows.
    """
    layout = make_layout(case.layout, case.block, case.seq_len).to(device)
    verify(case, layout, operations)
    dtype = DTYPES[case.dtype]
    size = Size.of(layout, case.block, case.batch, case.heads, case.head_dim, dtype.itemsize)
    competitors, absent = make_competitors(case, layout, operations)
    title = f"{case.layout} block {case.block} {case.dtype}"
    return Result(case, size.density, measure(competitors, size, dtype, device, repeats, seconds, title) + absent)


def make_competitors(case: Case, layout: Tensor, operations: Sequence[str]) -> tuple[list[Competitor], list[Row]]:
    """Operation by operation: ours, that of torch.sparse, and dense PyTorch's.

    Returns:
        Those, and rows with the reason for what torch.sparse does not take or has wrong.
    """
    ours = our_operations(layout, case.block, case.head_dim)
    query, key, value = dense_inputs(case, case.batch, case.heads, layout.device)
    inputs = inputs_by_operation(case, ours, query, key, value)
    theirs, absent = bsr_competitors(case, layout, {name: inputs[name] for name in operations})
    competitors = []
    for name in operations:
        competitors.append(competitor(name, DENSE[name], ours[name], inputs[name]))
        competitors += [runner for runner in theirs if runner.dense == DENSE[name]]
        if name == "attention":
            competitors += attention_competitors(case, layout, query, key, value)
        else:
            competitors.append(dense_competitor(name, case, query, key, value))
    return competitors, absent


def our_operations(layout: Tensor, block: int, head_dim: int) -> dict[str, Callable[..., Tensor]]:
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


def their_meaning(case: Case, layout: Tensor, heads: int) -> dict[str, Callable[..., Tensor]]:
    """The same operations from `ds_sparse.reference`."""
    block = case.block
    attention: Callable[..., Any] = reference.attention
    return {
        "sdd": lambda query, key: reference.matmul(query, key, layout, block, "sdd", False, True),
        "softmax": lambda scores: reference.softmax(scores, layout, block, heads),
        "dsd": lambda probs, value: reference.matmul(probs, value, layout, block, "dsd", False, False),
        "dds": lambda value, probs: reference.matmul(value, probs, layout, block, "dds", False, True),
        "attention": lambda query, key, value: attention(query, key, value, layout, block, scale=case.scale),
    }


def dense_inputs(case: Case, batch: int, heads: int, device: torch.device) -> list[Tensor]:
    """Query, key and value."""
    return random_tensors(3, (batch, heads, case.seq_len, case.head_dim), DTYPES[case.dtype], device)


def inputs_by_operation(
    case: Case, ours: dict[str, Callable[..., Tensor]], query: Tensor, key: Tensor, value: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    scores = ours["sdd"](query, key) * case.scale
    probs = ours["softmax"](scores)
    return {
        "sdd": (query, key),
        "softmax": (scores,),
        "dsd": (probs, value),
        "dds": (value.mT, probs),
        "attention": (query, key, value),
    }


def bsr_competitors(
    case: Case, layout: Tensor, inputs: dict[str, tuple[Tensor, ...]]
) -> tuple[list[Competitor], list[Row]]:
    """Verified with the very inputs that they are timed with; and rows with the reasons for those that are not there.

    Only what their calls raise is such a reason: their inputs and the reference are ours, and so is what fails there.
    """
    found: list[Competitor] = []
    calls: dict[str, Callable[..., Tensor]] = {}
    reasons: dict[str, str] = {}
    with warnings.catch_warnings():
        # That block-sparse rows are in beta state, and that their parameters are not tuned for this GPU.
        warnings.simplefilter("ignore")
        try:
            calls = bsr_operations(layout, case.block, case.batch * case.heads, DTYPES[case.dtype])
        except (Unsupported, ImportError) as error:
            reasons = dict.fromkeys(inputs, in_short(error))
        for name, arguments in inputs.items():
            if name in reasons:
                continue
            try:
                output = calls[name](*arguments)
            except Exception as error:  # noqa: BLE001 - whatever stops it is a line of the table
                reasons[name] = in_short(error)
                continue
            try:
                verify_ends(name, case, layout, output, arguments)
            except ArithmeticError as error:
                reasons[name] = in_short(error)
                continue
            found.append(competitor(f"{BSR} {name}", DENSE[name], calls[name], arguments, NO_BACKWARD))
    return found, [
        Row(f"{BSR} {name}", direction, DENSE[name], reason=reason)
        for name, reason in reasons.items()
        for direction in DIRECTIONS
    ]


def dense_competitor(name: str, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Competitor:
    dense = DENSE[name]
    if name == "sdd":
        return competitor(dense, dense, lambda q, k: q @ k.mT, (query, key))
    scores = query @ key.mT * case.scale
    if name == "softmax":
        return competitor(dense, dense, lambda x: x.softmax(-1), (scores,))
    probs = scores.softmax(-1)
    if name == "dsd":
        return competitor(dense, dense, torch.matmul, (probs, value))
    return competitor(dense, dense, lambda v, p: v @ p.mT, (value.mT, probs))


def attention_competitors(case: Case, layout: Tensor, query: Tensor, key: Tensor, value: Tensor) -> list[Competitor]:
    """Dense attention fused, with a mask and in parts, and looping over block rows."""
    dense, inputs = DENSE["attention"], (query, key, value)
    mask = to_token_mask(layout, case.block)[None]

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)

    def in_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * case.scale).softmax(-1) @ value

    def loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_by_block_rows(query, key, value, layout[0], case.block)

    return [
        competitor(dense, dense, scaled_dot_product_attention, inputs),
        competitor("SDPA bool mask", dense, masked, inputs),
        competitor("dense attention in parts", dense, in_parts, inputs),
        competitor("loop over block rows", dense, loop, inputs),
    ]


def attention_by_block_rows(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, block: int) -> Tensor:
    """What a user writes without us: each block row against its gathered keys. layout: (R, C)."""
    rows = []
    for row, live in enumerate(layout):
        tokens = live.repeat_interleave(block).nonzero().flatten()
        keys, values = key.index_select(2, tokens), value.index_select(2, tokens)
        scores = query[:, :, row * block : (row + 1) * block] @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        rows.append(scores.softmax(-1) @ values)
    return torch.cat(rows, dim=2)


def verify(case: Case, layout: Tensor, operations: Sequence[str]) -> None:
    """Holds outputs and gradients of our operations to the reference in float64.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """
    batch, heads = min(case.batch, VERIFIED), min(case.heads, VERIFIED)
    ours = our_operations(layout, case.block, case.head_dim)
    inputs = inputs_by_operation(case, ours, *dense_inputs(case, batch, heads, layout.device))
    theirs = their_meaning(case, layout, heads)
    require_same_meaning(str(case), ours, theirs, {name: inputs[name] for name in operations}, layout.device)


def verify_ends(name: str, case: Case, layout: Tensor, output: Tensor, inputs: Sequence[Tensor]) -> None:
    """Holds the first head of the first sequence and the last of the last in an operation's output to the reference in
    float64.

    Raises:
        ArithmeticError: an error larger than `require_as_accurate` allows.
    """

    def ends(x: Tensor) -> Tensor:
        """(B, H, T, D), (B, H * V, b, b) or (B * H, V, b, b) -> (2, 1, T, D) or (2, V, b, b)."""
        return x.reshape(case.batch * case.heads, -1, *x.shape[2:])[[0, -1]]

    meaning, narrow = their_meaning(case, layout, heads=1)[name], [ends(x) for x in inputs]
    plain, exact = meaning(*narrow), meaning(*(x.double() for x in narrow))
    require_as_accurate(f"output of {name}", ends(output), plain, exact, parts=2)


def report(results: Iterable[Result]) -> Iterator[Iterable[str]]:
    """What is printed: a table a result, as they come; then the summary, and who is faster how often."""
    seen = []
    for result in results:
        seen.append(result)
        yield table(result)
    if seen:
        yield [*summary(seen), "", *verdicts(seen)]


def table(result: Result) -> Iterator[str]:
    """Lines: milliseconds, ratio to the dense competitor, on a GPU the share of the floor; the break-even densities.

    That is the density at which the time would be the dense competitor's if it grew with the density, as it does but
    for the bytes of dense operands; "none" where it would be shorter even with all blocks.
    """
    case, rows = result.case, result.rows
    yield (
        f"{case.layout} block {case.block} {case.dtype}, density {result.density:.1%}, B {case.batch}, H {case.heads}, "
        f"T {case.seq_len}, D {case.head_dim}; medians of {max(row.rounds for row in rows)} rounds"
    )
    floors = has_floors(result)
    heading = f"{'ms':>8} {'x dense':>8}" + f" {'of floor':>10}" * floors
    yield f"{'':25}" + " ".join(f"{direction:>{len(heading)}}" for direction in DIRECTIONS)
    yield f"{'':25}" + " ".join([heading] * len(DIRECTIONS))
    for name in dict.fromkeys(row.name for row in rows if not row.reason):
        cells = (cell(find(rows, name, direction)) for direction in DIRECTIONS)
        yield f"{name:25}{' '.join(f'{text:{len(heading)}}' for text in cells)}".rstrip()
    if ours := [name for name in DENSE if find(rows, name, FORWARD)]:
        found = ((name, [find(rows, name, direction) for direction in DIRECTIONS]) for name in ours)
        densities = (f"{name} {' / '.join(break_even(row, result.density) for row in of)}" for name, of in found)
        yield f"break-even {' / '.join(DIRECTIONS)}: {', '.join(densities)}"
    yield from without_time(rows)


def has_floors(result: Result) -> bool:
    return any(row.to_floor is not None for row in result.rows)


def cell(row: Row | None) -> str:
    if row is None:
        return f"{'-':>8}"
    share = "" if row.to_floor is None else f" {f'{1 / row.to_floor:.0%} {row.bound}':>10}"
    return f"{in_three_digits(row.milliseconds):>8} {in_three_digits(row.to_dense):>8}{share}"


def break_even(row: Row | None, live: float) -> str:
    """In per cent, or that there is none."""
    if row is None:
        return "-"
    return f"{live / row.to_dense:.1%}" if live < row.to_dense else "none"


def summary(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: our milliseconds, and the share of the floor that they reach, or the ratio to the
    dense competitor where there is no floor."""
    names = [name for name in DENSE if any(find(result.rows, name, FORWARD) for result in results)]
    beside = "of floor" if any(map(has_floors, results)) else "x dense"
    yield f"ms ({beside})"
    heading = f"{'layout':14}{'block':>5} {'dtype':5}{'T':>7}{'D':>4} {'live':>6} {'':8}"
    yield heading + "".join(f"{name:>13}" for name in names)
    for result in results:
        case = result.case
        about = f"{case.layout:14}{case.block:5} {case.dtype:5}{case.seq_len:7}{case.head_dim:4} {result.density:6.1%} "
        for direction in (FORWARD, BACKWARD):
            cells = (in_summary(find(result.rows, name, direction)) for name in names)
            yield f"{about}{direction:8}" + "".join(f"{text:>13}" for text in cells)


def in_summary(row: Row | None) -> str:
    if row is None:
        return "-"
    to_dense = f"{row.to_dense:.2f}" if row.to_dense < 10 else f"{row.to_dense:.0f}"
    beside = f"{1 / row.to_floor:.0%}" if row.to_floor else to_dense
    milliseconds = f"{row.milliseconds:.3f}" if row.milliseconds < 1 else in_three_digits(row.milliseconds)
    return f"{milliseconds} ({beside})"


def verdicts(results: list[Result]) -> Iterator[str]:
    """A line an operation and direction: in how many cases it is faster than the others."""
    for name, dense in DENSE.items():
        for direction in (FORWARD, BACKWARD):
            said = []
            for other in (dense, f"{BSR} {name}"):
                pairs = [(find(r.rows, name, direction), find(r.rows, other, direction)) for r in results]
                ratios = [theirs.milliseconds / mine.milliseconds for mine, theirs in pairs if mine and theirs]
                if ratios:
                    faster = sum(ratio > 1 for ratio in ratios)
                    said.append(f"faster than {other} in {faster} of {len(ratios)}")
            if said:
                yield f"{name} {direction}: " + ", ".join(said)


def record(result: Result) -> list[dict[str, Any]]:
    """The rows with their case, flat, as they go into the JSON."""
    return [asdict(result.case) | {"density": result.density} | asdict(row) for row in result.rows]


@dataclass(frozen=True)
class Density:
    """What a row of the JSON has beside its case and its `Row`."""

    density: float


def restore(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    return [
        Result(case, restored(Density, of_case[0]).density, [restored(Row, row) for row in of_case])
        for case, of_case in by_case(Case, rows)
    ]
