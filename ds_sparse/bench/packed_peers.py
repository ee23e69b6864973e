"""Whoever computes a case of `ds_sparse bench packed`: ours, packed, as a plain batch and padded, and what others have
for documents in a row.

A builder takes a `Problem` and returns a `Peer`, or raises `Unsupported` with the reason in a few words. Indices and
masks are built there and cost nothing later, as in a model whose layers share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..index import BlockIndex, PackedIndex, WindowIndex
from ..ops import block_sparse_attention, window_attention
from .documents import LONGEST, cu_seqlens_of, places_of
from .packed_cases import Case
from .peers import lists
from .reasons import Unsupported

FLEX_TILE = 128
"""Tokens on a side of FlexAttention's tiles."""

MOST_COMPILATIONS = 64
"""Of FlexAttention in a process, far more than all cases need."""

ROWS_AT_ONCE = 1024
"""Queries of a mask that tiles are made of, at a time."""


class Problem:
    """A case on a device.

    Attributes:
        lengths: of the documents.
        cu_seqlens: int32 (documents + 1), on the device.
        layout: bool (1, R, R), on the device; None for a window.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.lengths = case.lengths
        self.cu_seqlens = cu_seqlens_of(self.lengths, device)
        layout = case.layout()
        self.layout = None if layout is None else layout.to(device)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor]:
        """(documents, longest) each: the number in the row of each token of a padded batch, 0 where there is none; and
        bool, whether there is one."""
        place = torch.arange(self.longest, device=self.device)
        exists = place < self.cu_seqlens.diff()[:, None]
        return torch.where(exists, self.cu_seqlens[:-1, None] + place, 0), exists


def as_given(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Peer:
    """`call(query, key, value)`, and what to know of it.

    Attributes:
        arranged: from a row (1, H, T, D) to what `call` takes.
        as_row: from what `call` takes or returns to (1, H, T', D), T' the tokens of `lengths` together.
        lengths: of the documents that it computes, from the row's start; None: all of the case.
        dense: every token sees its whole document, whatever the structure says, or all before it.
        filled: the part of the scores in the blocks that are computed that is live; None where it is not known.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    arranged: Callable[[Tensor], Tensor] = as_given
    as_row: Callable[[Tensor], Tensor] = as_given
    lengths: tuple[int, ...] | None = None
    dense: bool = False
    filled: float | None = None


def packed(problem: Problem) -> Peer:
    """Ours: the index of the batch's documents, made once for all layers."""
    call, blocks = on_documents(problem)
    return Peer(call, filled=filled_part(problem, blocks, problem.lengths))


def on_documents(problem: Problem) -> tuple[Callable[[Tensor, Tensor, Tensor], Tensor], BlockIndex]:
    """Attention of the row, with a new index; and the blocks that are computed."""
    case = problem.case
    if problem.layout is None:
        window = WindowIndex.build(
            case.tokens, case.size, case.causal, device=problem.device, cu_seqlens=problem.cu_seqlens
        )
        return lambda query, key, value: window_attention(query, key, value, window), window.blocks
    index = PackedIndex.build(problem.layout, problem.cu_seqlens, case.size)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return block_sparse_attention(query, key, value, index, causal=case.causal)

    return call, index.causal_blocks(case.causal)


def unpacked(problem: Problem) -> Peer:
    """Ours without documents: a batch of sequences of one length, see `Case.unpacked`."""
    batch, tokens = problem.case.unpacked(problem.layout)
    call, blocks = plain(problem, tokens)
    return Peer(
        call,
        arranged=lambda x: x[0, :, : batch * tokens].unflatten(1, (batch, tokens)).transpose(0, 1).contiguous(),
        as_row=lambda x: x.transpose(0, 1).flatten(1, 2)[None],
        lengths=(tokens,) * batch,
        filled=filled_part(problem, blocks, [tokens]),
    )


def padded(problem: Problem) -> Peer:
    """Ours on the documents one below the other, padded to the longest."""
    refuse_equal(problem)
    _, exists = problem.padded
    call, _ = plain(problem, problem.longest)
    return in_batch(problem, lambda query, key, value: call(query, key, value, exists))


def plain(problem: Problem, tokens: int) -> tuple[Callable[..., Tensor], BlockIndex]:
    """Attention of a batch of sequences of so many tokens, (B, H, tokens, D), with or without a key padding mask; and
    the blocks that are computed of each."""
    case = problem.case
    if problem.layout is None:
        window = WindowIndex.build(tokens, case.size, case.causal, device=problem.device)

        def of_window(query: Tensor, key: Tensor, value: Tensor, exists: Tensor | None = None) -> Tensor:
            return window_attention(query, key, value, window, key_padding_mask=exists)

        return of_window, window.blocks
    blocks = -(-tokens // case.size)
    index = BlockIndex.build(problem.layout[:, :blocks, :blocks].contiguous(), case.size)
    index = index.causal() if case.causal else index

    def of_layout(query: Tensor, key: Tensor, value: Tensor, exists: Tensor | None = None) -> Tensor:
        return block_sparse_attention(query, key, value, index, causal=case.causal, key_padding_mask=exists)

    return of_layout, index


def filled_part(problem: Problem, blocks: BlockIndex, lengths: list[int]) -> float:
    """The part of the scores in live blocks that is live itself; the rest is what short blocks, causality and the ends
    of windows leave dead."""
    computed = blocks.live_blocks / blocks.layout_heads * blocks.block**2
    return problem.case.live_scores(problem.layout, lengths) / computed


def sdpa_padded(problem: Problem) -> Peer:
    """PyTorch's dense attention of the padded batch. A causal one needs no mask: padding comes after all tokens."""
    case = problem.case
    _, exists = problem.padded
    mask = None if case.causal or bool(exists.all()) else exists[:, None, None]

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=case.causal)

    return in_batch(problem, call, dense=True)


def in_batch(problem: Problem, call: Callable[[Tensor, Tensor, Tensor], Tensor], dense: bool = False) -> Peer:
    """A peer that takes the documents one below the other, padded to the longest with zeros."""
    tokens, exists = problem.padded
    return Peer(
        call,
        arranged=lambda x: (x[0, :, tokens] * exists[..., None]).transpose(0, 1).contiguous(),
        as_row=lambda x: x.transpose(0, 1)[:, exists][None],
        dense=dense,
    )


def refuse_equal(problem: Problem) -> None:
    if len(set(problem.lengths)) == 1:
        raise Unsupported("documents of one length need no padding: that is the plain batch")


def sdpa_mask(problem: Problem) -> Peer:
    """PyTorch's attention of the whole row, with a mask of tokens by tokens."""
    documents = [problem.case.mask(problem.layout, length, problem.device) for length in problem.lengths]
    mask = torch.block_diag(*documents).bool()
    return Peer(lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask))


