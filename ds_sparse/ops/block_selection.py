"""The blocks of keys that queries score highest: what attention on chosen blocks is given. Operators that graphs hold
whole, of plain PyTorch and, on a GPU, kernels that find the largest products and choose."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..dispatch import readable
from ..index.kernels import require_kernel
from ..index.packed import check_form, sent_to
from ..index.selection import AlignedDocuments
from ..index.transforms import outside_transforms_or_traced
from ..tools.block_sizes import forced_blocks
from ._library import check_alike, check_inputs, check_scale, shapes_of, under_autocast
from .operands import check_bias, kept, wide_dtype
from .packed_operands import check_row, refuse_by_place, row_of, unchanged
from .query_offset import is_later, offsets_of, position_of

MOST_SCORES = 2**24
"""Scores that are held at a time, unless those of one query, or block of queries, are more."""

MOST_CHOSEN = 4096
"""Blocks that the GPU's kernel chooses for a row; more are chosen by PyTorch's topk."""

MOST_KEYS = 2**31 - 2**10
"""Of whole blocks, that the GPU's kernels count in 32 bits."""

SCORES = ("mean", "max")

_NOWHERE = 2**62
"""The position of what is not there."""

_LOW = 2**32 - 1
"""The bits of a rank that tell of the block's number."""

_NONE = -(2**63)
"""The rank of a block that is not chosen."""


def select_blocks(
    query: Tensor,
    key: Tensor,
    block: int,
    k: int,
    *,
    score: str = "mean",
    groups: int | None = None,
    causal: bool = False,
    first: int = 0,
    local: int = 0,
    query_block: int = 1,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor = 0,
) -> Tensor:
    """The numbers of the k blocks of keys that score highest for each query token, or block of queries, and head.

    What it returns is what `selected_attention` takes, and `BlockIndex.from_blocks` where blocks of queries choose. It
    has no gradient: an indexer learns by a loss of its own. Nothing waits for the device; CUDA graphs and torch.compile
    hold it. Beside its result, and tensors as large as query and key, it needs memory for `2**24` scores at a time, or
    for those of one block of queries, B * H * query_block * S (of `score="mean"` C in the place of S), if these are
    more: no matrix of T by T. Products and comparisons are in fp32; of equal scores the lower block comes first. Under
    autocast query and key are cast.

    Sources: Lu et al., "MoBA: Mixture of block attention for long-context LLMs", 2025 (means); MiniMax, "MiniMax-M3",
    2026 (maxima, by an indexer's queries and keys).

    Args:
        query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64; any D.
        key: (B, Hkv, S, D), H a multiple of Hkv: query head h reads head h // (H / Hkv).
        block: keys in a block; the last one may be short.
        k: how many blocks are chosen, with those of `first` and `local`.
        score: 'mean', the product of a query with the mean of a block's keys, where causal queries choose among blocks
            that are wholly behind them: MoBA's, with `local=1`. 'max', the largest product with a key of the block that
            the query sees: MSA's, with `local=1`.
        groups: G, how many groups of neighbouring heads choose, whose heads' scores are added; H, each head for itself,
            if it is not given. `selected_attention` takes Hkv, H or 1.
        causal: a query chooses no block that is wholly ahead of it.
        first: so many blocks from the start are chosen whatever they score.
        local: of blocks around a query so many are chosen whatever they score: its own and `local - 1` before it, and
            as many after it if not `causal`. A block of queries has a block of its own for each that it lies in.
        query_block: queries that choose together. Their mean is the query, or the largest of their scores the score. A
            multiple of block, or a divisor of it. What causal queries choose depends on those of their block that are
            ahead of them: a decoder that is trained so learns from tokens that it has not when it generates.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: operands are one
            row of packed documents, (T, H, D), or (1, H, T, D). Blocks are those of a query's document, and count from
            its start; their size is a power of two, 8 or more. No key_padding_mask, query_offset or query_block. On a
            GPU it is not read: where it does not ascend from 0 to T, nothing is chosen.
        key_padding_mask: (B or 1, S). Keys where it is False, or -inf, count in no score, and may hold anything; other
            floats change nothing. A block without another key is not chosen.
        query_offset: the position of the first query among the keys, 0 or more, S - T while decoding, a multiple of
            query_block; or (B,) int32 or int64, one a sequence.

    Returns:
        int32 (B, G, ceil(T / query_block), k), the best first, those of `first` and `local` before all, by number; -1
        behind them, where there are fewer. Of packed documents (T, G, k) where query is (T, H, D).

    Raises:
        TypeError: operands that are no tensors; cu_seqlens or query_offset that hold other than integers.
        ValueError: shapes, dtypes, devices or numbers that do not fit; a k that `first` and `local` exceed.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = torch.randn(2, 8, 256, 32), torch.randn(2, 2, 256, 32), torch.randn(2, 2, 256, 32)
        >>> chosen = ds_sparse.select_blocks(query, key, 16, k=4, groups=2, causal=True, local=1)
        >>> chosen.shape, chosen.dtype
        (torch.Size([2, 2, 256, 4]), torch.int32)
        >>> chosen[0, 0, 20]  # its own block, and the one that is wholly behind it
        tensor([ 1,  0, -1, -1], dtype=torch.int32)
        >>> ds_sparse.selected_attention(query, key, value, chosen, 16, causal=True).shape
        torch.Size([2, 8, 256, 32])
    """
    if score not in SCORES:
        raise ValueError(f"score is {score!r}; it has to be 'mean' or 'max'.")
    block, query_block = checked_number("block", block, 1), checked_number("query_block", query_block, 1)
    if block % query_block and query_block % block:
        raise ValueError(f"query_block is {query_block} and block {block}; one has to be a multiple of the other.")
    if query_block > 1 and cu_seqlens is not None:
        raise ValueError(f"query_block is {query_block}; of packed documents each token chooses, so leave it out.")
    query, key, places, groups, as_given = _checked(
        query, key, "key", groups, block, k, causal, first, local, query_block, cu_seqlens, key_padding_mask,
        query_offset, None,
    )  # fmt: skip
    if query_block > 1 and (isinstance(query_offset, Tensor) or places.offset % query_block):
        raise ValueError(
            f"query_offset is {query_offset}; a block of {query_block} queries begins at a multiple of that."
        )
    if places.documents is not None:
        key = _taken(key, places.documents.tokens_of, places.documents.exists)
    chosen = ops.select_blocks(
        query, key, places.keep, places.positions, places.ranges, places.offset, block, k, score, groups, causal,
        first, local, query_block,
    )  # fmt: skip
    return as_given(chosen)


