"""Attention of each token to those around it in one operation: neither the band nor its probabilities are stored.

Kernels take the lists of an index; where a graph is traced, operators take the numbers of a window and find the index
when they run: this is what compiled and exported graphs hold, for any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._ops import ops
from ..dispatch import readable
from ..index import WindowIndex
from ..index.cache import CPU
from ..index.lookup import index_of_window, is_built_anew
from ..index.window_sizes import Numbers, WindowNumbers, global_numbers, of_heads
from ..tools.wording import listed
from ._autograd import Function, differentiable_once
from .attention_function import attention_function, results_of_nothing, walk_of
from .call import AttentionCall
from .operands import broadcasts, distinct_when_traced, key_bias_of, of_flash, wide_dtype
from .packed_operands import check_row, is_row, known_twice, packed_operands
from .query_offset import check_window_offset, window_at
from .remembered import Remembered, Walk, signature

_known = Remembered()


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window_size: Numbers | WindowIndex,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    global_tokens: Sequence[int] | torch.Tensor | None = None,
    dilation: Numbers = 1,
    *,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_offset: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """softmax(scale * query @ key^T) @ value, where token i sees tokens i + k * dilation for |k| <= window_size.

    Differentiable in query, key, value and sinks; memory is linear in tokens, whatever the window. Statistics and sums
    are in fp32 or wider. The same input gives the same bits, but for the gradient of query on a Hopper GPU, as in
    `block_sparse_attention`. A row with nothing left is zeros, with zero gradient. NaN and infinities do not reach rows
    that do not see them. Under autocast query, key and value are cast.

    Source: Beltagy et al., "Longformer", 2020: windows, dilation a head, global tokens.

    Args:
        query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64; D up to 256. Any strides.
        key, value: (B, Hkv, T, D), H a multiple of Hkv: query head h reads head h // (H / Hkv).
        window_size: tokens on each side, 0 or more; or one number a head, H integers. Or a `WindowIndex`, on query's
            device, which has causal, global_tokens and dilation in it, as CUDA graphs want. What is built of numbers is
            kept for the next call with the same; a tensor is read at each call, which waits for its device.
        causal: tokens see none after them; nor do global ones.
        key_padding_mask: (B or 1, T); bool keeps where True, float is added.
        global_tokens: numbers of tokens that see all tokens and are seen by all, in all sequences and heads.
        dilation: distance of the tokens in a window, 1 or more; or one a head.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: each sequence is a
            row of documents packed like that, and windows end with their document. Without global tokens. Operands of
            one row may then be (T, H, D), the result likewise; or jagged nested tensors (B, H, tokens, D), which need
            no cu_seqlens. On a GPU it is not read, but with dilation: where it does not ascend so, all is NaN. A graph
            builds the index of it in there.
        sinks: (H,), a logit a head in the softmax's denominator, without a value; unscaled.
        query_offset: the position of the first query among the keys, of which there may then be more, S in place of T:
            up to S - T, as while decoding. Keys before the first window are not read. Without global tokens,
            dilation, cu_seqlens and `WindowIndex`.
        softcap: as of `block_sparse_attention`.

    Returns:
        (B, H, T, D) in query's dtype.

    Raises:
        TypeError: operands that are no tensors; a window_size, global_tokens or dilation that holds other than
            integers; a scale that is no number.
        ValueError: shapes, dtypes, devices or numbers that do not fit; a mask that requires a gradient.
        RuntimeError: a device without the kernel; numbers in place of their index at their first use in the capture of
            a CUDA graph, or with cu_seqlens and dilation under torch.compile.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query, key, value = (torch.randn(2, 4, 100, 16) for _ in range(3))
        >>> ds_sparse.window_attention(query, key, value, 8, causal=True, global_tokens=[0]).shape
        torch.Size([2, 4, 100, 16])
        >>> index = ds_sparse.WindowIndex.build(100, window_size=[4, 4, 16, 16], dilation=[1, 2, 1, 2])
        >>> ds_sparse.window_attention(query, key, value, index).shape
        torch.Size([2, 4, 100, 16])
    """
    by_index = isinstance(window_size, WindowIndex)
    like = known = None
    if query_offset is None:
        like = signature(
            type(window_size),
            (query, key, value),
            (key_padding_mask, sinks, cu_seqlens),
            (None if by_index else window_size, causal, global_tokens, dilation, scale, softcap),
        )
        known = None if like is None else _known.get(like)
    if known is not None and not is_built_anew(cu_seqlens):
        found: Any = window_size if known.layout is None else _index_of(known.layout, query, cu_seqlens)
        walk = known.walks.get(found)
        if walk is not None:
            call = AttentionCall(query, key, value, known.scale, causal, key_padding_mask, sinks=sinks, softcap=softcap)
            return attend_in_window(call, found, walk)
    row = None
    if is_row(query, key, value, cu_seqlens is not None or by_index):
        row = packed_operands(query, key, value, cu_seqlens)
        if by_index and row.cu_seqlens is not cu_seqlens:
            raise ValueError(known_twice("A WindowIndex"))
        check_row(*row[:3])
        query, key, value, cu_seqlens, *_ = row
    call = AttentionCall(query, key, value, scale, causal, key_padding_mask, sinks=sinks, softcap=softcap)
    call = call.checked("window_attention_forward")
    tokens, keys = call.query.shape[2], call.key.shape[2]
    if query_offset is None:
        if keys != tokens:
            raise ValueError(
                f"query has {tokens} tokens and key {keys}; in a window they are the same tokens. Give query_offset "
                "where the queries are a part of them."
            )
        given = _given(window_size, causal, global_tokens, dilation, cu_seqlens, call.query)
        index: Any = _index_of(given, call.query, cu_seqlens)
        output = attend_in_window(call, index)
        if like is not None and row is None:
            numbers = None if given is index else given
            _known.keep(like, call.scale, numbers, index, lambda: remembered_window(call, index))
    else:
        query_offset = check_window_offset(query_offset, tokens, keys)
        windows = _plain_windows(window_size, global_tokens, dilation, cu_seqlens, call.query.shape[1])

        def in_windows(call: AttentionCall) -> torch.Tensor:
            given = _given(windows, call.causal, None, 1, None, call.query)
            return attend_in_window(call, _index_of(given, call.query))

        output = window_at(in_windows, call, query_offset, windows)
    return output if row is None else row.as_given(output)


def attend_in_window(call: AttentionCall, index: WindowIndex | WindowNumbers, walk: Walk | None = None) -> torch.Tensor:
    """Output of a checked call in the windows of an index that fits it. walk: that of a call which is remembered."""
    query, key, value = call.query, call.key, call.value
    if query.numel() == 0:
        return results_of_nothing(call)[0]
    _, heads, tokens, head_dim = query.shape
    key_bias = None
    if call.key_padding_mask is not None:
        key_bias = key_bias_of(call.key_padding_mask, wide_dtype(query.dtype), tokens, query.is_cuda)
        key_bias = key_bias.view(-1, 1, 1, tokens)
    if isinstance(index, WindowIndex):
        order, inverse = index.ready().order, index.inverse
    else:
        order, inverse = (None, None) if index.in_order else ops.window_order(tokens, *index, query.device)
    if order is not None:
        if len(order) > 1 and key.shape[1] < heads:
            key, value = (x.repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
        query, key, value = (_Ordered.apply(x, order, inverse) for x in (query, key, value))
        if key_bias is not None:
            of_heads = key_bias.squeeze(2).expand(-1, len(order), -1).unsqueeze(3)
            key_bias = _ordered(of_heads, order).squeeze(3).unsqueeze(2)
    if walk is None and torch.compiler.is_compiling():
        query, key, value = distinct_when_traced(query, key, value)
    if walk is None or not walk.in_place:
        query, key, value = readable(query), readable(key), readable(value)
    apply = _WindowAttention.apply if walk is None else walk.apply
    numbers = call.scale, float(call.softcap)
    output, _, _ = apply(query, key, value, None, call.sinks, key_bias, None, None, index, walk, numbers)
    output = output[..., :head_dim] if head_dim % 8 else output
    return output if order is None else _Ordered.apply(output, inverse, order)


def _plain_windows(
    given: Numbers | WindowIndex,
    global_tokens: Sequence[int] | torch.Tensor | None,
    dilation: Numbers,
    cu_seqlens: torch.Tensor | None,
    heads: int,
) -> tuple[int, ...]:
    """Tokens on each side where there is a query_offset, one number for all heads, or one a head."""
    dilated = not isinstance(dilation, int) or dilation != 1
    if isinstance(given, WindowIndex) or global_tokens is not None or dilated or cu_seqlens is not None:
        raise ValueError(
            "query_offset is given with a WindowIndex, global_tokens, a dilation or cu_seqlens, which are for whole "
            "sequences; give window_size as a number, or one a head."
        )
    return of_heads("window_size", given, 0, heads)


def _given(
    given: Numbers | WindowIndex,
    causal: bool,
    global_tokens: Sequence[int] | torch.Tensor | None,
    dilation: Numbers,
    cu_seqlens: torch.Tensor | None,
    query: torch.Tensor,
) -> WindowIndex | WindowNumbers:
    """The index that is given, or the numbers, after a check that it fits the query."""
    _, heads, tokens, _ = query.shape
    if not isinstance(given, WindowIndex):
        windows, dilations = of_heads("window_size", given, 0, heads), of_heads("dilation", dilation, 1, heads)
        return WindowNumbers(windows, bool(causal), global_numbers(global_tokens, tokens), dilations)
    besides = {
        "causal": causal,
        "global_tokens": global_tokens is not None,
        "dilation": not isinstance(dilation, int) or dilation != 1,
        "cu_seqlens": cu_seqlens is not None,
    }
    if any(besides.values()):
        names = listed((name for name, is_given in besides.items() if is_given), "and")
        raise ValueError(f"A WindowIndex is given, and {names} besides; build it with that, and leave it out here.")
    return fitting_window(given, query)


def _index_of(
    given: WindowIndex | WindowNumbers, query: torch.Tensor, cu_seqlens: torch.Tensor | None = None
) -> WindowIndex | WindowNumbers:
    """The index itself, or that of the numbers. These stay such while a graph is traced."""
    if isinstance(given, WindowIndex) or (torch.compiler.is_compiling() and cu_seqlens is None):
        return given
    return index_of_window(query.shape[2], given, _device_of(query), cu_seqlens).ready()


def remembered_window(call: AttentionCall, index: WindowIndex) -> Walk:
    """The walk of calls like this one, which has been checked."""
    operands = call.query, call.key, call.value
    walk = walk_of(index.blocks, call.query).of_calls_like(_WindowAttention, operands, call.sinks)
    return walk if index.order is None else walk._replace(in_place=False)


def fitting_window(given: WindowIndex, query: torch.Tensor) -> WindowIndex:
    """The index, ready, after a check that it fits the query."""
    _, heads, tokens, _ = query.shape
    if given.tokens != tokens or not broadcasts((given.num_heads,), (heads,)):
        raise ValueError(
            f"The WindowIndex is for {given.tokens} tokens and {given.num_heads} heads (1: any), and query has "
            f"{tokens} tokens and {heads} heads; build it for these."
            + of_flash(query, given.tokens == query.shape[1] and broadcasts((given.num_heads,), (tokens,)))
        )
    device = _device_of(query)
    if given.device != device:
        raise ValueError(f"The WindowIndex is on {given.device} and query on {device}; pass index.to({str(device)!r}).")
    return given.ready()


def _device_of(query: torch.Tensor) -> torch.device:
    return CPU if query.is_meta else query.device


def _ordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tokens of x (B, H, T, D) in an order, (1 or H, T)."""
    if len(order) == 1:
        return x.index_select(2, order[0])
    heads, tokens = x.shape[1:3]
    rows = order + torch.arange(heads, device=order.device)[:, None] * tokens
    return x.flatten(1, 2).index_select(1, rows.flatten()).unflatten(1, (heads, tokens))


