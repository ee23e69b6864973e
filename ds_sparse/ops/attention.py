"""Attention on the live blocks of a layout in one operation: scores and probabilities are never stored."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import torch
from torch import Tensor

from ..index import BlockIndex, PackedIndex, as_index
from ..index.lookup import copy_of, index_of_layout, kept_of_layout
from ..index.master_layout import MasterLayout
from ..index.packed import check_document_layout
from ..layout import with_heads_of_sequences
from ..tools.block_sizes import BLOCK_SIZES
from ..tools.wording import listed
from .attention_function import attend, remembered_walk
from .call import AttentionCall
from .operands import check_distance_bias, check_heads, of_flash
from .packed_attention import documents_again, packed_attention, remembered_documents
from .packed_operands import is_packed, packed_operands, refuse_by_place
from .query_offset import attention_again, attention_at, parts_at, remember_at, signature_at
from .remembered import Remembered, signature


class Options(TypedDict, total=False):
    """Options of `block_sparse_attention`, but for `return_lse`."""

    block: int | None
    cu_seqlens: Tensor | None
    document_layout: str
    query_offset: int | Tensor | None
    scale: float | None
    causal: bool
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    rpe: Tensor | None
    distance_bias: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    softcap: float


Layout: TypeAlias = Tensor | BlockIndex | PackedIndex

_known = Remembered()


@overload
def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    return_lse: Literal[False] = ...,
    **more: Unpack[Options],
) -> Tensor: ...


@overload
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, return_lse: Literal[True], **more: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


@overload
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, return_lse: bool, **more: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Tensor | BlockIndex | PackedIndex,
    *,
    block: int | None = None,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    rpe: Tensor | None = None,
    distance_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T + rpe + masks) @ value on the live blocks.

    Differentiable in query, key, value, rpe, distance_bias and sinks. Memory is linear in tokens: backward recomputes
    the probabilities from two numbers saved for each row. Statistics and sums are in fp32 or wider. The same input
    gives the same bits, forward and backward, but for the gradient of query on a Hopper GPU: there its sums are
    added in memory as they come, in one sweep with the others, unless `torch.use_deterministic_algorithms(True)` is
    set, which costs a sweep more. A bool mask keeps where True, a float one is added; only -inf, False and absent
    blocks mask, while finite large negatives such as -10000 or finfo.min are ordinary arithmetic (those below -1e30,
    and sums of them, count as -1e30). A row with nothing left is zeros, its lse -inf or the sink, its gradients zero.
    NaN and infinities do not reach rows that do not see them, so padding may hold anything; on CUDA it is faster where
    it is finite. Under autocast query, key and value are cast.

    Sources: Dao et al., "FlashAttention", 2022 (softmax in one sweep, recomputed backwards); Child et al., "Generating
    long sequences with sparse transformers", 2019 (block layouts); DeepSpeed's sparse attention (the options).

    Args:
        query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64; D up to 256. Any strides; what is adjacent along
            D, such as a transposed (B, T, H, D) or a part of a packed projection, is read in place where D, offsets and
            other strides are multiples of 8 elements.
        key, value: (B, Hkv, S, D), H a multiple of Hkv: query head h reads head h // (H / Hkv).
        layout: bool, or 0 and 1 as numbers, (R, C), (N, R, C) or (B, N, R, C), N being H, 1, or Hkv, where heads that
            share a key head share a layout, with R = ceil(T / block), C = ceil(S / block), whose index is built at
            first use and kept until the tensor is changed; or a `BlockIndex` built from one, on query's device, as
            torch.compile and CUDA graphs want (with `causal`, that index's `causal()`), which may be built in a graph.
            Each call compares a tensor on the CPU with what it held, 2 us for 64 x 64 blocks. On a GPU that would wait,
            and a write that PyTorch does not count, such as to `layout.data`, goes unseen, unless
            DS_SPARSE_CHECK_LAYOUTS=1 is set.
        block: 8, 16, 32, 64 or 128 tokens on a block's side; found from the shapes if it is not given.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: operands are one
            row of packed documents, of which none sees another, (1, H, T, D) or (T, H, D), the result likewise; or
            jagged nested tensors (B, H, tokens, D), which need no cu_seqlens. Causality counts from a document's start.
            The layout may be larger than needed, and `block` has to be given. No masks, no rpe, no distance_bias and no
            query_offset. The index is built once for these tensors; or beforehand, by `PackedIndex.build`, and is then
            given as the layout. On a GPU cu_seqlens is not read: where it does not ascend from 0 to T, or the layout is
            smaller than a document, all is NaN. A graph builds the index of it in there.
        document_layout: of packed documents. 'own': each has the layout from its own start, so that results are those
            of separate calls. 'row': the layout is that of the row, and ends at the borders of documents; without
            dropout and lse.
        query_offset: the position of the first query among the keys, 0 or more, S - T while decoding; or (B,) int32 or
            int64, one a sequence. The layout's rows and `causal` count from there, and the layout may be larger than
            the tokens, as one for the longest sequence is: a tensor then comes with `block`. Up to 16 queries read the
            keys of their block rows alone, and wait for nothing once the index is there: positions on a GPU are read on
            it, where what one outside of the layout gives is NaN, or, with a gradient, a bias or dropout, an assertion
            of PyTorch's; but for `distance_bias`, and of more queries, the call waits for them.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        causal: query token i sees key tokens j <= i only, inside blocks too.
        key_padding_mask: (B or 1, S). On CUDA a bool one costs least: what it drops is not computed.
        attn_mask: (T, S), or (B or 1, H or 1, T or 1, S).
        rpe: relative position bias (T, S), (H, T, S) or (B or 1, H or 1, T, S), added unscaled.
        distance_bias: relative position bias by distance, (H or 1, 2M - 1), in memory linear in tokens: the bias of the
            distance d, a key's position less a query's, is number M - 1 + d, that of 0 in the middle; M is above every
            distance, max(T, S) or more. Added unscaled, as rpe is, in fp32 or wider, and -inf masks. Its gradient, that
            of live blocks, is summed in fp32 or wider, in the same order each time. Not with rpe, nor cu_seqlens.
        sinks: (H,), a logit a head in the softmax's denominator, without a value; unscaled.
        dropout_p: share of the probabilities that are dropped after the softmax, 0 to below 1, in steps of 1/32768;
            random numbers are drawn from torch's generator of the device.
        softcap: above 0, scaled scores are softcap * tanh(score / softcap) before masks, as in Gemma 2; beside bool
            masks alone.
        return_lse: whether to return each row's log of its sum of exponentials as well, before dropout; the sink's is
            in the sum.

    Returns:
        (B, H, T, D) in query's dtype; with `return_lse` also (B, H, T) in fp32 (fp64 for fp64), differentiable.

    Raises:
        TypeError: operands that are no tensors; a layout that is no dense tensor, or of another dtype; a scale that is
            no number.
        ValueError: shapes, dtypes, devices, a layout, block or number that do not fit; a mask that requires a gradient.
        RuntimeError: a device without the kernel; a layout in place of its index under torch.compile or in the capture
            of a CUDA graph; `query_offset` under torch.compile.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 64, 16, requires_grad=True) for _ in range(3))
        >>> layout = ds_sparse.FixedSparsityConfig(num_heads=4, block=16).make_layout(64)
        >>> output, lse = ds_sparse.block_sparse_attention(query, key, value, layout, causal=True, return_lse=True)
        >>> output.shape, lse.shape
        (torch.Size([2, 4, 64, 16]), torch.Size([2, 4, 64]))
        >>> output.sum().backward()
        >>> query.grad.shape
        torch.Size([2, 4, 64, 16])
        >>> last = ds_sparse.block_sparse_attention(
        ...     query[:, :, -1:], key, value, layout, block=16, query_offset=63, causal=True
        ... )
        >>> torch.testing.assert_close(last, output[:, :, -1:])
    """
    tensor = layout if isinstance(layout, Tensor) else None
    like = known = None
    if query_offset is None:
        like = signature(
            (type(layout), None if tensor is None else tensor.shape, type(cu_seqlens)),
            (query, key, value),
            (key_padding_mask, attn_mask, rpe, distance_bias, sinks),
            (block, document_layout, scale, causal, dropout_p, softcap, return_lse),
        )
        known = None if like is None else _known.get(like)
    call = AttentionCall(
        query, key, value, scale if known is None else known.scale, causal, key_padding_mask, attn_mask, rpe,
        distance_bias, sinks, dropout_p, softcap,
    )  # fmt: skip
    if query_offset is not None and cu_seqlens is None and document_layout == "own":
        like = signature_at(call, query_offset, layout, block)
        again = None if like is None else attention_again(like, call, query_offset, layout)
        if again is not None:
            return again if return_lse else again[0]
    if known is not None:
        if known.layout is None:
            result = documents_again(call, known, layout, cu_seqlens, document_layout, block, return_lse)
            if result is not None:
                return result
        else:
            given: Any
            if tensor is None:
                given = _given_index(layout, known.layout, query, causal)
            else:
                given = kept_of_layout(tensor, known.layout, query.device)
            walk = None if given is None else known.walks.get(given)
            if walk is not None:
                output, lse = attend(call, given.causal() if causal else given, walk)
                return (output, lse) if return_lse else output
    if known is None or known.layout is None:
        row = None
        if isinstance(layout, PackedIndex) or is_packed(query, key, value, cu_seqlens, document_layout):
            refuse_by_place(
                query_offset=query_offset is not None, rpe=rpe is not None, distance_bias=distance_bias is not None,
                attn_mask=attn_mask is not None, key_padding_mask=key_padding_mask is not None,
            )  # fmt: skip
            check_document_layout(document_layout)
            row = packed_operands(query, key, value, cu_seqlens)
            call = call._replace(query=row.query, key=row.key, value=row.value)
        call = call.checked()
        if row is not None:
            result, documents = packed_attention(call, row, layout, document_layout, block, return_lse)
            if like is not None:
                _known.keep(like, call.scale, None, documents, lambda: remembered_documents(call, documents))
            return result
    query, key = call.query, call.key
    if query_offset is None:
        block = _checked_block(layout, block, query, key)
        given = _given_index(layout, block, query, causal)
        index = _cut_index(given, query, causal)
        check_heads(index, query, key)
        if distance_bias is not None:
            check_distance_bias(distance_bias, query, key.shape[2], query.shape[2] - 1, rpe)
            if torch.is_grad_enabled() and distance_bias.requires_grad and isinstance(index, BlockIndex):
                index.for_all_sequences("Gradients of distance_bias are")
        output, lse = attend(call, index)
        if like is not None and given.device == query.device:
            _known.keep(like, call.scale, block, given, lambda: remembered_walk(call, index))
    else:
        offset, parts = parts_at(query_offset, layout, block, call)
        _check_block(parts.block)
        check_heads(parts, query, key)
        output, lse = attention_at(call, offset, parts, layout.device if query.is_meta else query.device)
        if like is not None:
            remember_at(like, call, layout, parts)
    return (output, lse) if return_lse else output


