"""`ds_sparse bench packed`: attention over packed documents, beside ours without documents and with padding, and beside
what PyTorch has for documents in a row."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..index import BlockIndex, PackedIndex, WindowIndex
from ..modules.structured_attention import whole_blocks
from ..ops import block_sparse_attention, window_attention
from ..verify.accuracy import output_and_gradients
from . import flex
from .cases import BIGBIRD, STRUCTURES, WINDOW, in_k
from .command import add_cases, add_peers, cases_of
from .documents import LONGEST, corpus_lengths, cu_seqlens_of, equal_lengths, places_of
from .machine import DTYPES, FORWARD, TRAIN, in_three_digits
from .markdown import Columns, Table, also, beside, in_ms, made_of, numbers, pair, percent, ratio, spans, takes
from .reasons import Unsupported
from .references import AttentionProblem, Piece, documents, sdpa
from .registry import Peer, tokens_first
from .run import Medians, Operation
from .runs import Result, Row
from .text import Column, lacking, milliseconds_in, number, share, table

DIRECTIONS = (FORWARD, TRAIN)

OPTIONS: dict[str, dict[str, Any]] = {"bigbird": BIGBIRD, "longformer": WINDOW}

STEP = 64
"""Lengths that are tried for a batch without documents are multiples of it where there is no block."""

PART = 64
"""Tokens whose errors are compared with those of plain PyTorch together."""

INDICES = 5
"""Times that the cost of an index is measured; it is their median."""

OURS, UNPACKED, PADDED = "ds_sparse", "unpacked", "padded"

ALWAYS = (OURS, UNPACKED)
"""Peers that every run measures: all others are compared with them."""

DEFAULTS = {"cpu": [PADDED, "sdpa-padded", "sdpa-mask"], "cuda": [PADDED, "varlen", "flex"]}
"""Peers of a device."""

DESCRIPTION = (
    "Attention over documents packed in one row: ours, beside ours on a plain batch of sequences ('unpacked'), on "
    "the same documents padded to the longest, and beside its peers. Outputs and gradients are verified against "
    "float64, then all are timed in turns. 'of unpacked' is the live scores computed a second over those of the "
    "plain batch; 'of what is left' the same over the part that blocks leave which are not full; 'x ours' the "
    "ratio to ds_sparse's time. Names end with the documents' length; 'corpus' draws lengths around a median of "
    "400, up to 8,192. varlen is dense in each document where there is no window. A peer that does "
    "not take a case is named with the reason. On a CPU the cases are cut to two heads and 4,096 tokens, which "
    "their names say (-4k)."
)


@dataclass(frozen=True)
class Case:
    """One line of the grid: a row of `tokens` tokens, filled with documents, H heads with D numbers each.

    Attributes:
        length: tokens of each document; None: lengths as real corpora have them, see `documents`.
        structure: of `OPTIONS`, from each document's own start; or "window".
        size: tokens on a block's side; of a window those that are seen on each side.
        dtype: a name, in cases that are measured.
    """

    name: str
    length: int | None
    structure: str
    size: int
    causal: bool
    tokens: int
    heads: int
    head_dim: int
    dtype: str = ""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document, the last of which ends with the row."""
        if self.length is None:
            return corpus_lengths(self.tokens)[0]
        return equal_lengths(self.tokens, self.length)

    @property
    def longest(self) -> int:
        """Tokens of the longest document that there may be."""
        return min(self.tokens, self.length or LONGEST)

    @property
    def is_window(self) -> bool:
        return self.structure == "window"

    @property
    def kind(self) -> str:
        """The structure in words."""
        what = f" {self.size}" if self.is_window else f", block {self.size}"
        return f"{self.structure}{what}{', causal' if self.causal else ''}"

    def layout(self) -> Tensor | None:
        """bool (1, R, R) on the CPU for the longest document that there may be, of which others use the top-left part;
        None for a window."""
        if self.is_window:
            return None
        config = STRUCTURES[self.structure](num_heads=1, block=self.size, **OPTIONS[self.structure])
        return config.make_bool_layout(whole_blocks(self.longest, self.size))

    def live(self, layout: Tensor | None) -> Callable[[Tensor, Tensor], Tensor]:
        """From places of queries and keys in their document to whether these see those."""
        size = self.size

        def near(q: Tensor, k: Tensor) -> Tensor:
            return (q - k).abs() <= size

        def on_layout(q: Tensor, k: Tensor) -> Tensor:
            return layout[0, q // size, k // size]

        live = near if layout is None else on_layout
        return (lambda q, k: live(q, k) & (q >= k)) if self.causal else live

    def mask(self, layout: Tensor | None, length: int, device: torch.device) -> Tensor:
        """bool (length, length): what each token of a document sees."""
        place = torch.arange(length, device=device)
        return self.live(layout)(place[:, None], place)

    def small(self, heads: int = 2, tokens: int = 4096) -> Case:
        """The case cut to so many heads and tokens: for a CPU. Its name says the tokens where they are fewer."""
        name = f"{self.name}{in_k(tokens)}" if tokens < self.tokens else self.name
        return replace(self, name=name, heads=min(self.heads, heads), tokens=min(self.tokens, tokens))


# fmt: off
TABLE = [
    #    name                     length structure     size causal T     H   D
    Case("bigbird-2048",          2048, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-512",            512, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-4093",          4093, "bigbird",     64, False, 32768, 12,  64),
    Case("bigbird-corpus",        None, "bigbird",     64, False, 32768, 12,  64),
    Case("longformer-corpus",     None, "longformer",  64, False, 32768, 12,  64),
    Case("window-2048",           2048, "window",      64, False, 32768, 12,  64),
    Case("window-corpus",         None, "window",      64, False, 32768, 12,  64),
    Case("bigbird-corpus-causal", None, "bigbird",     64, True,  32768, 12,  64),
    Case("window-corpus-causal",  None, "window",     128, True,  32768, 12,  64),
    Case("bigbird-2048-d128",     2048, "bigbird",     64, False, 32768, 12, 128),
    Case("bigbird-corpus-d128",   None, "bigbird",     64, False, 32768, 12, 128),
    Case("window-corpus-d128",    None, "window",      64, False, 32768, 12, 128),
]
"""Cases that are measured by default: documents of one length and such as real corpora have, in the structures that
people configure; windows of 64 tokens on each side are ModernBERT's."""
# fmt: on


@dataclass(frozen=True)
class About:
    """Facts of a case, beside its times.

    Attributes:
        documents, shortest, longest: how many there are, and tokens of the shortest and of the longest.
        batch, sequence: sequences of the batch without documents, and tokens of each.
        filled: the part of the computed scores that is live; the rest is what blocks have beyond a document, above the
            diagonal or beside a window. None where ours was not built.
        unpacked_filled: the same of the batch without documents.
        index_ms: what a new batch costs before its first layer: the time to make the index, with what its first use
            adds. None where ours was not measured.
        left: the part of the rate without documents that partial blocks leave to packed ones.
    """

    documents: int
    shortest: int
    longest: int
    batch: int
    sequence: int
    filled: float | None = None
    unpacked_filled: float | None = None
    index_ms: float | None = None
    left: float | None = None

    @property
    def lengths(self) -> str:
        return f"{self.longest:,}" if self.shortest == self.longest else f"{self.shortest:,} to {self.longest:,}"


class Problem(AttentionProblem):
    """A case on a device.

    Attributes:
        lengths: of the documents.
        cu_seqlens: int32 (documents + 1), on the device.
        layout: bool (1, R, R), on the device; None for a window.
    """

    def __init__(self, case: Case, device: torch.device, args: argparse.Namespace) -> None:
        super().__init__((1, case.heads, case.tokens, case.head_dim), DTYPES[case.dtype], device, PART)
        self.case, self.lengths = case, case.lengths
        self.longest = max(self.lengths)
        self.cu_seqlens = cu_seqlens_of(self.lengths, device)
        layout = case.layout()
        self.layout = None if layout is None else layout.to(device)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """(documents, longest) each: the number in the row of each token of a padded batch, 0 where there is none; and
        bool, whether there is one."""
        place = torch.arange(self.longest, device=self.device)
        exists = place < self.cu_seqlens.diff()[:, None]
        return torch.where(exists, self.cu_seqlens[:-1, None] + place, 0), exists

    def pieces(self, head: int, peer: Peer) -> Iterable[Piece]:
        @cache
        def mask(length: int) -> Tensor:
            if not peer.dense:
                return self.case.mask(self.layout, length, self.device)
            live = torch.ones(length, length, dtype=torch.bool, device=self.device)
            return live.tril() if self.case.causal else live

        return documents(peer.lengths or self.lengths, mask)

    @cached_property
    def scores_up_to(self) -> list[int]:
        """Live scores of one head of a document, by its length, from 0 to the longest that there may be."""
        mask = self.case.mask(self.layout, self.case.longest, self.device)
        # What a token adds: its own row as far as the diagonal, and its column above that.
        return [0, *(mask.tril().sum(1) + mask.triu(1).sum(0)).cumsum(0).tolist()]

    def live_scores(self, lengths: Sequence[int]) -> int:
        """Scores of one head that documents of these lengths have together."""
        return sum(self.scores_up_to[length] for length in lengths)

    @cached_property
    def unpacked(self) -> tuple[int, int]:
        """Sequences, and tokens of each, of the batch without documents that packed ones are compared with.

        Sequences are as long as the documents, where these are alike. Else they are as long, in whole blocks, as gives
        a token about as many scores as it has in the row.
        """
        case, tokens = self.case, self.case.longest
        if case.length is None:
            wanted, step = self.live_scores(self.lengths) / case.tokens, STEP if self.layout is None else case.size
            tried = range(step, tokens + 1, step)
            tokens = min(tried, key=lambda length: abs(self.scores_up_to[length] / length - wanted))
        return case.tokens // tokens, tokens

    @cached_property
    def work(self) -> tuple[dict[str, int], dict[str, int]]:
        """Tokens, and live scores of a head, of the row and of the batch without documents."""
        batch, sequence = self.unpacked
        tokens = {OURS: self.case.tokens, UNPACKED: batch * sequence}
        return tokens, {OURS: self.live_scores(self.lengths), UNPACKED: self.live_scores([sequence] * batch)}


def packed(problem: Problem) -> Peer:
    """Ours: the index of the batch's documents, made once for all layers."""
    call, blocks = attention_of(problem)
    return Peer(call, filled=filled_part(problem, blocks, problem.lengths))


def unpacked(problem: Problem) -> Peer:
    """Ours without documents: a batch of sequences of one length, see `Problem.unpacked`."""
    batch, tokens = problem.unpacked
    call, blocks = attention_of(problem, tokens)
    return Peer(
        call,
        arranged=lambda x: x[0, :, : batch * tokens].unflatten(1, (batch, tokens)).transpose(0, 1).contiguous(),
        as_row=lambda x: x.transpose(0, 1).flatten(1, 2)[None],
        lengths=(tokens,) * batch,
        filled=filled_part(problem, blocks, [tokens]),
    )


def padded(problem: Problem) -> Peer:
    """Ours on the documents one below the other, padded to the longest."""
    if len(set(problem.lengths)) == 1:
        raise Unsupported("documents of one length need no padding: that is the plain batch")
    call, _ = attention_of(problem, problem.longest)
    return in_batch(problem, partial(call, key_padding_mask=problem.padded[1]))


def attention_of(problem: Problem, tokens: int | None = None) -> tuple[Callable[..., Tensor], BlockIndex]:
    """Attention of the row, or of a batch of sequences of so many tokens, with a new index; and the blocks that are
    computed of the row, or of each sequence."""
    case, layout = problem.case, problem.layout
    edges = problem.cu_seqlens if tokens is None else None
    if layout is None:
        length = case.tokens if tokens is None else tokens
        window = WindowIndex.build(length, case.size, case.causal, device=problem.device, cu_seqlens=edges)
        return partial(window_attention, window_size=window), window.blocks
    index: PackedIndex | BlockIndex
    if edges is not None:
        index = PackedIndex.build(layout, edges, case.size)
        blocks = index.causal_blocks(case.causal)
    else:
        rows = -(-tokens // case.size)
        blocks = BlockIndex.build(layout[:, :rows, :rows].contiguous(), case.size)
        index = blocks = blocks.causal() if case.causal else blocks
    return partial(block_sparse_attention, layout=index, causal=case.causal), blocks


def filled_part(problem: Problem, blocks: BlockIndex, lengths: list[int]) -> float:
    """The part of the scores in live blocks that is live itself; the rest is what short blocks, causality and the ends
    of windows leave dead."""
    computed = blocks.live_blocks / blocks.layout_heads * blocks.block**2
    return problem.live_scores(lengths) / computed


def sdpa_padded(problem: Problem) -> Peer:
    """PyTorch's dense attention of the padded batch. A causal one needs no mask: padding comes after all tokens."""
    case = problem.case
    _, exists = problem.padded
    mask = None if case.causal or bool(exists.all()) else exists[:, None, None]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=case.causal)

    return in_batch(problem, call, dense=True)


def in_batch(problem: Problem, call: Callable[..., Tensor], dense: bool = False) -> Peer:
    """A peer that takes the documents one below the other, padded to the longest with zeros."""
    tokens, exists = problem.padded
    return Peer(
        call,
        arranged=lambda x: (x[0, :, tokens] * exists[..., None]).transpose(0, 1).contiguous(),
        as_row=lambda x: x.transpose(0, 1)[:, exists][None],
        dense=dense,
    )


def mask_of_row(problem: Problem) -> Tensor:
    masks = [problem.case.mask(problem.layout, length, problem.device) for length in problem.lengths]
    return torch.block_diag(*masks).bool()


def flex_attention(problem: Problem) -> Peer:
    """FlexAttention, compiled, with a document mask: tiles without a live score are left out."""
    if problem.device.type != "cuda":
        raise Unsupported("on CUDA only: on a CPU it has no backward")
    return Peer(flex.compiled(flex.of_scores(mask_function(problem), 1, problem.case.tokens, problem.device)))


def mask_function(problem: Problem) -> flex.Live:
    """Says of each score of the row whether it is live."""
    case, layout = problem.case, problem.layout
    document, place = places_of(problem.cu_seqlens, problem.case.tokens)
    if layout is not None:
        # Of one shape for all lengths, or each would be compiled anew.
        missing = max(0, -(-min(case.tokens, LONGEST) // case.size) - layout.shape[1])
        layout = pad(layout, (0, missing, 0, missing))
    live = case.live(layout)
    return lambda b, h, q, k: (document[q] == document[k]) & live(place[q], place[k])


def torch_varlen(problem: Problem) -> Peer:
    """PyTorch's own attention of packed documents: FlashAttention-2, with its windows, or every document dense."""
    from torch.nn.attention.varlen import varlen_attn

    if problem.device.type != "cuda":
        raise Unsupported("on CUDA only")
    case, edges, longest = problem.case, problem.cu_seqlens, problem.longest
    reach = case.size if case.is_window else -1
    window = (reach, 0 if case.causal else reach)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        output: Any = varlen_attn(query, key, value, edges, edges, longest, longest, window_size=window)
        return output.transpose(0, 1)[None]

    return Peer(call, arranged=tokens_first, dense=not case.is_window)


def options(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, TABLE, "window-*,bigbird-512")
    others = [name for name in OPERATION.peers if name not in ALWAYS]
    add_peers(parser, others, DEFAULTS, f", besides {' and '.join(ALWAYS)}")


def about_of(problem: Problem, peers: Mapping[str, Peer]) -> About:
    filled, unpacked_filled = (peers[name].filled if name in peers else None for name in ALWAYS)
    return About(
        len(problem.lengths),
        min(problem.lengths),
        problem.longest,
        *problem.unpacked,
        filled,
        unpacked_filled,
        cost_of_index(problem) if OURS in peers else None,
        filled / unpacked_filled if filled and unpacked_filled else None,
    )


def cost_of_index(problem: Problem) -> float:
    """Milliseconds, on the clock: a first step with a new index less a step with one that was used before. Making an
    index waits for the device, so that what the device does meanwhile is in it."""

    def wait() -> float:
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        return time.perf_counter()

    costs = []
    for _ in range(INDICES):
        start = wait()
        call, _blocks = attention_of(problem)
        output_and_gradients(call, problem.inputs, problem.grad)
        with_index = wait()
        output_and_gradients(call, problem.inputs, problem.grad)
        costs.append((with_index - start) - (wait() - with_index))
    return max(0.0, statistics.median(costs)) * 1e3


def numbers_of(problem: Problem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, float | None]:
    """Rates. Who computes dead scores besides, as dense attention does, has no more live ones for it; the batch without
    documents has other scores than ours, so that its time is not compared."""
    if row.milliseconds is None:
        return {}
    tokens, scores = problem.work
    whose = UNPACKED if row.name == UNPACKED else OURS
    unpacked_ms = medians.get((UNPACKED, row.direction))
    rate = scores[whose] / row.milliseconds
    return {
        "tokens_per_second": tokens[whose] / row.milliseconds * 1e3,
        "of_unpacked": rate / (scores[UNPACKED] / unpacked_ms) if unpacked_ms else None,
        "to_ours": None if row.name == UNPACKED else row.to_ours,
    }


COLUMNS = [
    milliseconds_in(7),
    Column("Mtokens/s", 9, lambda row: in_three_digits(row.tokens_per_second / 1e6)),
    Column("of unpacked", 11, lambda row: share(row.of_unpacked)),
    Column("x ours", 7, lambda row: number(row.to_ours)),
]


def lines(results: list[Result]) -> Iterator[str]:
    """Milliseconds, tokens and live scores a second, and ratios to ds_sparse, of every peer."""
    (result,) = results
    case, about = result.case, result.about
    yield (
        f"{case.name}: {case.kind}, {about.documents} documents of {about.lengths} tokens, T {case.tokens}"
        f", H {case.heads}, D {case.head_dim}, {case.dtype}; medians of {result.rounds} rounds"
    )
    filled = ""
    if about.left is not None:
        filled = (
            f"; live of what blocks compute {about.filled:.0%}, unpacked {about.unpacked_filled:.0%}: partial blocks "
            f"leave {about.left:.0%} of the unpacked rate"
        )
    yield f"unpacked: {about.batch} x {about.sequence} tokens{filled}"
    if about.index_ms is not None:
        forward = result.row(OURS, FORWARD)
        forwards = f", {about.index_ms / forward.milliseconds:.1f} forwards" if forward else ""
        yield f"index of a batch, for all its layers: {in_three_digits(about.index_ms)} ms{forwards}"

    yield from table(result, 12, COLUMNS, DIRECTIONS)
    yield from lacking(result, 12)


def summary(results: list[Result], args: argparse.Namespace) -> Iterator[Iterable[str]]:
    for dtype in dict.fromkeys(result.case.dtype for result in results):
        yield fastest([result for result in results if result.case.dtype == dtype])


def fastest(results: Sequence[Result]) -> Iterator[str]:
    """A line a case and direction: ours, its rate over the unpacked one and over what partial blocks leave of that,
    its time under that with padding, and the fastest other's time over ours."""
    yield (f"{OURS:32}{'':16} {'ms':>8} {'of unpacked':>11} {'of what is left':>15} {'x padded':>8} {'best peer':>18}")
    for result, direction in product(results, DIRECTIONS):
        row = result.row(OURS, direction)
        start = f"{result.case.name:32}{direction:16}"
        if row is None:
            yield f"{start} {'-':>8}"
            continue
        padding = result.row(PADDED, direction)
        best = result.fastest(direction, but=(*ALWAYS, PADDED))
        yield (
            f"{start} {in_three_digits(row.milliseconds):>8} {share(row.of_unpacked):>11} "
            f"{share(of_left(result, direction)):>15} "
            f"{'-' if padding is None else in_three_digits(padding.to_ours):>8} "
            f"{f'{best.name} {in_three_digits(best.to_ours)}' if best else '-':>18}"
        )


def of_left(result: Result, direction: str) -> float | None:
    """Our rate over what partial blocks leave of the rate without documents: what is computed a second, over that."""
    row, left = result.row(OURS, direction), result.about.left
    return row.of_unpacked / left if row and row.of_unpacked and left else None


def pages(results: list[Result], args: argparse.Namespace) -> dict[str, Table]:
    """Documents: ours, its rates over those without documents, tokens a second over those with padding, and what the
    index costs. Peers: what each takes."""
    ways, dtypes = DIRECTIONS, [result.case.dtype for result in results]

    def rate(numbers: Iterable[float | None]) -> str:
        return pair(numbers, "{:.0%}".format).replace("%", " %")

    shown: Columns = {
        "structure": lambda r: f"{r.case.kind}{also(dtypes, r.case.dtype)}",
        "documents, tokens": lambda r: f"{r.about.documents} of {r.about.lengths}",
        "H, T, D": lambda r: f"{r.case.heads}, {r.case.tokens:,}, {r.case.head_dim}",
        "ms": in_ms(OURS, ways),
    }
    rates: Columns = {
        "million tokens/s": lambda r: pair(
            numbers(r, OURS, ways, "tokens_per_second"), lambda x: in_three_digits(x / 1e6)
        ),
        "unpacked batch": lambda r: f"{r.about.batch} x {r.about.sequence:,}",
        "of its rate": lambda r: rate(numbers(r, OURS, ways, "of_unpacked")),
        "partial blocks leave": lambda r: "" if r.about.left is None else percent(r.about.left),
        "of what they leave": lambda r: rate(of_left(r, way) for way in ways),
        "padded takes": lambda r: pair(takes(r, PADDED, OURS, ways), ratio),
        "index, ms": lambda r: "" if r.about.index_ms is None else in_three_digits(r.about.index_ms),
    }
    notes = spans("The padded batch takes", "packed documents", [takes(r, PADDED, OURS, ways) for r in results], ways)
    measured = [name for result in results for name in result.measured]
    others = {name: f"`{name}`" for name in measured if name not in (*ALWAYS, PADDED)}
    return {
        "documents": made_of({**shown, **rates}, results, ways, notes),
        "peers": beside(shown, results, OURS, others, ways),
    }


OPERATION = Operation(
    name="packed",
    description=DESCRIPTION,
    case=Case,
    about=About,
    problem=Problem,
    peers={
        OURS: packed,
        UNPACKED: unpacked,
        PADDED: padded,
        "sdpa-padded": sdpa_padded,
        "sdpa-mask": sdpa(mask=mask_of_row),
        "varlen": torch_varlen,
        "flex": flex_attention,
    },
    ours=(OURS,),
    options=options,
    cases=lambda args: cases_of(args, TABLE, "peers"),
    names=lambda args: list(dict.fromkeys([*ALWAYS, *args.peers])),
    abouts=about_of,
    numbers=numbers_of,
    lines=lines,
    summary=summary,
    pages=pages,
    fields=("tokens_per_second", "of_unpacked", "to_ours"),
    directions=DIRECTIONS,
    trains=True,
    packages=["triton"],
)
"""The first three peers are ours. varlen is PyTorch's own; it has windows, and is dense in each document where a
structure has blocks."""
