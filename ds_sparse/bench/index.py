"""`ds_sparse bench index`: what making an index costs, beside attention that walks it and beside FlexAttention's
block mask."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..index import BlockIndex, PackedIndex, WindowIndex
from ..index.cache import memory_of
from ..index.tiles import Tiles
from ..ops import block_sparse_attention
from ..sparsity import BigBirdSparsityConfig, BSLongformerSparsityConfig
from ..verify.accuracy import output_and_gradients, require_as_accurate
from . import flex
from .cases import BIGBIRD, WINDOW, in_k
from .command import add_cases, add_peers, cases_of
from .documents import LONGEST, corpus_lengths, cu_seqlens_of, places_of
from .machine import DTYPES, NO_GRAPH, Repeated, in_three_digits, timed, wall_ms
from .markdown import Table, also, milliseconds, numbers, pair, ratio
from .reasons import in_short
from .references import NAMES, attention_by_pieces, block_rows, random_tensors
from .registry import Build, Peer
from .run import Medians, Operation
from .runs import Result, Row
from .text import Column, lacking, milliseconds_in, number, table
from .tiles import require_blocks, with_tiles

CLOCK, GRAPH = "until done", "graph"
DIRECTIONS = (CLOCK, GRAPH)

BLOCK, HEADS, HEAD_DIM, GROUPS, TOP, REACH = 64, 12, 128, 4, 16, 64
"""Tokens of a block; heads with layouts of their own; of attention the numbers of a head and the groups of heads, each
of which chooses `TOP` blocks a row; tokens that windows reach."""

QUERY_HEADS = 8 * GROUPS
ON_CPU = 8192
"""Tokens that a CPU's cases have at most."""

EXACT, BOUNDED, CHOSEN = "build", "build with capacity", "from_blocks and causal"
FORWARD, TRAIN = "attention forward", "attention forward+backward"
PACKED, PACKED_HERE, WINDOWS = "PackedIndex", "PackedIndex (cu_seqlens on GPU)", "WindowIndex"
FLEX = "create_block_mask"

KINDS = {
    "layout": (EXACT, BOUNDED, FLEX),
    "blocks": (CHOSEN, FORWARD, TRAIN, FLEX),
    "documents": (PACKED, PACKED_HERE, WINDOWS, FLEX),
}
"""What is timed of each kind of case; all are compared with the first."""

OTHERS = {"flex": FLEX}
"""Peers: name on the command line, and in the table."""

CALLS, SHORT_MS = 9, 100
"""Calls in a row on the clock, of which none begins after so many milliseconds."""

WAITS = "it waits for the device, which no CUDA graph does"
FROM_HOST = "a CUDA graph does not send the documents again"

DESCRIPTION = (
    "Verifies that indices hold what they were made of, tile by tile, then times in turns how they are made. "
    f"'{CLOCK}' is on the clock, from the call until the device is done; '{GRAPH}', on a GPU, the device's time alone, "
    "when a CUDA graph repeats what waits for nothing. 'x first' is the ratio to the first line. layout: from "
    f"{HEADS} heads' own layouts. blocks: from {TOP} blocks that each of {GROUPS} groups of heads chooses for each "
    f"row, causal; and attention of {QUERY_HEADS} heads on them, whose index is made before. documents: from those of "
    "a row, and a structure or windows. create_block_mask is FlexAttention's, compiled, for the same blocks. On a CPU "
    f"the cases are cut to a quarter, of {ON_CPU:,} tokens at most, which their names say."
)


