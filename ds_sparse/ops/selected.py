"""Attention of queries that have chosen blocks of keys for themselves, each token its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import choose, readable
from ..index.packed import check_form
from ..index.selection import AlignedDocuments, Selection, check_chosen, check_numbers
from ..index.tiles import SIDES, Tiles
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed
from ._library import check_inputs
from .attention_function import attention_function, results_of_nothing
from .call import AttentionCall
from .moved import moving_function
from .operands import call_on, distinct_when_traced, key_bias_of, lists_of_tiles, wide_dtype
from .packed_operands import check_row, packed_operands, refuse_by_place
from .query_offset import Offset, is_later, offsets_of

MOST_TOGETHER = 16
"""Heads of a token, that see the same keys, which kernels take together."""

LEAST_TOGETHER, LEAST_GATHERED = 8, 64
"""Of fewer heads that see the same keys, a GPU gathers rows by the block that they have chosen, if blocks have so many
keys: tiles of other rows would have many tokens, which seldom choose alike."""

MOST_GATHERED = 2**22
"""Rows of a head that are fewer than so many are gathered."""


class Options(TypedDict, total=False):
    """Options of `selected_attention`, but for `return_lse`."""

    causal: bool
    scale: float | None
    sinks: Tensor | None
    cu_seqlens: Tensor | None
    key_padding_mask: Tensor | None
    query_offset: int | Tensor


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    block: int,
    *,
    return_lse: Literal[False] = ...,
    **more: Unpack[Options],
) -> Tensor: ...


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    block: int,
    *,
    return_lse: Literal[True],
    **more: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    block: int,
    *,
    return_lse: bool,
    **more: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_indices: Tensor,
    block: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    query_offset: int | Tensor = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T) @ value, where each query token sees the blocks of keys that it has chosen.

    Differentiable in query, key, value and sinks; who chooses the blocks has no gradient from here. Memory is linear in
    tokens, times k for the numbers of blocks, and one bit a token and block of keys. Where fewer than eight heads see
    the same keys, in blocks of 64 or more, a GPU writes out k rows of a token while it runs, in query's dtype: of as
    many heads as take some GB, and at least of those that share a key head. Nothing waits for the device: blocks may be
    chosen in each step, in the capture of a CUDA graph, and inside a graph of torch.compile. Statistics and sums are in
    fp32 or wider. The same input gives the same bits, but for the gradient of query on a Hopper GPU, as in
    `block_sparse_attention`. A row without a key is zeros, its lse -inf or the sink, its gradients zero. NaN and
    infinities do not reach rows that do not see them. Under autocast query, key and value are cast.

    Sources: Lu et al., "MoBA", 2025; Yuan et al., "Native sparse attention", 2025: tokens that choose blocks, the heads
    of a group together.

    Args:
        query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64; D up to 256. Any strides, as in
            `block_sparse_attention`.
        key, value: (B, Hkv, S, D), H a multiple of Hkv: query head h reads head h // (H / Hkv).
        block_indices: int32 or int64 (B or 1, Hkv or H or 1, T, k): the numbers of the blocks that each token sees, in
            any order, repeated ones once; -1 for none. With Hkv, heads that share a key head share its blocks, which
            costs least; with 1 all do. Blocks that are wholly ahead of a causal query are none, and so are those beyond
            the keys; but on the CPU, outside of graphs, these are an error.
        block: 16, 32, 64, 128, 256, 512 or 1024 keys in a block. The last one may be short.
        causal: query token i sees key tokens j <= i only, inside blocks too.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        sinks: (H,), a logit a head in the softmax's denominator, without a value; unscaled.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: operands are one
            row of packed documents, of which none sees another, (T, H, D), block_indices (T, Hkv or H or 1, k), and
            the result likewise; or (1, H, T, D) and (1, Hkv or H or 1, T, k). Blocks count from a document's start,
            and those beyond its end are none. No key_padding_mask and no query_offset. On a GPU it is not read: where
            it does not ascend from 0 to T, all is NaN.
        key_padding_mask: (B or 1, S); bool keeps where True, float is added.
        query_offset: the position of the first query among the keys, 0 or more, S - T while decoding; or (B,) int32 or
            int64, one a sequence. `causal` counts from there.
        return_lse: whether to return each row's log of its sum of exponentials as well; the sink's is in the sum.

    Returns:
        (B, H, T, D) in query's dtype; with `return_lse` also (B, H, T) in fp32 (fp64 for fp64), differentiable.

    Raises:
        TypeError: operands that are no tensors; block_indices, cu_seqlens or query_offset that hold other than
            integers; a scale that is no number.
        ValueError: shapes, dtypes, devices, a block or number that do not fit; a mask that requires a gradient.
        RuntimeError: a device without the kernel.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query = torch.randn(2, 8, 256, 32, requires_grad=True)
        >>> key, value = torch.randn(2, 2, 256, 32), torch.randn(2, 2, 256, 32)
        >>> means = key.unflatten(2, (16, 16)).mean(3)  # of each block of 16 keys
        >>> scores = query.detach().unflatten(1, (2, 4)).sum(2) @ means.mT  # of each group of 4 heads
        >>> chosen = scores.topk(3).indices
        >>> output = ds_sparse.selected_attention(query, key, value, chosen, 16, causal=True)
        >>> output.shape
        torch.Size([2, 8, 256, 32])
        >>> output.sum().backward()
    """
    call = AttentionCall(query, key, value, scale, causal, key_padding_mask, sinks=sinks)
    results, _ = selected_results(call, block_indices, block, cu_seqlens, query_offset, return_lse)
    return (results[0], results[1]) if return_lse else results[0]


