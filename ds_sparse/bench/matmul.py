"""`ds_sparse bench matmul`: MatMul and Softmax, alone and as attention, beside what PyTorch offers for the same job."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import reference
from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops import MatMul, Softmax
from ..tools.arguments import positive
from ..tools.block_sizes import BLOCK_SIZES
from ..verify.accuracy import require_as_accurate
from .bsr import NO_BACKWARD, bsr_operations
from .command import NO_FLOOR, add_by_device, listed, one_of
from .floors import Size, over_floor
from .layouts import LAYOUTS, make_layout
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Table, also, beside_operation, has_floors, milliseconds, operations, over, percent
from .references import random_tensors, require_same_meaning
from .registry import Build, Operation, Peer, Result, Row
from .text import columns, lacking_together

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

MASK, IN_PARTS, LOOP = "SDPA bool mask", "dense attention in parts", "loop over block rows"
"""Other ways to attention, which are not verified, as dense PyTorch is not."""

VERIFIED = 2
"""Sequences and heads of the verification in float64, which is dense and quadratic; the heads of a layout are alike."""

SCORES_ON_A_GPU = 48 * 4096**2
"""Scores, live or not, of all heads and sequences: with as many, cases take 50 us and more."""

DEFAULTS: dict[str, tuple[Any, Any]] = {
    "operations": (list(DENSE), ["sdd", "softmax", "dsd", "dds"]),
    "layout": (["fixed", "bslongformer", "bslongformer-1"], ["bslongformer-9", "random-5", "random-25", "dense-row"]),
    "block": ([64, 16], [16, 32, 64, 128]),
    "seq_len": ([2048], [4096]),
    "head_dim": ([64], [64]),
    "heads": ([12], [4]),
    "batch": ([1], None),
}
"""Sizes that a CPU and a GPU are measured on. Without a batch it is as many sequences as `SCORES_ON_A_GPU` has room
for, one at least."""

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
    def title(self) -> str:
        return f"{self.layout} block {self.block} {self.dtype}"


class Problem:
    """A case on a device: its layout, and the operands of each operation.

    Raises:
        ValueError: tokens or a block that the layout cannot have.
    """

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        self.layout = make_layout(case.layout, case.block, case.seq_len).to(device)
        self.size = Size.of(self.layout, case.block, case.batch, case.heads, case.head_dim, self.dtype.itemsize)
        self.ours = our_operations(self.layout, case.block, case.head_dim)

    @cached_property
    def inputs(self) -> dict[str, tuple[Tensor, ...]]:
        return self._inputs(self.case.batch, self.case.heads)

    @cached_property
    def few_inputs(self) -> dict[str, tuple[Tensor, ...]]:
        """Inputs of `VERIFIED` sequences and heads."""
        return self._inputs(min(self.case.batch, VERIFIED), min(self.case.heads, VERIFIED))

    def _inputs(self, batch: int, heads: int) -> dict[str, tuple[Tensor, ...]]:
        shape = (batch, heads, self.case.seq_len, self.case.head_dim)
        query, key, value = random_tensors(3, shape, self.dtype, self.device)
        scores = self.ours["sdd"](query, key) * self.case.scale
        probs = self.ours["softmax"](scores)
        return {
            "sdd": (query, key),
            "softmax": (scores,),
            "dsd": (probs, value),
            "dds": (value.mT, probs),
            "attention": (query, key, value),
        }

    @cached_property
    def bsr(self) -> dict[str, Callable[..., Tensor]]:
        with warnings.catch_warnings():
            # That block-sparse rows are in beta state, and that their parameters are not tuned for this GPU.
            warnings.simplefilter("ignore")
            return bsr_operations(self.layout, self.case.block, self.case.batch * self.case.heads, self.dtype)

    def verify(self, name: str, peer: Peer) -> None:
        """Holds outputs and gradients of ours, and some outputs of torch.sparse, to the reference in float64.

        Raises:
            ArithmeticError: an error larger than `require_as_accurate` allows.
        """
        if name in DENSE:
            inputs = self.few_inputs[name]
            meaning = self.meaning(name, heads=min(self.case.heads, VERIFIED))
            require_same_meaning(f"{self.case.title}, {name}", peer.call, meaning, inputs, self.device)
        elif name.startswith(BSR):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.verify_ends(name.removeprefix(f"{BSR} "), peer)

    def verify_ends(self, name: str, peer: Peer) -> None:
        """Holds the first head of the first sequence and the last of the last to the reference in float64."""

        def ends(x: Tensor) -> Tensor:
            """(B, H, T, D), (B, H * V, b, b) or (B * H, V, b, b) -> (2, 1, T, D) or (2, V, b, b)."""
            return x.reshape(self.case.batch * self.case.heads, -1, *x.shape[2:])[[0, -1]]

        meaning, narrow = self.meaning(name, heads=1), [ends(x) for x in self.inputs[name]]
        plain, exact = meaning(*narrow), meaning(*(x.double() for x in narrow))
        require_as_accurate("output", ends(peer.call(*self.inputs[name])), plain, exact, parts=2)

    def meaning(self, name: str, heads: int) -> Callable[..., Tensor]:
        """An operation from `ds_sparse.reference`."""
        layout, block = self.layout, self.case.block
        attention: Callable[..., Any] = reference.attention
        meanings: dict[str, Callable[..., Any]] = {
            "sdd": lambda query, key: reference.matmul(query, key, layout, block, "sdd", False, True),
            "softmax": lambda scores: reference.softmax(scores, layout, block, heads),
            "dsd": lambda probs, value: reference.matmul(probs, value, layout, block, "dsd", False, False),
            "dds": lambda value, probs: reference.matmul(value, probs, layout, block, "dds", False, True),
            "attention": lambda query, key, value: attention(query, key, value, layout, block, scale=self.case.scale),
        }
        return meanings[name]


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


def ours(name: str) -> Build:
    return lambda problem: Peer(problem.ours[name], problem.inputs[name], DENSE[name])


def bsr(name: str) -> Build:
    return lambda problem: Peer(problem.bsr[name], problem.inputs[name], DENSE[name], no_backward=NO_BACKWARD)


def dense(name: str) -> Build:
    """Dense PyTorch's operation, on dense operands."""

    def build(problem: Problem) -> Peer:
        query, key, value = problem.inputs["attention"]
        if name == "sdd":
            return Peer(lambda q, k: q @ k.mT, (query, key), DENSE[name])
        scores = query @ key.mT * problem.case.scale
        if name == "softmax":
            return Peer(lambda x: x.softmax(-1), (scores,), DENSE[name])
        probs = scores.softmax(-1)
        if name == "dsd":
            return Peer(torch.matmul, (probs, value), DENSE[name])
        return Peer(lambda v, p: v @ p.mT, (value.mT, probs), DENSE[name])

    return build


