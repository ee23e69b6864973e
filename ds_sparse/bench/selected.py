"""`ds_sparse bench selected`: attention of tokens that choose their blocks of keys, index and all, beside dense
attention."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..index.selection import Selection
from ..index.tiles import SIDES
from ..ops import select_blocks, selected_attention
from ..ops.selected import chosen_by, gathers, heads_together
from .cases import in_k
from .command import add_cases, add_peers, cases_of
from .machine import BACKWARD, DIRECTIONS, DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import SHAPE, Columns, Table, also, beside, in_ms, numbers, pair, percent, shape_of
from .reasons import Unsupported
from .references import ROWS_AT_ONCE, AttentionProblem, Piece, sdpa
from .registry import Peer
from .run import Medians, Operation
from .runs import Result, Row
from .text import Column, lacking, milliseconds_in, number, share, table

OURS, INDEX, CHOOSING = "ds_sparse", "index", "select_blocks"

ALWAYS = (OURS, INDEX, CHOOSING)
"""What every run measures."""

DEFAULTS = {"cpu": ["sdpa", "sdpa-mask"], "cuda": ["cudnn", "flash"]}
"""Peers of a device."""

NEIGHBOURS = 8
"""Tokens whose blocks are counted together: as many as kernels take, of 16 heads each, with a tile of 128 rows."""

REPLACED = {"shared": 1.4, "random": None}
"""How neighbours choose, and how many of its blocks a token replaces, on average; None: all."""

MEMORY = 1 << 30
"""Bytes that a mask of tokens by tokens may take; of more, it is not run."""

FLOPS = {FORWARD: 4, BACKWARD: 10, TRAIN: 14}
"""FLOPs of a live pair of tokens and one number of a head."""

DESCRIPTION = (
    "Attention of tokens that choose their blocks of keys: ours as users call it, from the numbers of the blocks,"
    " beside dense attention. Outputs and gradients are verified against float64, then all are timed in turns. "
    "'index' is the part of our forward pass before its kernel; the backward pass makes it again, of keys too. "
    "'select_blocks' is the choosing of as many blocks by means of keys, of each group together, which is in no "
    "other line. TFLOP/s count chosen pairs of tokens alone, of dense peers too; 'x ours' is the ratio to "
    "ds_sparse's time. A token's own block is always among its blocks. 'random' draws the others anew for each "
    f"token; 'shared' keeps those of the token before and replaces {REPLACED['shared']} on average. A peer that "
    "does not take a case is named with the reason. On a CPU the cases are cut to four heads, 2,048 tokens and a "
    "quarter of the blocks at most, which their names say (-2k)."
)


@dataclass(frozen=True)
class Case:
    """One line of the grid: a sequence of `seq_len` tokens, H heads with D numbers each.

    Attributes:
        heads, groups: of query, and of key; those that share a key head choose the same blocks.
        block, top: tokens in a block, and the blocks that a token chooses.
        choice: of `REPLACED`.
        dtype: a name, in cases that are measured.
    """

    name: str
    heads: int
    groups: int
    seq_len: int
    head_dim: int
    block: int
    top: int
    choice: str
    causal: bool
    dtype: str = ""

    batch = 1

    @property
    def kind(self) -> str:
        """The choice in words."""
        return f"{self.choice}, {self.top} blocks of {self.block}{', causal' if self.causal else ''}"

    def block_indices(self) -> Tensor:
        """int32 (1, groups, T, top) on the CPU, the same at every call; -1 for none. A token's own block is the
        first, and no block is there twice.

        The others are drawn from as many parts, one from each: every (top - 1)-th of the blocks before its own, or, if
        not causal, of all others.
        """
        generator = torch.Generator().manual_seed(0)
        others, replaced = self.top - 1, REPLACED[self.choice]
        shape = self.groups, self.seq_len, others
        own = (torch.arange(self.seq_len) // self.block)[:, None]
        there = own if self.causal else torch.full_like(own, -(-self.seq_len // self.block) - 1)
        part = torch.arange(others)
        in_part = (there - part + others - 1).div(others, rounding_mode="floor").clamp(min=0)
        drawn = (torch.rand(shape, generator=generator, dtype=torch.float64) * in_part).long() * others + part
        drawn = drawn.where(in_part > 0, -1)
        if replaced is not None:
            begins = torch.rand(shape, generator=generator) < replaced / others
            since = torch.arange(self.seq_len)[:, None].where(begins, 0).cummax(1).values
            drawn = drawn.gather(1, since)
        # They were numbered without the token's own block.
        drawn += drawn >= own
        return torch.cat([own.expand(self.groups, -1, 1), drawn], 2)[None].int()

    def small(self, heads: int = 4, seq_len: int = 2048) -> Case:
        """The case cut to so many heads and tokens, 16 blocks of these at least, and a quarter of the blocks at most:
        for a CPU. Its name says the tokens where they are fewer."""
        if seq_len >= self.seq_len:
            return self
        name = f"{self.name.removesuffix(in_k(self.seq_len))}{in_k(seq_len)}"
        heads, block = min(self.heads, heads), min(self.block, seq_len // 16)
        top = min(self.top, seq_len // block // 4)
        groups = max(1, heads * self.groups // self.heads)
        return replace(self, name=name, heads=heads, groups=groups, seq_len=seq_len, block=block, top=top)


# fmt: off
TABLE = [
    #    name              H  groups T      D  block top choice  causal
    Case("msa-32k",        64,  4, 32768, 128, 128, 16, "shared", True),
    Case("msa-random-32k", 64,  4, 32768, 128, 128, 16, "random", True),
    Case("nsa-32k",        64,  4, 32768, 128,  64, 16, "shared", True),
    Case("nsa-random-32k", 64,  4, 32768, 128,  64, 16, "random", True),
    Case("encoder-32k",    12, 12, 32768,  64,  64,  8, "shared", False),
    Case("moba-32k",       16, 16, 32768, 128, 512,  3, "random", True),
    Case("moba-64-32k",    16, 16, 32768,  64, 512,  3, "random", True),
    Case("msa-8k",         64,  4,  8192, 128, 128, 16, "shared", True),
    Case("msa-random-8k",  64,  4,  8192, 128, 128, 16, "random", True),
    Case("moba-8k",        16, 16,  8192, 128, 512,  3, "random", True),
    Case("moba-64-8k",     16, 16,  8192,  64, 512,  3, "random", True),
]
"""Cases that are measured by default: the sizes of MiniMax' MSA, of NSA and of MoBA, and an encoder whose heads choose
each for itself."""
# fmt: on


@dataclass(frozen=True)
class About:
    """Facts of a case.

    Attributes:
        pairs: of a query token and a key token that it sees, in all heads.
        density: their part of all pairs.
        together: different blocks that `NEIGHBOURS` tokens have chosen together, on average.
    """

    pairs: int
    density: float
    together: float


class Problem(AttentionProblem):
    """A case on a device. block_indices: int32 (1, groups, T, top) there."""

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        shape, group = (1, case.heads, case.seq_len, case.head_dim), case.heads // case.groups
        super().__init__(shape, DTYPES[case.dtype], device, case.block, group=group, causal=case.causal)
        self.case, self.dtype, self.columns = case, DTYPES[case.dtype], -(-case.seq_len // case.block)
        self.block_indices = case.block_indices().to(device)

    @cached_property
    def chosen(self) -> Tensor:
        """bool (groups, T, C): the blocks that tokens have chosen."""
        numbers = self.block_indices[0].long()
        chosen = numbers.new_zeros(*numbers.shape[:2], self.columns + 1, dtype=torch.bool)
        return chosen.scatter_(2, numbers.where(numbers >= 0, self.columns), True)[..., :-1]

    def live(self, group: int | slice, rows: slice, dense: bool = False) -> Tensor:
        """bool (rows, T), of several groups (groups, rows, T): the keys that tokens see."""
        keys = torch.arange(self.case.seq_len, device=self.device)
        seen = self.chosen[group, rows].repeat_interleave(self.case.block, -1)[..., : len(keys)]
        if dense:
            seen = torch.ones_like(seen)
        return seen & (keys <= keys[rows, None]) if self.case.causal else seen

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        for first in range(0, self.case.seq_len, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, self.case.seq_len))
            live = self.live(head // self.group, rows, peer.dense)
            keys = slice(0, rows.stop if self.case.causal else self.case.seq_len)
            yield rows, keys, live[:, keys]

    @cached_property
    def about(self) -> About:
        case, numbers = self.case, self.block_indices[0].long()
        ends = torch.arange(1, case.seq_len + 1, device=self.device)[:, None] if case.causal else case.seq_len
        seen = (ends - numbers * case.block).clamp(0, case.block).where(numbers >= 0, 0)
        pairs = int(seen.sum()) * self.group
        whole = self.chosen[:, : case.seq_len // NEIGHBOURS * NEIGHBOURS].unflatten(1, (-1, NEIGHBOURS))
        together = whole.any(2).sum(2).double().mean().item()
        return About(pairs, pairs / (case.heads * case.seq_len**2), together)

    def verify(self, name: str, peer: Peer) -> None:
        """As of `AttentionProblem`; of the index, that its bits are the chosen blocks; of a choice, that it is one."""
        if name == INDEX:
            bits = peer.call()[..., None] >> torch.arange(8, dtype=torch.uint8, device=self.device) & 1
            if not torch.equal(bits.flatten(2)[..., : self.columns].bool(), self.chosen):
                raise ArithmeticError("it holds other blocks")
        elif name == CHOOSING:
            ordered, own = peer.call().sort(-1).values, torch.arange(self.case.seq_len, device=self.device)
            twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
            with_own = (ordered == (own // self.case.block)[:, None]).any(-1)
            if twice.any() or not with_own.all() or (ordered >= self.columns).any():
                raise ArithmeticError("it names a block twice or beyond the keys, or not each token's own")
        else:
            super().verify(name, peer)


def ours(problem: Problem) -> Peer:
    case, chosen = problem.case, problem.block_indices
    return Peer(lambda query, key, value: selected_attention(query, key, value, chosen, case.block, causal=case.causal))


def index(problem: Problem) -> Peer:
    """What attention makes of the numbers of blocks for its forward kernel: bits, and on a GPU tiles of rows. It gives
    the bits."""
    case, together = problem.case, heads_together(problem.case.heads, problem.case.groups, problem.case.groups)
    if gathers(problem.inputs[0], together, case.block, problem.columns, case.top):
        raise Unsupported("part of the operator: rows are gathered by block")
    query = problem.inputs[0].unflatten(1, (-1, together)).transpose(2, 3)

    def call() -> Tensor:
        selection = Selection.of_blocks(problem.block_indices, case.block, problem.columns)
        _, _, selection = chosen_by(selection, query, False, SIDES[:1])
        return selection.bits

    return Peer(call, inputs=(), no_backward="forward only: it has no gradient")


def choosing(problem: Problem) -> Peer:
    """Chooses blocks as MoBA does, a token's own among them, but heads of a group together. It gives their numbers."""
    case, (query, key, _) = problem.case, problem.inputs

    def call() -> Tensor:
        return select_blocks(query, key, case.block, case.top, groups=case.groups, causal=case.causal, local=1)

    return Peer(call, inputs=(), no_backward="forward only: it has no gradient")