@dataclass(frozen=True)
class Case:
    """One line of the grid; `kind` is one of `KINDS`."""

    name: str
    kind: str
    seq_len: int
    dtype: str = ""

    def small(self) -> Case:
        """The case cut for a CPU."""
        seq_len = min(self.seq_len // 4, ON_CPU)
        return replace(self, name=f"{self.kind}{in_k(seq_len)}", seq_len=seq_len)


TABLE = [
    Case(f"{kind}-{thousands}k", kind, 1024 * thousands)
    for kind, lengths in {"layout": (8, 32), "blocks": (8, 32, 128), "documents": (32,)}.items()
    for thousands in lengths
]


@dataclass(frozen=True)
class About:
    """Facts of a case.

    Attributes:
        live_blocks: of all layout heads together.
        index_bytes: of the index with its tiles, the bounded one where there is one.
        entry_bytes, most_bytes: of the tiles' entries, and what they may take: 4 bytes each, on each side no more than
            there is capacity for, and than the layout's blocks divided by the lines of a tile. None where it is exact.
    """

    live_blocks: int
    index_bytes: int | None = None
    entry_bytes: int | None = None
    most_bytes: int | None = None


def time_of(call: Repeated, inputs: Any, grad: Any, direction: str, device: torch.device) -> float:
    """Milliseconds of a call, or of its graph. On the clock the median of some calls in a row, if they are short."""
    if direction == GRAPH:
        return timed(call.graph.replay, device)
    found = [wall_ms(call, device)]
    while len(found) < CALLS and sum(found) < SHORT_MS:
        found.append(wall_ms(call, device))
    return statistics.median(found)


class Problem:
    """A case on a device.

    Attributes:
        live: bool (L, R, C), the blocks that an index has to hold.
        block_indices: int64 (groups, R, `TOP`), those that rows choose, their own among them; and later ones, which
            `causal` leaves out, where there are not enough.
        layout, of_longest: of the longest document, and its index.
        cu_seqlens: on the host, and on the device.
    """

    inputs, grad = (), None

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        self.case, self.device, self.dtype = case, device, DTYPES[case.dtype]
        if case.kind == "layout":
            bigbird: dict[str, Any] = {**BIGBIRD, "different_layout_per_head": True}
            self.live = BigBirdSparsityConfig(HEADS, BLOCK, **bigbird).make_bool_layout(case.seq_len).to(device)
        elif case.kind == "blocks":
            rows = case.seq_len // BLOCK
            scores = torch.rand(GROUPS, rows, rows, generator=torch.Generator().manual_seed(0)).tril_()
            scores.diagonal(dim1=1, dim2=2).fill_(1)
            self.block_indices = scores.topk(min(TOP, rows)).indices.to(device)
            self.live = torch.zeros_like(scores, dtype=torch.bool, device=device)
            self.live.scatter_(2, self.block_indices, True).tril_()
        else:
            lengths = corpus_lengths(case.seq_len)[0]
            window: dict[str, Any] = WINDOW
            longformer = BSLongformerSparsityConfig(1, BLOCK, **window)
            self.layout = longformer.make_bool_layout(min(case.seq_len, LONGEST)).to(device)
            self.of_longest = BlockIndex.build(self.layout, BLOCK)
            at = {"host": torch.device("cpu"), "device": device}
            self.cu_seqlens = {where: cu_seqlens_of(lengths, one) for where, one in at.items()}
            of_each = [self.layout[0, :n, :n] for n in (-(-length // BLOCK) for length in lengths)]
            self.live = torch.block_diag(*of_each).bool()[None]
        self.live_blocks = int(self.live.sum())

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Each token's document, and its place in there."""
        return places_of(self.cu_seqlens["device"], self.case.seq_len)

    def of_row(self, live: flex.Live, block: int) -> Tensor:
        """bool (1, R, R): the blocks of a sequence in which a score is live, found a block row at a time."""
        token = torch.arange(self.case.seq_len, device=self.device)
        rows = [live(0, 0, query[:, None], token).any(0) for query in token.split(block)]
        return torch.stack(rows).unflatten(1, (-1, block)).any(2)[None]

    @cached_property
    def operands(self) -> list[Tensor]:
        """Query, key, value and the output's gradient."""
        shape = (1, QUERY_HEADS, self.case.seq_len, HEAD_DIM)
        query, key, value, grad = random_tensors(4, shape, self.dtype, self.device)
        return [query, key[:, :GROUPS].clone(), value[:, :GROUPS].clone(), grad]

    def verify(self, name: str, peer: Peer) -> None:
        """Holds what a peer makes to what it was made of. Raises ArithmeticError where it is something else."""
        if name in (FORWARD, TRAIN):
            self.verify_attention(peer)
        elif name == FLEX:
            made: Any = peer.call()
            found = sum(int(x.sum()) for x in (made.kv_num_blocks, made.full_kv_num_blocks) if x is not None)
            live = self.live if self.case.kind != "documents" else self.of_row(mask_function(self), BLOCK)
            if found != int(live.sum()):
                raise ArithmeticError(f"it has {found} blocks, and {int(live.sum())} are live")
        else:
            index: Any = peer.call()
            live = self.live if name != WINDOWS else self.of_row(near(self), index.blocks.block)
            require_blocks(index, live, HEAD_DIM, self.dtype)

    def verify_attention(self, peer: Peer) -> None:
        """Holds the output of the last head, and the gradient of its query, to float64."""
        results = peer.call()
        mine = [x[0, -1] for x in self.operands]
        pieces = [*block_rows(self.live[-1].cpu(), BLOCK, self.device, causal=True)]
        plain, _ = attention_by_pieces(mine, pieces)
        exact = attention_by_pieces([x.double() for x in mine], pieces)
        for what, found, other, right, terms in zip(NAMES[:2], results, plain, *exact):
            require_as_accurate(f"{what}, last head", found[0, -1], other, right, self.case.seq_len // BLOCK, terms)


def no_graph(problem: Problem) -> str:
    return "" if problem.device.type == "cuda" else NO_GRAPH


def makes(make: Callable[[Problem], Any], missing: str = "") -> Build:
    """Ours, with the tiles that attention walks. missing: why there is no graph."""

    def build(problem: Problem) -> Peer:
        call = Repeated(lambda: with_tiles(make(problem), HEAD_DIM, problem.dtype))
        return Peer(call, no_backward=no_graph(problem) or missing)

    return build


def from_blocks(problem: Problem) -> BlockIndex:
    return BlockIndex.from_blocks(problem.block_indices, BLOCK).causal()


def packed(problem: Problem, where: str) -> PackedIndex:
    """The index of a batch, `cu_seqlens` of which is on the host or on the device; that of its layout is kept."""
    tokens = problem.case.seq_len if where == "device" else None
    return PackedIndex.build(problem.of_longest, problem.cu_seqlens[where], BLOCK, tokens=tokens)


def windows(problem: Problem) -> WindowIndex:
    tokens, cu_seqlens = problem.case.seq_len, problem.cu_seqlens["host"]
    return WindowIndex.build(tokens, REACH, device=problem.device, cu_seqlens=cu_seqlens)


def attention(trains: bool) -> Build:
    """Attention with an index that was made before; with the gradients of all inputs."""

    def build(problem: Problem) -> Peer:
        *inputs, grad = problem.operands
        index = with_tiles(from_blocks(problem), HEAD_DIM, problem.dtype)
        attend = partial(block_sparse_attention, layout=index, causal=True)
        call = partial(output_and_gradients, attend, inputs, grad) if trains else lambda: [attend(*inputs)]
        return Peer(Repeated(call), no_backward=no_graph(problem))

    return build


def near(problem: Problem) -> flex.Live:
    document, _ = problem.places
    return lambda b, h, q, k: (document[q] == document[k]) & ((q - k).abs() <= REACH)


def mask_function(problem: Problem) -> flex.Live:
    """Says of each score whether it is live, from what a batch or a step brings."""
    if problem.case.kind == "documents":
        layout, (document, place) = problem.layout[0], problem.places
        return lambda b, h, q, k: (document[q] == document[k]) & layout[place[q] // BLOCK, place[k] // BLOCK]
    if problem.case.kind == "blocks":
        chosen = torch.zeros_like(problem.live).scatter_(2, problem.block_indices, True)
        return lambda b, h, q, k: chosen[h, q // BLOCK, k // BLOCK] & (q >= k)
    live = problem.live
    return lambda b, h, q, k: live[h, q // BLOCK, k // BLOCK]


def block_mask(problem: Problem) -> Peer:
    """FlexAttention's mask, by compiled code."""
    of_case = len(problem.live), problem.case.seq_len, BLOCK, problem.device
    call, missing = Repeated(flex.creating(partial(mask_function, problem), *of_case)), no_graph(problem)
    if not missing:
        try:
            _ = call.graph
        except RuntimeError as error:
            missing = in_short(error)
    return Peer(call, no_backward=missing)


def options(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, TABLE, "blocks-*,layout-8k")
    add_peers(parser, OTHERS, list(OTHERS), "; flex is compiled for each case", in_words="all")


def names(args: argparse.Namespace) -> list[str]:
    """Ours, without what is the same on a CPU, and the peers."""
    ours = [name for name in OPERATION.ours if name != PACKED_HERE or args.device != "cpu"]
    return [*ours, *(OTHERS[name] for name in args.peers)]


def about_of(problem: Problem, peers: Mapping[str, Peer]) -> About:
    made = next((name for name in (BOUNDED, CHOSEN, PACKED) if name in peers), None)
    if made is None:
        return About(problem.live_blocks)
    index: Any = peers[made].call()
    if made == PACKED:
        return About(problem.live_blocks, memory_of(index))
    tiles = [x for x in index._made.values() if isinstance(x, Tiles)]
    # Both sides have as many lines.
    tiled = [index.layout_heads * -(-index.rows // max(1, x.tile // BLOCK)) * index.columns for x in tiles]
    most = sum(4 * min(index.capacity, blocks) for blocks in tiled)
    return About(problem.live_blocks, memory_of(index), sum(x.entries.nbytes for x in tiles), most)


def numbers_of(problem: Problem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, Any]:
    first = medians.get((KINDS[problem.case.kind][0], row.direction))
    return {"to_ours": row.milliseconds / first if row.milliseconds and first else None}


def share_of_index(name: str, to_index: float | None) -> float | None:
    """The part that making an index has of a layer that makes one, and attends."""
    return 1 / (1 + to_index) if name in (FORWARD, TRAIN) and to_index else None


def part(share: float) -> str:
    return f"{in_three_digits(100 * share)} %"


COLUMNS = [
    milliseconds_in(9),
    Column("x first", 8, lambda row: number(row.to_ours)),
    Column("index in it", 11, lambda row: pair([share_of_index(row.name, row.to_ours)], part)),
]


def ways_of(results: Iterable[Result]) -> Sequence[str]:
    """Without graphs where nothing has one."""
    return [way for way in DIRECTIONS if way == CLOCK or any(r.row(name, way) for r in results for name in r.measured)]


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, their ratio to the first line's, and the part of the index in a layer that makes one."""
    (result,) = results
    ways = ways_of(results)
    yield f"{result.case.name}, {result.case.dtype}; medians of {result.rounds} rounds"
    yield memory(result)
    yield from table(result, 32, COLUMNS[: 3 if result.case.kind == "blocks" else 2], ways)
    yield from lacking(replace(result, rows=[row for row in result.rows if row.direction in ways]))


def memory(result: Result) -> str:
    about = result.about
    said = f"{about.live_blocks:,} live blocks of {BLOCK}"
    if about.index_bytes is not None:
        said += f", index {about.index_bytes:,} bytes"
    if about.entry_bytes is not None:
        said += f", entries {about.entry_bytes:,} of {about.most_bytes:,} that they may take"
    return said


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    """A line for each that was timed."""
    ways, dtypes, rows = ways_of(results), [result.case.dtype for result in results], []
    for result in results:
        for name in result.measured:
            ratios = numbers(result, name, ways, "to_ours")
            shares = [share_of_index(name, x) for x in ratios]
            cells = [pair(milliseconds(result, name, ways)), pair(ratios, ratio), pair(shares, part)]
            rows.append([f"{result.case.name}{also(dtypes, result.case.dtype)}", name, *cells])
    notes = [f"{result.case.name}: {memory(result)}." for result in results]
    return {"indices": Table(["case", "what", "ms", "of the first", "index in it"], rows, ways[1:] and ways, notes)}


OPERATION = Operation(
    name="index",
    description=DESCRIPTION,
    case=Case,
    about=About,
    problem=Problem,
    peers={
        EXACT: makes(lambda problem: BlockIndex.build(problem.live, BLOCK), WAITS),
        BOUNDED: makes(lambda problem: BlockIndex.build(problem.live, BLOCK, capacity=problem.live_blocks)),
        CHOSEN: makes(from_blocks),
        FORWARD: attention(trains=False),
        TRAIN: attention(trains=True),
        PACKED: makes(partial(packed, where="host"), FROM_HOST),
        PACKED_HERE: makes(partial(packed, where="device")),
        WINDOWS: makes(windows, FROM_HOST),
        FLEX: block_mask,
    },
    ours=(EXACT, BOUNDED, CHOSEN, FORWARD, TRAIN, PACKED, PACKED_HERE, WINDOWS),
    options=options,
    cases=lambda args: cases_of(args, TABLE, "peers"),
    names=names,
    of_case=lambda case: KINDS[case.kind],
    abouts=about_of,
    numbers=numbers_of,
    lines=lines,
    pages=pages,
    fields=("to_ours",),
    directions=DIRECTIONS,
    time_of=time_of,
)