def attention_by(make: Callable[[Problem], Callable[..., Tensor]]) -> Build:
    return lambda problem: Peer(make(problem), problem.inputs["attention"], DENSE["attention"])


def masked(problem: Problem) -> Callable[..., Tensor]:
    return partial(scaled_dot_product_attention, attn_mask=to_token_mask(problem.layout, problem.case.block)[None])


def in_parts(problem: Problem) -> Callable[..., Tensor]:
    return lambda query, key, value: (query @ key.mT * problem.case.scale).softmax(-1) @ value


def loop(problem: Problem) -> Callable[..., Tensor]:
    return lambda query, key, value: attention_by_block_rows(query, key, value, problem.layout[0], problem.case.block)


def attention_by_block_rows(query: Tensor, key: Tensor, value: Tensor, layout: Tensor, block: int) -> Tensor:
    """Computes attention as a user writes it without us: each block row against its gathered keys. layout: (R, C)."""
    rows = []
    for row, live in enumerate(layout):
        tokens = live.repeat_interleave(block).nonzero().flatten()
        keys, values = key.index_select(2, tokens), value.index_select(2, tokens)
        scores = query[:, :, row * block : (row + 1) * block] @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        rows.append(scores.softmax(-1) @ values)
    return torch.cat(rows, dim=2)