def mask_of_heads(problem: Problem) -> Tensor:
    size = problem.case.heads * problem.case.seq_len**2
    if size > MEMORY:
        raise Unsupported(f"its mask takes {size / 2**30:.0f} GiB")
    return problem.live(slice(None), slice(0, problem.case.seq_len)).repeat_interleave(problem.group, 0)[None]


def options(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, TABLE, "msa-*,encoder-32k")
    others = [name for name in OPERATION.peers if name not in ALWAYS]
    add_peers(parser, others, DEFAULTS, f", besides {' and '.join(ALWAYS)}")


def numbers_of(problem: Problem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, Any]:
    """The rate on live pairs; the index and the choice compute none."""
    if row.milliseconds is None or row.name in (INDEX, CHOOSING):
        return {}
    flops = FLOPS[row.direction] * problem.case.head_dim * problem.about.pairs
    return {"tflops": flops / row.milliseconds / 1e9}


COLUMNS = [
    milliseconds_in(8),
    Column("TFLOP/s", 8, lambda row: f"{row.tflops:.3g}" if row.tflops else "-"),
    Column("x ours", 7, lambda row: number(row.to_ours)),
]


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, TFLOP/s on live pairs, and ratios to ds_sparse, of every peer."""
    (result,) = results
    case, about = result.case, result.about
    yield (
        f"{case.name}: {case.kind}, density {about.density:.1%}, H {case.heads}, key heads {case.groups}, "
        f"T {case.seq_len}, D {case.head_dim}, {case.dtype}; medians of {result.rounds} rounds"
    )
    yield f"{NEIGHBOURS} neighbours choose {about.together:.1f} different blocks together"
    yield from table(result, 16, COLUMNS, DIRECTIONS)
    yield from lacking(result, 16)


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    for dtype in dict.fromkeys(result.case.dtype for result in results):
        yield fastest([result for result in results if result.case.dtype == dtype])


def fastest(results: list[Result]) -> Iterator[str]:
    """A line a case and direction: ds_sparse, the index in it, and the fastest peer's time over ours."""
    yield f"{OURS:24}{'':8} {'ms':>8} {'TFLOP/s':>8} {'index':>6} {'best peer':>20}"
    for result, direction in product(results, (FORWARD, BACKWARD)):
        row, made = result.row(OURS, direction), result.row(INDEX, direction)
        start = f"{result.case.name:24}{direction:8}"
        if row is None:
            yield f"{start} {'-':>8}"
            continue
        best = result.fastest(direction, but=ALWAYS)
        said = f"{best.name} {number(best.to_ours)}" if best else "-"
        part = share(made.to_ours if made else None)
        yield f"{start} {in_three_digits(row.milliseconds):>8} {row.tflops:8.3g} {part:>6} {said:>20}"


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    ways, dtypes = (FORWARD, BACKWARD), [result.case.dtype for result in results]
    shown: Columns = {
        "each token chooses": lambda r: r.case.kind,
        f"{NEIGHBOURS} together": lambda r: f"{r.about.together:.1f}",
        SHAPE: lambda r: shape_of(r) + also(dtypes, r.case.dtype),
        "groups": lambda r: str(r.case.groups),
        "ms": in_ms(OURS, ways),
        "TFLOP/s": lambda r: pair(numbers(r, OURS, ways, "tflops"), "{:.3g}".format),
        "index, of the forward": lambda r: pair(numbers(r, INDEX, (FORWARD,), "to_ours"), percent),
    }
    measured = [name for result in results for name in result.measured]
    if CHOOSING in measured:
        shown = {**shown, "choosing, ms": in_ms(CHOOSING, (FORWARD,))}
    others = {name: f"`{name}`" for name in measured if name not in ALWAYS}
    return {"cases": beside(shown, results, OURS, others, ways)}


OPERATION = Operation(
    name="selected",
    description=DESCRIPTION,
    case=Case,
    about=About,
    problem=Problem,
    peers={
        OURS: ours,
        INDEX: index,
        CHOOSING: choosing,
        "sdpa": sdpa(),
        "sdpa-mask": sdpa(mask=mask_of_heads),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": sdpa(SDPBackend.FLASH_ATTENTION),
    },
    ours=(OURS, CHOOSING),
    options=options,
    cases=lambda args: cases_of(args, TABLE, "peers"),
    names=lambda args: list(dict.fromkeys([*ALWAYS, *args.peers])),
    abouts=lambda problem, peers: problem.about,
    numbers=numbers_of,
    lines=lines,
    summary=summary,
    pages=pages,
    fields=("tflops", "to_ours"),
    trains=True,
    packages=["triton"],
)
"""sdpa is dense, by the backend of PyTorch's choice; sdpa-mask sees what ours does."""