def index_for(
    layout: Any,
    block: int | None,
    query: Tensor,
    key: Tensor,
    causal: bool,
) -> BlockIndex | MasterLayout:
    """The index of a layout (or of a `BlockIndex` or `MasterLayout`) on query's device, without what causality leaves
    dead, after a check that it fits the lengths. A `MasterLayout` stays one while a graph is traced. Meta tensors take
    an index with values, which FLOP counters ask for."""
    return _cut_index(_given_index(layout, _checked_block(layout, block, query, key), query, causal), query, causal)


def _checked_block(layout: Any, block: int | None, query: Tensor, key: Tensor) -> int:
    """The block of a layout, or an index, after a check that it fits the lengths."""
    if isinstance(layout, MasterLayout):
        _check_block(layout.block)
        return layout.block
    if isinstance(layout, BlockIndex):
        index = as_index(layout, layout.block if block is None else block)
        return _fitting_block((index.rows, index.columns), index.block, query, key)
    _, rows, columns = with_heads_of_sequences(layout)[0].shape
    return _fitting_block((rows, columns), block, query, key)


def _given_index(layout: Any, block: int, query: Tensor, causal: bool) -> Any:
    """The index that is given, or that of the layout, as far as it is kept with that."""
    if isinstance(layout, BlockIndex):
        return layout
    if isinstance(layout, MasterLayout):
        device = layout.device if query.is_meta else query.device
        return layout if torch.compiler.is_compiling() else layout.index(query.shape[2], device, causal)
    return index_of_layout(layout, block, query.device)