def select_blocks_by_compression(
    query: Tensor,
    compressed_key: Tensor,
    block: int,
    k: int,
    *,
    length: int,
    stride: int,
    keys: int | None = None,
    groups: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    first: int = 0,
    local: int = 0,
    cu_seqlens: Tensor | None = None,
    compressed_cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor = 0,
) -> Tensor:
    """The numbers of the k blocks of keys to which attention on compressed keys gives most, for each query token.

    A block's score is the sum of the probabilities of compressed keys, each as often as it has strides of keys in the
    block, added over the heads of a group: equations 8 to 10 of the source. All else is as in `select_blocks`: no
    gradient, nothing waits, `2**24` scores at a time or B * H * C of one query, C the compressed keys. A block of which
    no compressed key is seen is chosen by `first` and `local` alone.

    Sources: Yuan et al., "Native sparse attention: Hardware-aligned and natively trainable sparse attention", 2025.

    Args:
        query: (B, H, T, D), as in `select_blocks`.
        compressed_key: (B, Hkv, C, D); number c is made of the keys from `c * stride` to before `c * stride + length`.
            Those that reach beyond the last key are none.
        block: keys in a block that is chosen, a multiple of stride.
        k: how many blocks are chosen, with those of `first` and `local`.
        length, stride: of what a compressed key is made; length is a multiple of stride.
        keys: S, how many keys there are; up to the last query if it is not given, which `query_offset` as a tensor asks
            for.
        groups: G, how many groups of neighbouring heads choose; Hkv if it is not given.
        scale: factor of the products; 1 / sqrt(D) if it is not given.
        causal: a query sees compressed keys of which no key is ahead of it.
        first, local: as in `select_blocks`; 1 and 2 in the source.
        cu_seqlens: as in `select_blocks`; with `compressed_cu_seqlens`, and blocks of a power of two keys, 8 or more.
        compressed_cu_seqlens: int32 or int64 (documents + 1), where the compressed keys of each document begin, as
            `cu_seqlens`: these are (C, Hkv, D), or (1, Hkv, C, D).
        key_padding_mask: (B or 1, S), as in `select_blocks`; compressed keys that are made of such a key count as one.
        query_offset: as in `select_blocks`.

    Returns:
        int32 (B, G, T, k), or (T, G, k), as of `select_blocks`.

    Raises:
        TypeError: operands that are no tensors; integers, or a scale, that are something else.
        ValueError: shapes, dtypes, devices or numbers that do not fit; a k that `first` and `local` exceed.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = torch.randn(2, 8, 256, 32), torch.randn(2, 2, 256, 32), torch.randn(2, 2, 256, 32)
        >>> compressed = key.unfold(2, 32, 16).mean(-1)  # a model learns how
        >>> chosen = ds_sparse.select_blocks_by_compression(
        ...     query, compressed, 64, k=3, length=32, stride=16, causal=True, first=1, local=2
        ... )
        >>> chosen.shape
        torch.Size([2, 2, 256, 3])
        >>> ds_sparse.selected_attention(query, key, value, chosen, 64, causal=True).shape
        torch.Size([2, 8, 256, 32])
    """
    check_inputs(query=query, compressed_key=compressed_key)
    block, length = checked_number("block", block, 1), checked_number("length", length, 1)
    stride = checked_number("stride", stride, 1)
    if length % stride or block % stride:
        raise ValueError(
            f"stride is {stride}, length {length} and block {block}; both have to be multiples of the stride."
        )
    if (cu_seqlens is None) != (compressed_cu_seqlens is None):
        raise ValueError("Packed documents have cu_seqlens and compressed_cu_seqlens; give both, or neither.")
    if keys is None:
        if isinstance(query_offset, Tensor):
            raise ValueError("query_offset is a tensor, and keys is not given; say how many keys there are.")
        position_of(query_offset, 1, False)  # refuses what cannot be added
        keys = query.shape[-2 if query.dim() == 4 else 0] + query_offset
    query, compressed, places, groups, as_given = _checked(
        query, compressed_key, "compressed_key", groups, block, k, causal, first, local, 1, cu_seqlens,
        key_padding_mask, query_offset, checked_number("keys", keys, 1),
    )  # fmt: skip
    scale = query.shape[3] ** -0.5 if scale is None else check_scale(scale)
    seen = None
    if places.documents is not None:
        assert cu_seqlens is not None and compressed_cu_seqlens is not None, "or there were no documents"
        check_form(compressed_cu_seqlens)
        if len(compressed_cu_seqlens) != len(cu_seqlens):
            raise ValueError(
                f"cu_seqlens has {len(cu_seqlens)} numbers and compressed_cu_seqlens {len(compressed_cu_seqlens)}; "
                "give as many."
            )
        numbers, seen = _compressed_of(places.documents, cu_seqlens, compressed_cu_seqlens, stride, compressed.shape[2])
        compressed, keys = _taken(compressed, numbers, seen), len(places.documents.tokens_of)
    elif places.keep is not None:
        whole = places.keep.unfold(1, length, stride).all(-1) if keys >= length else places.keep[:, :0]
        seen = pad(whole, (0, compressed.shape[2] - whole.shape[1]))
        compressed = compressed.masked_fill(~seen[:, None, :, None], 0)
    chosen = ops.select_blocks_by_compression(
        query, compressed, seen, places.keep, places.positions, places.ranges, places.offset, keys, block, k, length,
        stride, scale, groups, causal, first, local,
    )  # fmt: skip
    return as_given(chosen)