class _Ordered(Function):
    """`_ordered`, which its inverse undoes."""

    @staticmethod
    def forward(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return _ordered(x, order)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *_, ctx.inverse = inputs

    @staticmethod
    @differentiable_once("window_attention")
    def backward(ctx, grad: torch.Tensor):
        return _ordered(grad, ctx.inverse), None, None


def window_attention_forward(
    index: WindowIndex | WindowNumbers, *call, walk: Walk | None = None
) -> tuple[torch.Tensor, ...]:
    """output, lse and the saved statistics of rows: of query, key, value, key_bias, scale and softcap. walk: of the
    index's blocks, if it is known."""
    *tensors, scale, softcap = call
    if isinstance(index, WindowNumbers):
        return ops.window_numbers_forward(*tensors, scale, *index, softcap)
    blocks = index.blocks.ready()
    walk = walk_of(blocks, call[0]) if walk is None else walk
    return ops.window_attention_forward.default(
        *tensors, index.limits, index.places, *walk.rows, index.num_global, scale, index.causal, *walk.ends[:2],
        softcap,
    )  # fmt: skip


def window_attention_backward(
    index: WindowIndex | WindowNumbers, *call, walk: Walk | None = None, forced: str | None = None
) -> tuple[torch.Tensor, ...]:
    """The gradients of query, key and value. forced: as of `dispatch.choose`."""
    *tensors, scale, deterministic, softcap = call
    if isinstance(index, WindowNumbers):
        return ops.window_numbers_backward(*tensors, scale, deterministic, *index, softcap)
    blocks = index.ready().blocks.ready()
    walk = walk_of(blocks, call[1], forced) if walk is None else walk
    return ops.window_attention_backward.default(
        *tensors, index.limits, index.places, *walk.both, index.num_global, scale, index.causal, deterministic,
        *walk.ends[:2], softcap,
    )  # fmt: skip


def window_order(tokens: int, numbers: WindowNumbers, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`WindowIndex.order` and `inverse`, also where they change nothing. Copies, as a graph may write into them."""
    index = index_of_window(tokens, numbers, device).ready()
    as_it_is = torch.arange(tokens, device=device).expand(numbers.layout_heads, -1)
    order, inverse = ((as_it_is if x is None else x).clone() for x in (index.order, index.inverse))
    return order, inverse


def _run(index, walk, numbers, query, key, value, bias, key_bias, *_):
    return window_attention_forward(index, query, key, value, key_bias, *numbers, walk=walk)


def _gradients(index, walk, numbers, wanted, forced, grad_output, grad_lse, *call):
    *saved, _, key_bias, _, _ = call
    scale, softcap = numbers
    given = grad_output, *saved, key_bias, scale, torch.are_deterministic_algorithms_enabled(), softcap
    return *window_attention_backward(index, *given, walk=walk, forced=forced), None


_WindowAttention = attention_function("_WindowAttention", "window_attention", _run, _gradients)
