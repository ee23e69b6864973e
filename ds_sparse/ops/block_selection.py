"""Which blocks of keys a query token takes: the ones that score highest, and those that are forced."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..index.selection import AlignedDocuments
from ..index.transforms import unwrap_functorch
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed
from ._library import check_alike, check_inputs
from .packed_operands import check_row, packed_operands
from .query_offset import in_own_dtype, position_of

SCORES = ("mean", "max")

CHUNK = 1 << 26
"""Numbers of scores that are there at a time, at most, where one token does not have more."""


class _Places(NamedTuple):
    """Where tokens and keys are, in blocks. Letters: T tokens, C blocks of the keys.

    Attributes:
        key: (B, Hkv, C, block, D), zeros where there is none.
        exists: bool (B or 1, 1, C, block).
        position: (B or 1, 1, T, 1), of each token among the keys.
        first, end: (B or 1, 1, T, 1), the blocks that a token may take.
    """

    key: Tensor
    exists: Tensor
    position: Tensor
    first: Tensor
    end: Tensor


@torch.no_grad()
def select_blocks(
    query: Tensor,
    key: Tensor,
    block: int,
    count: int,
    *,
    score: Literal["mean", "max"] = "mean",
    by_group: bool = False,
    first: int = 0,
    local: int = 1,
    causal: bool = False,
    query_offset: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """The numbers of the blocks of keys that each query token takes, for `selected_attention`.

    Nothing waits for the device, and no matrix of all tokens by all keys is made: scores are there for some tokens at a
    time, in fp32, 2**26 of them or those of one token. The choice has no gradient.

    Sources: Lu et al., "MoBA", 2025: means of keys; Yuan et al., "Native sparse attention", 2025: the heads of a group
    choose together, the first block and those before the query are forced; MiniMax, "MSA", 2026: the largest product.

    Args:
        query: (B, H, T, D), fp16, bf16, fp32 or fp64.
        key: (B, Hkv, S, D), H a multiple of Hkv.
        block: 16, 32, 64, 128, 256, 512 or 1024 keys in a block.
        count: how many blocks a token takes, with those that are forced, and no fewer than these.
        score: of a block: 'mean', the product of the query and the mean of the block's keys, with which a causal query
            takes blocks that end before its own, and what is forced; or 'max', the largest product of the query and a
            key that it may see.
        by_group: heads that share a key head choose together, by the sum of their scores; else each for itself.
        first: blocks from the beginning on that are forced.
        local: blocks that are forced from the query's own backwards, and if not causal as many forwards; 0: none.
        causal: no block is taken that is wholly ahead of the query.
        query_offset: as of `selected_attention`.
        cu_seqlens: packed documents, as of `selected_attention`: query is (T, H, D) or (1, H, T, D), and blocks count
            from a document's start.
        key_padding_mask: bool (B or 1, S), True keeps: other keys count for nothing, and blocks without any are not
            taken.

    Returns:
        int32 (B, Hkv if by_group else H, T, count), -1 where fewer blocks could be taken; with `cu_seqlens` and query
        (T, H, D) it is (T, Hkv if by_group else H, count). Forced blocks come first; which of two that score the same
        is taken is not said.

    Raises:
        TypeError: operands that are no tensors; a mask that is not bool.
        ValueError: shapes, dtypes, devices, a block, score or number that do not fit.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = torch.randn(1, 8, 256, 32), torch.randn(1, 2, 256, 32), torch.randn(1, 2, 256, 32)
        >>> chosen = ds_sparse.select_blocks(query, key, block=16, count=4, by_group=True, causal=True)
        >>> chosen.shape
        torch.Size([1, 2, 256, 4])
        >>> ds_sparse.selected_attention(query, key, value, chosen, 16, causal=True).shape
        torch.Size([1, 8, 256, 32])
    """
    check_inputs(query=query, key=key, key_padding_mask=key_padding_mask)
    if not isinstance(block, int) or block not in CHOSEN_BLOCK_SIZES:
        raise ValueError(f"block is {block!r}; select_blocks takes {listed(CHOSEN_BLOCK_SIZES, 'and')}.")
    if score not in SCORES:
        raise ValueError(f"score is {score!r}; it has to be {listed(SCORES, 'or')}.")
    for name, number, least in (("count", count, 1), ("first", first, 0), ("local", local, 0)):
        if isinstance(number, bool) or not isinstance(number, Integral) or number < least:
            raise ValueError(f"{name} is {number!r}; it has to be an integer of {least} or more.")
    forced = first + (local if causal else max(0, 2 * local - 1))
    if count < forced:
        raise ValueError(f"count is {count}, and {forced} blocks are forced by first and local; give that or more.")
    tokens_first = cu_seqlens is not None and query.dim() == 3
    query, key = (unwrap_functorch(name, x, needs_values=False) for name, x in (("query", query), ("key", key)))
    check_alike(query=query, key=key)
    if cu_seqlens is not None:
        row = packed_operands(query, key, key, cu_seqlens)
        query, key = row.query, row.key
        check_row(query, key, key)
    if query.dim() != 4 or key.dim() != 4 or query.shape[3] != key.shape[3] or len(query) != len(key):
        raise ValueError(
            f"query is {tuple(query.shape)} and key {tuple(key.shape)}; they have to be (B, H, T, D) and "
            "(B, Hkv, S, D), or of packed documents (T, H, D) and (T, Hkv, D)."
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, and key {key.shape[1]}; they have to be a multiple of these."
        )
    if query.shape[2] == 0 or key.shape[2] == 0:
        raise ValueError(f"query has {query.shape[2]} tokens, and key {key.shape[2]}; both need one or more.")
    if len(query) == 0:
        heads = key.shape[1] if by_group else query.shape[1]
        return query.new_empty(0, heads, query.shape[2], count, dtype=torch.int32)
    if cu_seqlens is None:
        places = _places(query, key, block, query_offset, key_padding_mask)
    elif key_padding_mask is not None or isinstance(query_offset, Tensor) or query_offset != 0:
        raise ValueError("cu_seqlens goes without key_padding_mask and query_offset; leave them out.")
    else:
        places = _places_of_documents(query, key, block, cu_seqlens)
    with in_own_dtype(query):
        chosen = torch.cat(list(_chosen(query, places, count, score, by_group, first, local, causal)), dim=2)
    return chosen[0].transpose(0, 1) if tokens_first else chosen


def _places(query: Tensor, key: Tensor, block: int, query_offset: int | Tensor, mask: Tensor | None) -> _Places:
    batch, _, tokens, _ = query.shape
    keys, blocks = key.shape[2], -(-key.shape[2] // block)
    if mask is None:
        exists = torch.ones(1, keys, dtype=torch.bool, device=key.device)
    elif mask.device != key.device:
        raise ValueError(f"key_padding_mask is on {mask.device} and key on {key.device}; move it there.")
    elif mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {mask.dtype}; select_blocks takes a bool one, True for keys that count.")
    elif mask.dim() != 2 or mask.shape[1] != keys or mask.shape[0] not in (1, batch):
        raise ValueError(f"key_padding_mask is {tuple(mask.shape)}; it has to be ({batch} or 1, {keys}).")
    else:
        exists = mask
        key = key.where(exists[:, None, :, None], 0)
    more = blocks * block - keys
    key = torch.nn.functional.pad(key, (0, 0, 0, more)).unflatten(2, (blocks, block))
    exists = torch.nn.functional.pad(exists, (0, more)).view(-1, 1, blocks, block)
    offset, _ = position_of(query_offset, batch, tokens, False)
    offset = offset.to(query.device).view(-1, 1, 1, 1) if isinstance(offset, Tensor) else offset
    position = torch.arange(tokens, device=query.device).view(1, 1, -1, 1) + offset
    zeros = torch.zeros_like(position)
    return _Places(key, exists, position, zeros, zeros + blocks)


def _places_of_documents(query: Tensor, key: Tensor, block: int, cu_seqlens: Tensor) -> _Places:
    documents = AlignedDocuments.of(cu_seqlens, query.shape[2], block, query.device)
    exists = documents.exists.view(1, 1, -1, block)
    key = key.index_select(2, documents.tokens_of).unflatten(2, (-1, block)).where(exists.unsqueeze(-1), 0)
    first, end = documents.ranges.long()[documents.aligned // block].unbind(1)
    position, first, end = (x.view(1, 1, -1, 1) for x in (documents.aligned, first, end))
    return _Places(key, exists, position, first, end)


def _chosen(
    query: Tensor, places: _Places, count: int, score: str, by_group: bool, first: int, local: int, causal: bool
) -> Iterator[Tensor]:
    """The blocks of some tokens after others, int32 (B, heads, tokens, count)."""
    key, exists = places.key, places.exists
    batch, heads, tokens, _ = query.shape
    blocks, block = exists.shape[2:]
    of_keys = key.flatten(2, 3) if score == "max" else _means(key, exists).to(query.dtype)
    numbers = torch.arange(blocks, device=query.device)
    any_key = exists.any(3).unsqueeze(2)
    step = max(1, CHUNK // max(1, batch * heads * of_keys.shape[2]))
    # A GPU multiplies 16 bits into fp32.
    if not query.is_cuda or torch.compiler.is_compiling():
        of_keys = of_keys.to(torch.promote_types(query.dtype, torch.float32))
    for begin in range(0, tokens, step):
        some = slice(begin, begin + step)
        position, low, end = places.position[:, :, some], places.first[:, :, some], places.end[:, :, some]
        own = position // block
        scores = _products(query[:, :, some], of_keys)
        if score == "max":
            sees = exists.flatten(2).unsqueeze(2)
            if causal:
                sees = sees & (torch.arange(blocks * block, device=query.device) <= position)
            scores = scores.masked_fill(~sees.unsqueeze(1), -torch.inf).unflatten(-1, (blocks, block)).amax(-1)
        scores = scores.sum(2) if by_group else scores.flatten(1, 2)
        is_there = any_key & (numbers >= low) & (numbers < end) & ((numbers <= own) | (not causal))
        forced = (numbers < low + first) | ((own - numbers).abs() < local)
        may_take = (numbers < own) | forced if causal and score == "mean" else torch.ones_like(is_there)
        scores = scores.masked_fill(forced, torch.inf).masked_fill(~(is_there & may_take), -torch.inf)
        best, chosen = scores.topk(min(count, blocks), dim=-1)
        chosen = torch.where(best == -torch.inf, -1, chosen - low).int()
        yield torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)


def _means(key: Tensor, exists: Tensor) -> Tensor:
    """Those of the keys of each block, (B, Hkv, C, D), in fp32 or wider."""
    sums = key.sum(3, dtype=torch.promote_types(key.dtype, torch.float32))
    return sums / exists.sum(3).clamp(min=1).unsqueeze(-1)


def _products(query: Tensor, key: Tensor) -> Tensor:
    """query @ key^T in fp32 or wider, as key is unless it is narrow: (B, Hkv, H / Hkv, tokens, keys)."""
    batch, heads, tokens, _ = query.shape
    together = heads // key.shape[1]
    rows = query.unflatten(1, (-1, together)).flatten(2, 3)  # a key head's
    if key.element_size() == 2:
        products = torch.bmm(rows.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=torch.float32)
    else:
        products = rows.flatten(0, 1).to(key.dtype) @ key.flatten(0, 1).mT
    return products.view(batch, -1, together, tokens, key.shape[2])