def _cut_index(index: Any, query: Tensor, causal: bool) -> Any:
    """The index that a call walks, of the given one."""
    if isinstance(index, MasterLayout):
        return index
    if causal:
        index = index.causal()
    return index if query.is_meta or index.device == query.device else copy_of(index, query.device)


def _fitting_block(shape: tuple[int, int], block: int | None, query: Tensor, key: Tensor) -> int:
    """The smallest block with which a layout of the shape just covers the tokens: the only one, but for 1 x 1."""
    if block is not None:
        _check_block(block)
    blocks, tokens, keys = BLOCK_SIZES if block is None else (block,), query.shape[2], key.shape[2]
    for b in blocks:
        if (-(-tokens // b), -(-keys // b)) == shape:
            return b
    fits_as_flash = any((-(-query.shape[1] // b), -(-key.shape[1] // b)) == shape for b in blocks)
    raise ValueError(
        f"The layout has {shape[0]} x {shape[1]} blocks; for {tokens} query and {keys} key tokens it has to have "
        + " or ".join(f"{-(-tokens // b)} x {-(-keys // b)} of {b}" for b in blocks)
        + "; build it for these lengths, or crop it."
        + of_flash(query, fits_as_flash)
    )


def _check_block(block: int) -> None:
    if block not in BLOCK_SIZES:
        raise ValueError(f"block is {block!r}; attention takes {listed(BLOCK_SIZES, 'and')}.")