def options(parser: argparse.ArgumentParser) -> None:
    types: dict[str, tuple[Callable[[str], Any], str]] = {
        "operations": (one_of(DENSE), ", ".join(DENSE)),
        "layout": (one_of(LAYOUTS), f"{', '.join(LAYOUTS)}, with the density in percent"),
        "block": (block, f"block sizes: {', '.join(map(str, BLOCK_SIZES))}"),
        "seq_len": (positive, "tokens"),
        "head_dim": (positive, "numbers in a head's vector"),
        "heads": (positive, "of each sequence"),
        "batch": (positive, "sequences"),
    }
    for name, (parse, help) in types.items():
        defaults = dict(zip(("cpu", "cuda"), DEFAULTS[name]))
        in_words = "1; on a GPU as many as have 48 x 4096 x 4096 scores" if name == "batch" else ""
        add_by_device(parser, f"--{name.replace('_', '-')}", listed(parse), help, defaults, in_words)


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
        found += [name, f"{BSR} {name}", DENSE[name], *((MASK, IN_PARTS, LOOP) if name == "attention" else ())]
    return found


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, ratio to the dense counterpart, on a GPU the share of the floor; the break-even densities.

    That is the density at which the time would be the dense one's if it grew with the density, as it does but for the
    bytes of dense operands; "none" where it would be shorter even with all blocks.
    """
    (result,) = results
    case, live = result.case, result.about.density
    yield (
        f"{case.title}, density {live:.1%}, B {case.batch}, H {case.heads}, T {case.seq_len}, D {case.head_dim}; "
        f"medians of {result.rounds} rounds"
    )
    heading = f"{'ms':>8} {'x dense':>8}" + f" {'of floor':>10}" * has_floors(results)

    def cell(row: Row | None) -> str:
        if row is None:
            return f"{'-':>8}".ljust(len(heading))
        share = f" {f'{1 / row.to_floor:.0%} {row.bound}':>10}" if row.to_floor else ""
        return f"{in_three_digits(row.milliseconds):>8} {to_dense(row, in_three_digits):>8}{share}"

    yield from columns(result, 25, heading, cell, DIRECTIONS)

    def break_even(row: Row | None) -> str:
        if row is None or not row.to_dense:
            return "-"
        return f"{live / row.to_dense:.1%}" if live < row.to_dense else "none"

    if mine := [name for name in DENSE if result.row(name, FORWARD)]:
        densities = (f"{name} {' / '.join(break_even(result.row(name, way)) for way in DIRECTIONS)}" for name in mine)
        yield f"break-even {' / '.join(DIRECTIONS)}: {', '.join(densities)}"
    yield from lacking_together(result)


def to_dense(row: Row, write: Callable[[float], str]) -> str:
    return "-" if row.to_dense is None else write(row.to_dense)


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    """Milliseconds of ours in all cases, and who is faster how often."""
    yield [*of_cases(results), "", *verdicts(results)]


def of_cases(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: our milliseconds, and the share of the floor that they reach, or the ratio to the
    dense counterpart where there is no floor."""
    shown = [name for name in DENSE if any(result.row(name, FORWARD) for result in results)]
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
    for (name, beside), way in product(DENSE.items(), (FORWARD, BACKWARD)):
        said = []
        for other in (beside, f"{BSR} {name}"):
            pairs = [over(milliseconds(r, other, (way,)), milliseconds(r, name, (way,))) for r in results]
            ratios = [ratio for (ratio,) in pairs if ratio is not None]
            if ratios:
                said.append(f"faster than {other} in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}")
        if said:
            yield f"{name} {way}: " + ", ".join(said)


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    """Our operations with the part of their floor that they reach, notes on who else computes them; and attention."""
    ways, dtypes = (FORWARD, BACKWARD), [result.case.dtype for result in results]
    shown = [name for name in DENSE if any(result.row(name, FORWARD) for result in results)]
    start: dict[str, Callable[[Result], str]] = {
        "layout, density": lambda r: (
            f"{r.case.layout}, block {r.case.block}, {percent(r.about.density)}" + also(dtypes, r.case.dtype)
        ),
        SHAPE: lambda r: f"{r.case.batch}, {r.case.heads}, {r.case.seq_len}, {r.case.head_dim}",
    }
    found = {}
    if products := [name for name in shown if name != "attention"]:
        found["operations"] = operations(
            start, results, products, {name: (DENSE[name], f"{BSR} {name}") for name in products}, ways
        )
    if "attention" in shown:
        others = {name: name for name in (DENSE["attention"], MASK, LOOP)}
        found["attention"] = beside_operation(start, results, "attention", others, (FORWARD, TRAIN))
    return found


OPERATION = Operation(
    name="matmul",
    description=DESCRIPTION,
    dtypes={"cpu": ["fp32", "bf16"], "cuda": ["bf16"]},
    seconds={"cpu": 60, "cuda": 5},
    case=Case,
    problem=Problem,
    peers={
        **{name: ours(name) for name in DENSE},
        **{f"{BSR} {name}": bsr(name) for name in DENSE},
        **{DENSE[name]: dense(name) for name in DENSE if name != "attention"},
        DENSE["attention"]: attention_by(lambda problem: scaled_dot_product_attention),
        MASK: attention_by(masked),
        IN_PARTS: attention_by(in_parts),
        LOOP: attention_by(loop),
    },
    ours=tuple(DENSE),
    options=options,
    cases=cases,
    names=names,
    numbers=lambda problem, peer, row, medians: over_floor(row, problem.size, problem.dtype, problem.device),
    lines=lines,
    summary=summary,
    pages=pages,
    key="name",
    fields=("dense", "to_dense", "floor_ms", "to_floor", "bound"),
    rates=True,
)