def flex(problem: Problem) -> Peer:
    """FlexAttention, compiled, with a document mask: tiles without a live score are left out."""
    from torch.nn.attention.flex_attention import flex_attention

    if problem.device.type != "cuda":
        raise Unsupported("on CUDA only: on a CPU it has no backward")
    mask = block_mask(mask_function(problem), 1, problem.case.tokens, problem.device)
    # Cases that differ in nothing but numbers share what is compiled. Past the limit, a full graph is an error.
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return Peer(lambda query, key, value: compiled(query, key, value, block_mask=mask))


def mask_function(problem: Problem) -> Callable[[Any, Any, Tensor, Tensor], Tensor]:
    """What FlexAttention asks of each score: from (batch, head, query, key) to whether the query sees the key."""
    case = problem.case
    document, place = places_of(problem.lengths, problem.device)
    layout, size = None, case.size
    if problem.layout is not None:
        # Of one shape for all lengths, or each would be compiled anew.
        missing = max(0, -(-min(case.tokens, LONGEST) // size) - problem.layout.shape[1])
        layout = pad(problem.layout[0], (0, missing, 0, missing))

    def near(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        return (document[q] == document[k]) & ((q - k).abs() <= size)

    def on_layout(b: Any, h: Any, q: Tensor, k: Tensor) -> Tensor:
        assert layout is not None
        return (document[q] == document[k]) & layout[place[q] // size, place[k] // size]

    live = near if layout is None else on_layout
    return (lambda b, h, q, k: live(b, h, q, k) & (q >= k)) if case.causal else live


def block_mask(live: Callable[[Any, Any, Tensor, Tensor], Tensor], rows: int, tokens: int, device: torch.device) -> Any:
    """FlexAttention's `BlockMask` of rows of so many tokens, the same for all heads. live: from (row, head, query, key)
    to whether the query sees the key."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = [tiles_of(live, row, tokens, FLEX_TILE, device) for row in range(rows)]
    some, full = (torch.cat(of_rows) for of_rows in zip(*tiles, strict=True))
    some_counts, some_columns = lists(some & ~full, some.shape[2])
    full_counts, full_columns = lists(full, full.shape[2])
    return BlockMask.from_kv_blocks(
        some_counts[:, None], some_columns[:, None], full_counts[:, None], full_columns[:, None],
        BLOCK_SIZE=FLEX_TILE, mask_mod=live, seq_lengths=(tokens, tokens),
    )  # fmt: skip


def tiles_of(
    live: Callable[[Any, Any, Tensor, Tensor], Tensor], row: int, tokens: int, side: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """bool (1, R, R) each: which tiles of a row have a live score, and which nothing else. The mask itself would be
    tokens by tokens: it is made and forgotten some queries at a time."""
    some, full = [], []
    key = torch.arange(tokens, device=device)
    for first in range(0, tokens, ROWS_AT_ONCE):
        query = key[first : first + ROWS_AT_ONCE, None]
        rest = (0, -tokens % side, 0, -len(query) % side)
        mask = pad(live(row, None, query, key), rest)
        counts = mask.unflatten(1, (-1, side)).unflatten(0, (-1, side)).sum((1, 3), dtype=torch.int32)
        some.append(counts > 0)
        full.append(counts == side * side)
    return torch.cat(some)[None], torch.cat(full)[None]


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


def tokens_first(x: Tensor) -> Tensor:
    """The same with (T, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


OURS, UNPACKED, PADDED = "ds_sparse", "unpacked", "padded"

PEERS: dict[str, Callable[[Problem], Peer]] = {
    OURS: packed,
    UNPACKED: unpacked,
    PADDED: padded,
    "sdpa-padded": sdpa_padded,
    "sdpa-mask": sdpa_mask,
    "varlen": torch_varlen,
    "flex": flex,
}
"""Name to builder. The first three are ours. varlen is PyTorch's own; it has windows, and is dense in each document
where a structure has blocks."""

ALWAYS = (OURS, UNPACKED)
"""What every run measures: all others are compared with them."""

ON_CPU = [PADDED, "sdpa-padded", "sdpa-mask"]
ON_CUDA = [PADDED, "varlen", "flex"]


def others() -> list[str]:
    """The names that a user chooses from."""
    return [name for name in PEERS if name not in ALWAYS]