class _Places(NamedTuple):
    """Where the queries and keys of a call are.

    Attributes:
        offset: the position of the first query, where `positions` is None.
        positions: int64 (B or 1, T), those of queries.
        keep: bool (B or 1, S), the keys that are there.
        ranges: int32 (N, 2), of packed documents: the first block of each block's document, the one after its last.
        documents: of packed documents, whose keys are to be laid out as they lie.
    """

    offset: int = 0
    positions: Tensor | None = None
    keep: Tensor | None = None
    ranges: Tensor | None = None
    documents: AlignedDocuments | None = None


def _checked(
    query: Tensor,
    key: Tensor,
    name: str,
    groups: int | None,
    block: int,
    k: int,
    causal: bool,
    first: int,
    local: int,
    query_block: int,
    cu_seqlens: Tensor | None,
    key_padding_mask: Tensor | None,
    query_offset: int | Tensor,
    keys: int | None,
) -> tuple[Tensor, Tensor, _Places, int, Callable[[Tensor], Tensor]]:
    """Operands (B, H, T, D) and (B, Hkv, S, D) without gradients, where they are, the number of groups, and what brings
    a result into the form that operands were given in. keys: S, where key has compressed ones, in whose groups heads
    choose by default."""
    check_inputs(**{"query": query, name: key, "cu_seqlens": cu_seqlens, "key_padding_mask": key_padding_mask})
    check_counts(k, first, local, causal, max(1, query_block // block))
    query, key = under_autocast(query.detach(), key.detach())
    check_alike(**{"query": query, name: key})
    if cu_seqlens is not None:
        refuse_by_place(query_offset=is_later(query_offset), key_padding_mask=key_padding_mask is not None)
        if query.dim() != key.dim() or query.dim() not in (3, 4):
            raise ValueError(f"Shapes are {tuple(query.shape)} and {tuple(key.shape)}; give both (tokens, heads, D).")
    as_given: Callable[[Tensor], Tensor] = unchanged
    if cu_seqlens is not None:
        query, key, _, _, as_given, _ = row_of(query, key, key, cu_seqlens)
    _check_shapes(query, key, name)
    (batch, heads, tokens, _), key_heads = query.shape, key.shape[1]
    if groups is None:
        groups = heads if keys is None else key_heads
    groups = checked_number("groups", groups, 1)
    if heads % groups or (groups % key_heads and key_heads % groups):
        raise ValueError(
            f"groups is {groups}; it has to be a divisor of query's {heads} heads, and a multiple or a divisor of the "
            f"{key_heads} of {name}."
        )
    if cu_seqlens is not None:
        tokens_like = key if keys is None else query  # compressed keys are fewer
        check_row(query, tokens_like, tokens_like, ("query", name, name))
        if block < 8 or block & (block - 1):
            raise ValueError(f"block is {block}; of packed documents it has to be a power of two, 8 or more.")
        documents = AlignedDocuments.of(cu_seqlens, tokens, block, query.device)
        places = _Places(0, documents.aligned.unsqueeze(0), documents.exists, documents.ranges, documents)
        return query, key, places, groups, as_given
    keys = key.shape[2] if keys is None else keys
    keep = None
    if key_padding_mask is not None:
        check_bias("key_padding_mask", key_padding_mask, query, (batch, keys), (2,))
        keep = kept(key_padding_mask.detach().expand(-1, keys))
    offset, positions = offsets_of(query_offset, query)
    if positions is not None:
        positions = positions.long().unsqueeze(1) + torch.arange(tokens, device=query.device)
    return query, key, _Places(offset, positions, keep), groups, as_given


def check_counts(k: int, first: int, local: int, causal: bool, own: int = 1) -> None:
    """Raises ValueError for numbers of blocks that are no integers, or a k that `first` and `local` exceed where a
    query, or a block of them, lies in `own` blocks."""
    for name, number, least in (("k", k, 1), ("first", first, 0), ("local", local, 0)):
        checked_number(name, number, least)
    forced = forced_blocks(first, local, causal, own)
    if forced > k:
        raise ValueError(
            f"k is {k}, and first={first} and local={local} choose {forced} blocks; give k={forced} or more."
        )


def checked_number(name: str, number: Any, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)) or number < least:
        raise ValueError(f"{name} is {number!r}; it has to be an integer of {least} or more.")
    return number  # type: ignore[return-value]  # a symbol, of a size that is traced


def _check_shapes(query: Tensor, key: Tensor, name: str) -> None:
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"Shapes are {shapes_of(**{'query': query, name: key})}; they have to be (batch, heads, tokens, head "
            "size), with batch and head size equal."
        )
    heads, key_heads = query.shape[1], key.shape[1]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"query has {heads} heads and {name} {key_heads}; they have to be a multiple of {name}'s.")
    if 0 in (query.shape[2], query.shape[3], key.shape[2]):
        raise ValueError(f"Shapes are {shapes_of(**{'query': query, name: key})}; there has to be at least one token.")