class Chosen(NamedTuple):
    """What calls on the same tokens and numbers of blocks share.

    Attributes:
        selection: made of the numbers.
        documents: of a packed row, whose aligned tokens it is of.
    """

    selection: Selection
    documents: AlignedDocuments | None = None


def chosen_of(call: AttentionCall, block_indices: Tensor, block: int, cu_seqlens: Tensor | None) -> Chosen:
    """What a checked call's numbers of blocks, from `check_chosen`, are made into."""
    query, columns = call.query, -(-call.key.shape[2] // block)
    if cu_seqlens is None:
        check_numbers(block_indices, block, columns)
        return Chosen(Selection.of_blocks(block_indices, block, columns))
    documents = AlignedDocuments.of(cu_seqlens, query.shape[2], block, query.device)
    return Chosen(documents.selection(block_indices.to(query.device)), documents)


def selected_results(
    call: AttentionCall,
    block_indices: Tensor,
    block: int,
    cu_seqlens: Tensor | None = None,
    query_offset: Offset = 0,
    return_lse: bool = False,
    chosen: Chosen | None = None,
) -> tuple[tuple[Tensor, ...], Chosen | None]:
    """`selected_attention` as a tuple of results, and what the next call on the same numbers of blocks may be given as
    `chosen`; None of operands that hold nothing."""
    row, (query, key, value) = None, call[:3]
    if cu_seqlens is not None:
        refuse_by_place(query_offset=is_later(query_offset), key_padding_mask=call.key_padding_mask is not None)
        check_inputs(query=query, key=key, value=value)
        check_form(cu_seqlens)
        row = packed_operands(query, key, value, cu_seqlens)
        call = call._replace(query=row.query, key=row.key, value=row.value)
    call = call.checked("selected_attention_forward")
    if not isinstance(block, int) or block not in CHOSEN_BLOCK_SIZES:
        raise ValueError(f"block is {block!r}; selected_attention takes {listed(CHOSEN_BLOCK_SIZES, 'and')}.")
    if row is not None:
        check_row(*call[:3])
    numbers = check_chosen(block_indices, call.query, call.key.shape[1], tokens_first=query.dim() == 3)
    if call.query.numel() > 0 and chosen is None:
        chosen = chosen_of(call, numbers, block, cu_seqlens)
    results = attend_chosen(call, chosen, query_offset, return_lse)
    return results if row is None else tuple(map(row.as_given, results)), chosen


def attend_chosen(
    call: AttentionCall, chosen: Chosen | None, query_offset: Offset, with_lse: bool
) -> tuple[Tensor, ...]:
    """Output and, if it is wanted, lse of a checked call on what has been chosen; None of operands that hold
    nothing."""
    query = call.query
    at = offsets_of(query_offset, query)
    if chosen is None:
        return results_of_nothing(call)
    selection, documents = chosen
    if documents is None:
        return _attend(call, selection, *at, with_lse)
    exists = documents.exists[0]
    to = documents.tokens_of, documents.aligned, exists, None
    query, key, value = (_Moved.apply(x, *to) for x in call[:3])
    # Keys that fill a document's last block are all ahead of its own queries.
    mask = None if call.causal else documents.exists
    call = call._replace(query=query, key=key, value=value, key_padding_mask=mask)
    results = _attend(call, selection, 0, None, with_lse)
    results = nan_if_lost(documents.lost, *results)
    return tuple(_Moved.apply(x, documents.aligned, documents.tokens_of, None, exists) for x in results)


def nan_if_lost(lost: Tensor | None, *results: Tensor) -> tuple[Tensor, ...]:
    """The results; NaN where the borders of documents, which nobody has read, turn out to be wrong."""
    if lost is None:
        return results
    # NaN times a result is NaN in its gradients, too.
    sound = torch.where(lost == 0, 1.0, torch.nan)
    return tuple(x * sound.to(x.dtype) for x in results)


def _attend(
    call: AttentionCall, selection: Selection, offset: int, offsets: Tensor | None, with_lse: bool
) -> tuple[Tensor, ...]:
    """The same of a selection that fits the call, whose queries begin at the offset, or the offsets."""
    query, key, value, padding, sinks = *call[:3], call.key_padding_mask, call.sinks
    head_dim, together = query.shape[3], heads_together(query.shape[1], key.shape[1], selection.heads)
    at_zero = offsets is None and offset == 0
    gathered = at_zero and gathers(query, together, selection.block, selection.columns, selection.most)
    if gathered:
        together = 1
    if padding is not None:
        padding = key_bias_of(padding, wide_dtype(query.dtype), key.shape[2], query.is_cuda)
    key, value = (readable(x) for x in distinct_when_traced(key, value))
    query = readable(query).unflatten(1, (-1, together)).transpose(2, 3)
    sinks = None if sinks is None else sinks.unflatten(0, (-1, together))
    numbers = call.scale, call.causal, offset, offsets, gathered
    output, lse, _ = _SelectedAttention.apply(
        query, key, value, None, sinks, padding, None, None, selection, None, numbers
    )
    output = output.transpose(2, 3).flatten(1, 2)
    output = output[..., :head_dim] if head_dim % 8 else output
    return (output, lse.transpose(2, 3).flatten(1, 2)) if with_lse else (output,)


def heads_together(heads: int, key_heads: int, bits_heads: int) -> int:
    """How many neighbouring heads that see the same keys kernels take together: a power of two."""
    together = 1
    while together < MOST_TOGETHER and heads // key_heads % (2 * together) == heads // bits_heads % (2 * together) == 0:
        together *= 2
    return together


def gathers(query: Tensor, together: int, block: int, columns: int, most: int) -> bool:
    """Whether kernels gather the rows of heads, of which so many see the same keys, and a token has chosen `most` of
    `columns` blocks, at most, where queries begin with the keys."""
    if not (query.is_cuda and together < LEAST_TOGETHER and block >= LEAST_GATHERED):
        return False
    # No less than ChosenToGather::rows of csrc/cuda/attention/gathered_rows.cu.
    tokens, keys = query.shape[2], columns * block
    return tokens * most + tokens + 2 * keys + 512 < MOST_GATHERED


def _lists(tiles: Tiles | None) -> tuple[Tensor | None, ...]:
    """The lists of tiles; None in the places of those that a CPU has not."""
    return (None,) * 4 if tiles is None else lists_of_tiles(tiles)


def chosen_by(
    selection: Selection, query: Tensor, gathered: bool, sides: Sequence[str], forced: str | None = None
) -> tuple[str, int, Selection]:
    """The implementation that runs, the height of the tiles that it walks, and the selection with those, if it does
    not make them itself, of rows that are `gathered`."""
    chosen = choose("selected_attention", call_on(selection, query), forced)
    tile = chosen.tile(selection.block)
    if not gathered:
        selection = selection.with_tiles(query.shape[3], tile, sides)
    return chosen.name, tile, selection


def _run(selection, walk, numbers, query, key, value, bias, key_bias, *_):
    scale, causal, offset, offsets, gathered = numbers
    name, tile, selection = chosen_by(selection, query, gathered, SIDES[:1])
    return ops.selected_attention_forward.default(
        query, key, value, key_bias, selection.bits, offsets, offset, *_lists(selection.row_tiles), selection.heads,
        selection.most, selection.block, tile, scale, causal, name,
    )  # fmt: skip


def _gradients(selection, walk, numbers, wanted, forced, *tensors):
    *saved, _, key_bias, _, _ = tensors
    if not any(wanted[:3]):
        return None, None, None, None
    scale, causal, offset, offsets, gathered = numbers
    name, tile, selection = chosen_by(selection, saved[2], gathered, SIDES, forced)
    return *ops.selected_attention_backward.default(
        *saved, key_bias, selection.bits, offsets, offset, *_lists(selection.row_tiles),
        *_lists(selection.column_tiles), selection.heads, selection.most, selection.block, tile, scale, causal,
        torch.are_deterministic_algorithms_enabled(), name,
    ), None  # fmt: skip


_SelectedAttention = attention_function("_SelectedAttention", "selected_attention", _run, _gradients)
_Moved = moving_function("_Moved", "selected_attention")