def _taken(x: Tensor, numbers: Tensor, exists: Tensor) -> Tensor:
    """The tokens of x (1, H, T, D) of these numbers; 0 where none is there."""
    return x.index_select(2, numbers).masked_fill(~exists[:, None, :, None], 0)


@outside_transforms_or_traced
def _compressed_of(
    documents: AlignedDocuments, cu_seqlens: Tensor, compressed_cu_seqlens: Tensor, stride: int, compressed: int
) -> tuple[Tensor, Tensor]:
    """The number of the compressed key that begins at each stride of aligned documents, int64 (N * block / stride), and
    whether there is one, bool (1, N * block / stride)."""
    device, block = documents.ranges.device, documents.block
    edges, begins = (sent_to(x, device).long() for x in (cu_seqlens, compressed_cu_seqlens))
    token = documents.tokens_of[::block].contiguous()
    document = (torch.searchsorted(edges, token, right=True) - 1).clamp(0, len(edges) - 2)
    of_block = torch.arange(len(token), device=device) - documents.ranges[:, 0]  # in its document
    number = (of_block * (block // stride)).unsqueeze(1) + torch.arange(block // stride, device=device)
    begin, end = begins[document].unsqueeze(1), begins[document + 1].unsqueeze(1)
    number = number + begin
    exists = (number < end) & (number >= 0) & (number < compressed) & (documents.ranges[:, 1:] > 0)
    return torch.where(exists, number, 0).flatten(), exists.reshape(1, -1)


class Chooser:
    """Chooses the best of scored blocks for rows of queries; what an operator is given, by the names of its schema."""

    def __init__(self, x: Any, keys: int, query_block: int, sizes: Tensor | None = None) -> None:
        """sizes: (B or 1, columns) in fp32 or wider, how many keys a block has, where scores are products with their
        sum; causal queries choose then among blocks that are wholly behind them."""
        self.x, self.query_block, self.device, self.sizes = x, query_block, x.query.device, sizes
        self.columns = -(-keys // x.block)
        self.keys = keys
        self.first_key = None  # where the first key is that each block has, (B or 1, columns); None: its begin
        if x.keep is not None:
            position = torch.arange(keys, device=self.device)
            there = pad(torch.where(x.keep, position, _NOWHERE), (0, -keys % x.block), value=_NOWHERE)
            self.first_key = there.unflatten(1, (-1, x.block)).amin(-1)

    def run(self, scores_of: Callable[[int, int, int], tuple], scores_of_query: Callable[[int], int]) -> Tensor:
        """All rows, as many at a time as MOST_SCORES allows.

        Args:
            scores_of: scores (B, G, rows, columns) of the queries from one number to before another, of so many
                columns; and which of them count, bool (B or 1, rows, columns), or None, all.
            scores_of_query: how many numbers it holds for a query, of so many columns.
        """
        tokens, together = self.x.query.shape[2], self.query_block

        def held(begin: int, end: int) -> int:
            return (end - begin) * scores_of_query(self._columns_of(end))

        chosen, begin = [], 0
        while begin < tokens:
            # Early causal queries see few columns, and so more of them go at a time.
            ends = range(begin + together, tokens + together, together)
            end = min(ends[max(1, bisect_right(ends, MOST_SCORES, key=partial(held, begin))) - 1], tokens)
            scores, counts = scores_of(begin, end, self._columns_of(end))
            best = self._best_on_gpu if self._is_for_kernel(scores) else self._best
            chosen.append(best(scores, counts, begin, end))
            begin = end
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 2)

    def _columns_of(self, end: int) -> int:
        """The columns that the queries before a number may see."""
        x = self.x
        behind_all = not x.causal or x.positions is not None
        return self.columns if behind_all else min(self.columns, (x.offset + end - 1) // x.block + 1)

    def positions(self, begin: int, end: int) -> Tensor:
        """The positions of the queries from one number to before another, (B or 1, n, 1)."""
        if self.x.positions is not None:
            return self.x.positions[:, begin:end, None]
        return torch.arange(begin + self.x.offset, end + self.x.offset, device=self.device)[None, :, None]

    def ends(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The positions of the first and last query of the rows of these queries, (B or 1, rows, 1)."""
        first = self.positions(begin, end)[:, :: self.query_block]
        if self.query_block == 1:
            return first, first
        return first, (first + (self.query_block - 1)).clamp(max=self.x.offset + end - 1)

    def _is_for_kernel(self, scores: Tensor) -> bool:
        fits = self.x.k <= MOST_CHOSEN and self.columns * self.x.block < MOST_KEYS
        return scores.is_cuda and scores.dtype == torch.float32 and fits

    def _best_on_gpu(self, scores: Tensor, counts: Tensor | None, begin: int, end: int) -> Tensor:
        x, positions = self.x, None if self.x.positions is None else self.x.positions[:, begin:end]
        require_kernel("choose_blocks", self.device)
        return ops.choose_blocks(
            scores.contiguous(), self.sizes, counts, self.first_key, positions, x.ranges, x.offset + begin,
            x.offset + end - 1, self.query_block, x.block, x.k, x.first, x.local, x.causal,
        )  # fmt: skip

    def _best(self, scores: Tensor, counts: Tensor | None, begin: int, end: int) -> Tensor:
        x, columns = self.x, scores.shape[-1]
        first, last = self.ends(begin, end)
        number = torch.arange(columns, device=self.device)
        if self.sizes is not None:
            if self.query_block > 1:
                scores = scores / (last - first + 1).unsqueeze(1)
            scores = scores / self.sizes[:, None, None, :columns]
            counts = (number + 1) * x.block - 1 <= first if x.causal else None
        first_key = (number * x.block).unsqueeze(0) if self.first_key is None else self.first_key[:, :columns]
        there = first_key[:, None] <= (last if x.causal else _NOWHERE - 1)
        own, low = first // x.block, None
        if x.ranges is not None:
            low, end_column = x.ranges[own.squeeze(-1)].split(1, -1)
            there = there & (number >= low) & (number < end_column)
        forced = number < x.first if low is None else number < low + x.first
        if x.local:
            last_column = last // x.block + (0 if x.causal else x.local - 1)
            forced = forced | ((number > own - x.local) & (number <= last_column))
        forced = (forced & there).unsqueeze(1)
        is_candidate = (there if counts is None else there & counts).unsqueeze(1) | forced
        # One number tells all: the score's bits, as integers that are ordered as scores are, and the block's number.
        # NaN counts as infinity, and -0 as 0.
        scores = (scores.float() + 0.0).nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
        bits = scores.view(torch.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        rank = bits.masked_fill(forced, 0x7FFFFFFF).long() << 32 | (_LOW - number)
        best = rank.masked_fill(~is_candidate, _NONE).topk(min(x.k, columns)).values
        chosen = _LOW - (best & _LOW)
        chosen = chosen if low is None else chosen - low.unsqueeze(1)
        return pad(chosen.masked_fill(best == _NONE, -1).int(), (0, x.k - best.shape[-1]), value=-1)


def select(x: Any) -> Tensor:
    """Runs the operator `select_blocks`."""
    with torch.autocast(x.query.device.type, enabled=False):
        return _by_means(x) if x.score == "mean" else _by_maxima(x)


def _by_means(x: Any) -> Tensor:
    batch, key_heads, keys, depth = x.key.shape
    wide, block, key, size = wide_dtype(x.query.dtype), x.block, x.key, x.keep
    if size is not None:
        key = key.masked_fill(~size[:, None, :, None], 0)
    if keys % block:
        key = pad(key, (0, 0, 0, -keys % block))
        size = size if size is None else pad(size, (0, -keys % block))
    sums = key.unflatten(2, (-1, block)).sum(3, dtype=wide)
    if size is None:
        sizes = torch.arange(keys, 0, -block, dtype=wide, device=key.device).clamp_(max=block).unsqueeze(0)
    else:
        sizes = size.unflatten(1, (-1, block)).sum(2, dtype=wide).clamp_(min=1)
    chooser = Chooser(x, keys, x.query_block, sizes)
    # Heads that share keys add up before the product, where they choose together.
    together = max(x.groups, key_heads)

    def scores_of(begin: int, end: int, columns: int) -> tuple[Tensor, None]:
        query = x.query[:, :, begin:end]
        if x.query_block > 1:
            query = pad(query, (0, 0, 0, -(end - begin) % x.query_block)).unflatten(2, (-1, x.query_block))
            query = query.sum(3, dtype=wide)
        query = _of_groups(query, together, wide)
        return _of_groups(_products(query, sums[:, :, :columns]), x.groups), None

    return chooser.run(scores_of, lambda columns: batch * together * max(columns, depth))


def _by_maxima(x: Any) -> Tensor:
    batch, heads, _, _ = x.query.shape
    block, chooser = x.block, Chooser(x, x.key.shape[2], x.query_block)
    if _takes_maxima(x, chooser):
        require_kernel("block_maxima", x.query.device)
        query, key, keep = readable(x.query), readable(x.key), None if x.keep is None else x.keep.contiguous()

        def maxima_of(begin: int, end: int, columns: int) -> tuple[Tensor, None]:
            of_keys = keep, None if x.positions is None else x.positions[:, begin:end], x.ranges, x.offset + begin
            maxima = ops.block_maxima(query[:, :, begin:end], key, *of_keys, columns, block, x.causal)
            return _of_rows(maxima, x), None

        return chooser.run(maxima_of, lambda columns: batch * heads * columns)
    key = x.key.contiguous()
    position = torch.arange(chooser.keys, device=key.device)
    hidden = None if x.keep is None else ~x.keep[:, None, None]

    def scores_of(begin: int, end: int, columns: int) -> tuple[Tensor, None]:
        keys = min(columns * block, chooser.keys)
        scores = _products(x.query[:, :, begin:end], key[:, :, :keys])
        if hidden is not None:
            scores.masked_fill_(hidden[..., :keys], float("-inf"))
        if x.causal:
            # Keys before the first of these queries are behind all of them.
            ahead = 0 if x.positions is not None else min(x.offset + begin, keys)
            is_ahead = position[ahead:keys] > chooser.positions(begin, end)
            scores[..., ahead:].masked_fill_(is_ahead.unsqueeze(1), float("-inf"))
        scores = pad(scores, (0, -keys % block), value=float("-inf")).unflatten(-1, (-1, block)).amax(-1)
        return _of_rows(scores, x), None

    return chooser.run(scores_of, lambda columns: batch * heads * columns * block)


def _takes_maxima(x: Any, chooser: Chooser) -> bool:
    """Tells if the kernel takes these operands; others' products are PyTorch's."""
    depth, is_half = x.query.shape[3], x.query.dtype in (torch.float16, torch.bfloat16)
    fits = depth % 8 == 0 and depth <= 256 and x.block % 8 == 0 and chooser.columns * x.block < MOST_KEYS
    return x.query.is_cuda and is_half and fits


def _of_rows(scores: Tensor, x: Any) -> Tensor:
    """Maxima (B, H, queries, columns) of queries as scores of rows of groups."""
    if x.query_block > 1:
        scores = pad(scores, (0, 0, 0, -scores.shape[2] % x.query_block), value=float("-inf"))
        scores = scores.unflatten(2, (-1, x.query_block)).amax(3)
    return _of_groups(scores, x.groups)


def select_by_compression(x: Any) -> Tensor:
    """Runs the operator `select_blocks_by_compression`."""
    with torch.autocast(x.query.device.type, enabled=False):
        chooser = Chooser(x, x.keys, 1)
        batch, heads, _, _ = x.query.shape
        of_block, before = x.block // x.stride, x.length // x.stride - 1
        width = chooser.columns * of_block
        # Keys that nobody sees stand before the first and behind the last: each block has its strides at a multiple of
        # their number, and rows of products are whole 16 bytes, as matrix products are fast with.
        key, count = x.compressed[:, :, :width], min(x.compressed.shape[2], width)
        around = before, _multiple(before + width) - before - count
        key = pad(key, (0, 0, *around)).contiguous()
        begins = torch.arange(-before, key.shape[2] - before, device=key.device)
        last_key = begins * x.stride + (x.length - 1)
        is_there = (begins >= 0) & (begins < count) & (last_key < x.keys)
        if x.seen is not None:
            is_there = is_there & pad(x.seen[:, :width], around)
        last_key = torch.where(is_there, last_key, _NOWHERE).view(-1, 1, key.shape[2])
        positions = chooser.positions(0, x.query.shape[2])

        def scores_of(begin: int, end: int, columns: int) -> tuple[Tensor, Tensor]:
            strides = before + columns * of_block
            most, last = _multiple(strides), positions[:, begin:end]
            hidden = last_key[..., :most] > (last if x.causal else _NOWHERE - 1)
            if x.ranges is not None:
                low, high = (x.ranges[(last // x.block).squeeze(-1)] * of_block).split(1, -1)
                hidden = hidden | (begins[:most] < low) | (begins[:most] >= high)
            scores = _products(x.query[:, :, begin:end], key[:, :, :most]).mul_(x.scale)
            # A row that sees none is NaN, and chooses by `first` and `local` alone.
            shares = scores.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1)
            shares = _of_blocks(_of_groups(shares, x.groups), columns, of_block, before)
            hidden = hidden.expand(-1, end - begin, -1)[..., :strides]
            return shares, ~hidden.unfold(-1, before + of_block, of_block).all(-1)

        return chooser.run(scores_of, lambda columns: batch * heads * _multiple(before + columns * of_block))


def _multiple(number: int) -> int:
    """The least multiple of 8 that is no less: rows of so many numbers are of whole 16 bytes."""
    return -(-number // 8) * 8


def _of_blocks(shares: Tensor, columns: int, of_block: int, before: int) -> Tensor:
    """Numbers of compressed keys, each as often as it has strides in a block, summed. The first `before` are of no
    key."""
    width = columns * of_block
    of_strides = shares[..., :width]
    for place in range(1, before + 1):
        of_strides = of_strides + shares[..., place : place + width]
    return of_strides.unflatten(-1, (columns, of_block)).sum(-1)


def _of_groups(x: Tensor, groups: int, dtype: torch.dtype | None = None) -> Tensor:
    """x (B, H, ...) with heads of a group added up, in x's dtype or another."""
    dtype = dtype or x.dtype
    return x.to(dtype) if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2, dtype=dtype)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """query (B, H, n, D) . key (B, Hkv, S, D) of each pair, (B, H, n, S), in fp32 or wider. Heads of key lie one behind
    the other in memory."""
    batch, heads, rows, depth = query.shape
    groups, of_keys = batch * key.shape[1], key.flatten(0, 1).mT
    query = query.reshape(groups, heads // key.shape[1] * rows, depth)
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        products = torch.bmm(query, of_keys, out_dtype=torch.float32)
    else:
        wide = wide_dtype(query.dtype)
        products = torch.bmm(query.to(wide), of_keys.to(wide))
    return products.view(batch, heads, rows, of_keys.shape[-1])
