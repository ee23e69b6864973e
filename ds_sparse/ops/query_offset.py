"""Attention of queries that begin at a later position than the keys, as while a text is generated.

A few queries, as one new token of each sequence, are one native operator, which finds the keys of their block rows in
the layout's bits and reads them in place. With a gradient, a bias, dropout or a mask of more than keys, these keys and
values are gathered, in plain PyTorch. Neither waits for the device. Many queries are padded in front to a whole block;
where they are causal, what lies before their first block row is one call of the kernels and what begins there, where
causality cuts, is another, unless a float is added to scores.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.functional import dropout, embedding, pad

from .._ops import ops
from ..index import BlockIndex
from ..index.block import MAX_BLOCK
from ..index.cache import refuse_traced
from ..index.lookup import index_of_layout
from ..index.master_layout import MasterLayout
from ..index.parts import Parts, parts_of
from ..index.transforms import outside_transforms_or_traced, unwrap_functorch
from ..layout import with_heads_of_sequences
from ._autograd import Function, differentiable_once
from .attention_function import attend, results_of_nothing
from .call import AttentionCall
from .operands import as_added, capped, check_distance_bias, key_bias_of, matrices, raised, wide_dtype
from .remembered import Remembered, Signature, Walk, signature

FEW_QUERIES = 16
"""Query tokens up to which the keys of their block rows are gathered."""

Offset = int | Tensor

_known = Remembered()


def parts_at(offset: Offset, layout: Any, block: int | None, call: AttentionCall) -> tuple[Offset, Parts]:
    """The position of the first query, or of each sequence's where they are not known to be equal, (1 or B,) on query's
    device, and the layout, after a check that it covers them and the keys. Positions on a GPU are read, and waited for,
    of many queries, of queries on the CPU and of a bias by distance alone; else one outside of the layout is NaN, or an
    assertion there.

    Raises:
        TypeError: an offset that is no integer and no tensor of such.
        ValueError: an offset below 0, or not one a sequence; a layout that is too small, or a tensor without its block;
            a distance_bias that does not fit.
        RuntimeError: under torch.compile.
    """
    refuse_traced("query_offset cannot be read", "call outside of what is compiled.")
    query, keys, tokens = call.query, call.key.shape[2], call.query.shape[2]
    reads = tokens > FEW_QUERIES or call.distance_bias is not None
    offset, bounds = position_of(offset, len(query), reads)
    if not isinstance(layout, BlockIndex | MasterLayout):
        with_heads_of_sequences(layout)
        if block is None:
            raise ValueError(
                "query_offset is given and block is not; the layout may be larger than the tokens, so give its block."
            )
        rows = None if bounds is None else range(bounds[0] // block, -(-(bounds[1] + tokens) // block))
        layout = index_of_layout(layout, block, layout.device, rows)
    elif block is not None and block != layout.block:
        raise ValueError(f"block is {block}, and the index was built for blocks of {layout.block}; leave it out.")
    parts = parts_of(layout)
    highest, columns = 0 if bounds is None else bounds[1], parts.columns * parts.block
    last = highest + tokens - 1
    if _placed(highest, query, parts) is None or keys > columns:
        raise ValueError(
            f"The layout covers {parts.rows * parts.block} query and {columns} key tokens, the last query is at {last} "
            f"and there are {keys} keys; build it for a longer sequence."
        )
    check_distance_bias(call.distance_bias, query, keys, last, call.rpe)
    placed = _placed(offset, query, parts) if tokens <= FEW_QUERIES else offset
    assert placed is not None, "or the highest would not be in the layout"
    return placed, parts


def _placed(offset: Offset, query: Tensor, parts: Parts) -> Offset | None:
    """A position as few queries take it: a tensor as (1 or B,) on query's device, unread, and a number as it is; None
    where the number puts queries outside of the layout."""
    if not isinstance(offset, Tensor):
        return offset if 0 <= offset <= parts.rows * parts.block - query.shape[2] else None
    return _sent_to(query, offset.reshape(-1))


def _sent_to(query: Tensor, offset: Tensor) -> Tensor:
    # What a GPU sends to the CPU is waited for, as it is read there.
    return offset if offset.device == query.device else offset.to(query.device, non_blocking=not query.is_cpu)


def is_later(offset: Offset) -> bool:
    """Tells if an offset, not checked yet, is another than 0."""
    return isinstance(offset, Tensor) or bool(offset)


def offsets_of(offset: Offset, query: Tensor) -> tuple[int, Tensor | None]:
    """An offset, checked, as operators take it that read none here: a number, and None; or 0, and one a sequence (1 or
    B,) on query's device."""
    offset, _ = position_of(offset, query.shape[0], False)
    return (0, _sent_to(query, offset)) if isinstance(offset, Tensor) else (offset, None)


def position_of(offset: Offset, batch: int, reads: bool) -> tuple[Offset, tuple[int, int] | None]:
    """The offset, a number where it is one for all sequences, and the lowest and the highest of them; None where they
    are not read, as those on a GPU, and in graphs, unless `reads`. Raises TypeError or ValueError for what is no such
    offset, or below 0."""
    if isinstance(offset, Tensor) and offset.dtype in (torch.int32, torch.int64):
        offset, read = _offsets_of(offset, batch, reads)
        if read is None:
            return offset, None
        lowest, highest = min(read, default=0), max(read, default=0)
        offset = lowest if lowest == highest else offset
    elif isinstance(offset, Integral) and not isinstance(offset, bool):
        lowest = highest = offset = int(offset)
    else:
        what = f"a tensor of {offset.dtype}" if isinstance(offset, Tensor) else repr(offset)
        raise TypeError(f"query_offset is {what}; it has to be an integer, or int32 or int64 numbers, one a sequence.")
    if lowest < 0:
        raise ValueError(f"query_offset is {lowest}; it is the position of the first query, 0 or more.")
    if highest >= 2**31:
        raise ValueError(f"query_offset is {highest}; a position is below 2**31.")
    return offset, (lowest, highest)


@outside_transforms_or_traced
def _offsets_of(offset: Tensor, batch: int, reads: bool) -> tuple[Tensor, list[int] | None]:
    """The offsets in one dimension, and their numbers; None where they are not read."""
    offset = unwrap_functorch("query_offset", offset)
    if offset.dim() and (offset.dim() > 1 or offset.shape[0] != batch):
        raise ValueError(
            f"query_offset has shape {tuple(offset.shape)}; it has to be an integer, or ({batch},), one a sequence."
        )
    offset = offset.reshape(-1)
    is_read = reads or (offset.is_cpu and not torch.compiler.is_compiling())
    return offset, offset.tolist() if is_read else None


def attention_at(call: AttentionCall, offset: Offset, parts: Parts, device: torch.device) -> tuple[Tensor, Tensor]:
    """Output and lse of queries at a position.

    Args:
        call: checked.
        offset, parts: from `parts_at`.
        device: where the index is to be.
    """
    if call.query.numel() == 0:
        return results_of_nothing(call)
    if call.query.shape[2] <= FEW_QUERIES and _is_native(call):
        return _decoded(call, parts.bits(device), parts.block, offset)
    call = call.with_wide_gradients()
    if call.query.shape[2] <= FEW_QUERIES:
        with in_own_dtype(call.query):
            return _gathered(call.differentiable_once("block_sparse_attention"), offset, parts, device)
    if not isinstance(offset, Tensor):
        return _in_blocks(call, offset, parts, device)
    offsets = enumerate(offset.tolist())
    results = [_in_blocks(call.of_sequences(slice(i, i + 1)), at, parts, device) for i, at in offsets]
    output, lse = zip(*results, strict=True)
    return torch.cat(output), torch.cat(lse)


def signature_at(call: AttentionCall, offset: Any, layout: Any, block: int | None) -> Signature | None:
    """What tells a call at an offset, not checked yet, from others; None where it is not remembered, as with a layout
    that may change, and with an offset that has to be read, or to be sent to query's device."""
    if (
        not isinstance(layout, BlockIndex | MasterLayout)
        or call.dropout_p
        or any(x is not None for x in call.biases[1:])
    ):
        return None
    offsets = offset if isinstance(offset, Tensor) else None
    if type(offset) is not int if offsets is None else offsets.is_cpu or offsets.device != call.query.device:
        return None
    operands, options = (call.query, call.key, call.value), (block, call.scale, call.causal, call.softcap)
    return signature(type(layout), operands, (call.key_padding_mask, call.sinks, offsets), options)


def remember_at(like: Signature, call: AttentionCall, layout: Any, parts: Parts) -> None:
    """Remembers a call, which has been checked, where the native operator computes it."""
    if call.query.numel() and call.query.shape[2] <= FEW_QUERIES and _is_native(call):
        _known.keep(like, call.scale, None, layout, lambda: Walk(rows=(parts,)))


def attention_again(like: Signature, call: AttentionCall, offset: Offset, layout: Any) -> tuple[Tensor, Tensor] | None:
    """Output and lse of a call like one that is remembered, or None."""
    known = _known.get(like)
    walk = None if known is None else known.walks.get(layout)
    if known is None or walk is None:
        return None
    (parts,) = walk.rows
    placed = _placed(offset, call.query, parts)
    if placed is None:
        return None
    if isinstance(layout, BlockIndex):
        layout.ready()
    return _decoded(call._replace(scale=known.scale), parts.bits(call.device), parts.block, placed)


def window_at(
    attend: Callable[[AttentionCall], Tensor], call: AttentionCall, offset: int, windows: tuple[int, ...]
) -> Tensor:
    """Output of queries that begin at a position, of attention to the tokens around.

    Args:
        attend: attention in `windows` of a call whose queries and keys are the same tokens.
        call: checked.
        offset: from `check_window_offset`.
        windows: tokens on each side, one number, or one a head.
    """
    if call.query.numel() == 0:
        return results_of_nothing(call)[0]
    tokens, widest, device = call.query.shape[2], max(windows), call.device
    part = slice(max(0, offset - widest), offset + tokens + (0 if call.causal else widest))
    if tokens == len(windows) == 1 and _is_native(call):
        return _decoded(call.of_keys(part)._replace(causal=False), None, MAX_BLOCK, 0)[0]
    call, offset = call.of_keys(part), offset - part.start
    query, key, value = call.query, call.key, call.value
    keys = key.shape[2]
    at = torch.arange(keys, device=device)
    of_heads = at.new_full((1,), widest) if len(windows) == 1 else torch.tensor(windows).to(device, non_blocking=True)
    if tokens > FEW_QUERIES:
        if len(windows) > 1:
            # What fills up sees, in a head, keys that only the wider windows of others have, and they may be NaN.
            away = torch.maximum(offset - at, at - (offset + tokens - 1))
            is_read = away <= of_heads.unflatten(0, (key.shape[1], -1)).amax(1, keepdim=True)
            key, value = (x.masked_fill(~is_read.unsqueeze(-1), 0) for x in (key, value))
        query = pad(query, (0, 0, offset, keys - offset - tokens))
        return attend(call._replace(query=query, key=key, value=value))[:, :, offset : offset + tokens]
    call = call.differentiable_once("window_attention")
    away = at - torch.arange(offset, offset + tokens, device=device)[:, None]
    seen = away.abs() <= of_heads[:, None, None]
    seen = seen & (away <= 0) if call.causal else seen
    seen, bias = seen[None], torch.zeros((), dtype=wide_dtype(query.dtype), device=device)
    with in_own_dtype(query):
        if call.key_padding_mask is not None:
            of_keys = key_bias_of(call.key_padding_mask, bias.dtype, keys, True)[:, None, None]
            seen, bias = _with_bias(seen, bias, of_keys)
        all_seen = tokens == 1 and len(windows) == 1 and call.key_padding_mask is None
        return _plainly(call, call.key, call.value, seen, bias, all_seen)[0]


def check_window_offset(offset: object, tokens: int, keys: int) -> int:
    """The offset of queries in windows.

    Raises:
        TypeError: no integer.
        ValueError: below 0; queries behind the last key.
    """
    if not isinstance(offset, Integral) or isinstance(offset, bool):
        raise TypeError(f"query_offset is {offset!r}; in a window it has to be an integer, the same for all sequences.")
    if not 0 <= int(offset) <= keys - tokens:
        raise ValueError(
            f"query_offset is {offset}, for {tokens} queries among {keys} keys; in a window it has to be 0 or more, "
            "and with the number of queries that of keys at most, so that their own keys are there."
        )
    return int(offset)


def in_own_dtype(query: Tensor) -> AbstractContextManager:
    """Without autocast, which casts products of fp32."""
    kind = query.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if casts else nullcontext()


def _in_blocks(call: AttentionCall, offset: int, parts: Parts, device: torch.device) -> tuple[Tensor, Tensor]:
    """By the kernels, in one call or two."""
    block, tokens, keys = parts.block, call.query.shape[2], call.key.shape[2]
    first, before = divmod(offset, block)
    rows, columns = range(first, -(-(offset + tokens) // block)), -(-keys // block)
    if before:
        call = call.with_queries_in_front(before)
    past, ahead = range(min(first, columns)), range(first, min(rows.stop, columns))

    def on(call: AttentionCall, columns: range, up_to_own: bool = False) -> tuple[Tensor, Tensor]:
        part = slice(columns.start * block, min(columns.stop * block, keys))
        index = parts.index(rows, columns, device, up_to_own)
        by = part.start - first * block
        return attend(call.of_keys(part, by), index.causal() if call.causal else index)

    of_past = call._replace(causal=False)
    if not call.causal:
        output, lse = on(call, range(columns))
    elif len(past) == 0 or (len(ahead) and parts.is_empty(rows, past)):
        output, lse = on(call, ahead)
    elif len(ahead) == 0:
        output, lse = on(of_past, past)
    elif call.adds_floats:
        # lse of a row whose biases are all far below 0 does not tell of how many keys it is, so nothing can be merged.
        output, lse = on(call.with_causality_in_mask(first * block), range(ahead.stop), up_to_own=True)
    else:
        output, lse = merged(on(of_past._replace(sinks=None), past), on(call, ahead))
    return output[:, :, before:], lse[:, :, before:]


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and lse of attention over the keys of two calls together, each with output and lse."""
    nothing = (one[1] == float("-inf")) & (other[1] == float("-inf"))
    a, b = (lse.masked_fill(nothing, 0) for _, lse in (one, other))
    # 1 - share would lose a small one, also in gradients.
    share, rest = torch.stack([a, b]).softmax(0).unsqueeze(-1)
    output = (one[0] * share + other[0] * rest).to(one[0].dtype)
    return output, torch.logaddexp(a, b).masked_fill(nothing, float("-inf"))


def _is_native(call: AttentionCall) -> bool:
    """Tells if the native operator computes what the call asks for."""
    given = call.query, call.key, call.value, call.sinks
    padding, *others = call.biases
    if call.dropout_p or call.softcap or call.query.is_meta or any(x is not None for x in others):
        return False
    if padding is not None and padding.dtype != torch.bool:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _decoded(call: AttentionCall, bits: Tensor | None, block: int, offset: Offset) -> tuple[Tensor, Tensor]:
    """Few queries by the native operator, on the layout of these bits, or on all keys."""
    keep, sinks = call.key_padding_mask, call.sinks
    if keep is not None and keep.shape[1] != call.key.shape[2]:
        keep = keep.expand(-1, call.key.shape[2])
    if sinks is not None:
        sinks = sinks.to(wide_dtype(call.query.dtype)).contiguous()
    operands = (x if x.stride(3) == 1 else x.contiguous() for x in call[:3])
    offsets, offset = (offset, 0) if isinstance(offset, Tensor) else (None, offset)
    return ops.decode_attention_forward(*operands, bits, block, offsets, offset, call.causal, keep, sinks, call.scale)


def _gathered(call: AttentionCall, offset: Offset, parts: Parts, device: torch.device) -> tuple[Tensor, Tensor]:
    """In plain PyTorch, on the keys and values that a block row of the queries sees."""
    query, keys, wide = call.query, call.key.shape[2], wide_dtype(call.query.dtype)
    listed = parts.keys_seen(offset, query.shape[2], keys, call.causal, device)
    token, seen = listed.token.to(query.device), listed.seen.to(query.device)  # which meta tensors are not on
    scores_bias = torch.zeros((), dtype=wide, device=query.device)
    if call.key_padding_mask is not None:
        of_keys = key_bias_of(call.key_padding_mask, wide, keys, True)
        of_keys = of_keys[:, None, None].expand(len(query), token.shape[1], 1, -1)
        of_keys = of_keys.gather(-1, token.unsqueeze(2).expand(len(of_keys), -1, -1, -1))
        seen, scores_bias = _with_bias(seen, scores_bias, of_keys)
    for bias in (call.attn_mask, call.rpe):
        if bias is not None:
            of_pairs = matrices(bias, query.dtype, keys)
            shape = (*torch.broadcast_shapes(of_pairs.shape[:2], token.shape[:2]), of_pairs.shape[2])
            of_pairs = of_pairs.expand(*shape, -1).gather(-1, token.unsqueeze(2).expand(*shape, -1))
            seen, scores_bias = _with_bias(seen, scores_bias, of_pairs)
    if call.distance_bias is not None:
        of_pairs = _by_distance(call.distance_bias, listed.position.to(query.device), token, wide)
        seen, scores_bias = _with_bias(seen, scores_bias, of_pairs)
    # Gradients of heads that share a key are added up before they are rounded.
    key, value = (
        _of_tokens(x.to(wide) if x.requires_grad else x, token, query.shape[1]) for x in (call.key, call.value)
    )
    all_seen = query.shape[2] == 1 and listed.all_read and all(x is None for x in call.biases)
    return _plainly(call, key, value, seen, scores_bias, all_seen)


def _plainly(
    call: AttentionCall, key: Tensor, value: Tensor, seen: Tensor, bias: Tensor, all_seen: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse of few queries (B, H, T, D), in fp32 or wider; masks and biases of the call are not read.

    Args:
        key, value: (B, Hkv, M, D), in the place of the call's.
        seen: bool, which broadcasts to (B, H, T, M); bias: the sum of what is added to the scores, alike.
        all_seen: whether it is known that all is seen; else what is not may be NaN.
    """
    query = call.query
    tokens, wide = query.shape[2], wide_dtype(query.dtype)
    key, value = key.to(wide), value.to(wide)
    scaled = query.to(wide) * call.scale

    def grouped(x: Tensor) -> Tensor:
        """By heads of keys, (B, Hkv, H / Hkv * T, ...)."""
        return x.unflatten(1, (key.shape[1], -1)).flatten(2, 3)

    def by_heads(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, tokens)).flatten(1, 2)

    of_groups = None if all_seen else grouped(seen.expand(*query.shape[:3], -1))
    scores = by_heads(_Product.apply(grouped(scaled), key.mT, of_groups, None))
    scores = capped(scores, call.softcap) if call.softcap else scores
    scores = scores + (raised(bias) if bias.dim() else bias)
    probs, lse = _softmax(scores.masked_fill(~seen, float("-inf")), seen, call.sinks)
    probs = dropout(probs, call.dropout_p) if call.dropout_p else probs
    output = by_heads(_Product.apply(grouped(probs), value, None, of_groups))
    return output.to(query.dtype), lse


class _Product(Function):
    """a @ b: `of_result`, bool, the numbers of the product that count, or `of_a` those of a; None: all. What does not
    count adds nothing to what does, nor to gradients, whatever it is."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, of_result: Tensor | None, of_a: Tensor | None) -> Tensor:
        return _contained(a, of_a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, of_result, of_a = inputs
        ctx.save_for_backward(a, b, of_result, of_a)

    @staticmethod
    @differentiable_once("block_sparse_attention")
    def backward(ctx, grad: Tensor):
        a, b, of_result, of_a = ctx.saved_tensors
        grad_a = _contained(grad, of_result, b.mT)
        if of_a is not None:
            grad_a = grad_a.masked_fill(~of_a, 0)
        if of_result is None:
            grad_b = _contained(a.mT, None if of_a is None else of_a.mT, grad)
        else:
            grad_b = _contained(grad.mT, of_result.mT, a).mT
        return grad_a, grad_b, None, None


def _contained(a: Tensor, live: Tensor | None, b: Tensor) -> Tensor:
    """a @ b over the numbers of a that are live: NaN in rows of which one meets a row of b that is not finite."""
    if live is None:
        return a @ b
    a = a.masked_fill(~live, 0)
    if _is_known_finite(b):
        return a @ b
    finite = b.isfinite()
    spoilt = (live & ~finite.all(-1).unsqueeze(-2)).any(-1, keepdim=True)
    return (a @ b.masked_fill(~finite, 0)).masked_fill(spoilt, float("nan"))


def _is_known_finite(x: Tensor) -> bool:
    """Tells if x is finite, where to ask costs nothing but a sum: on the CPU, of tensors that have values."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return not isinstance(x, FakeTensor) and bool(x.sum(dtype=wide_dtype(x.dtype)).isfinite())


def _of_tokens(x: Tensor, token: Tensor, heads: int) -> Tensor:
    """Tokens (P, L, M) of keys or values (B, Hkv, S, D) in the order of their list: (B, Hkv, M, D) where L is 1, else
    (B, H, M, D)."""
    batch, key_heads = x.shape[:2]
    if len(token) == token.shape[1] == 1:
        # The gradient of index_select adds up what is listed more than once in any order.
        return x[:, :, token[0, 0]] if x.requires_grad else x.index_select(2, token[0, 0])
    head = torch.arange(key_heads, device=x.device)
    head = head if token.shape[1] == 1 else head.repeat_interleave(heads // key_heads)
    return x[torch.arange(batch, device=x.device)[:, None, None], head[:, None], token]


def _by_distance(bias: Tensor, position: Tensor, token: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that a bias by distance (H or 1, 2M - 1) adds for queries at positions (P, T) and their keys, tokens (P,
    L, M): (P, H or L, T, M). The gradient of an embedding is summed in the same order each time."""
    number = token[:, :, None] - position[:, None, :, None] + bias.shape[1] // 2
    of_heads = embedding(number.clamp(0, bias.shape[1] - 1), as_added(bias, dtype).T)  # (P, L, T, M, H or 1)
    if token.shape[1] == 1:
        return of_heads.squeeze(1).movedim(-1, 1)
    return of_heads.squeeze(-1) if len(bias) == 1 else of_heads.diagonal(0, 1, 4).movedim(-1, 1)


def _with_bias(seen: Tensor, total: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Adds one mask or bias to what is seen, and to the sum of biases."""
    if bias.dtype == torch.bool:
        return seen & bias, total
    masked = bias == float("-inf")
    return seen & ~masked, total + as_added(bias, total.dtype).masked_fill(masked, 0)


def _softmax(scores: Tensor, seen: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of scores (B, H, T, M), -inf where they are not seen, and lse; of rows with nothing zeros and
    -inf."""
    keys, alive = scores.shape[-1], seen.any(-1, keepdim=True).expand(*scores.shape[:3], 1)
    if sinks is not None:
        of_sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores, alive = torch.cat([scores, of_sinks], -1), alive | (of_sinks > float("-inf"))
    scores = scores.masked_fill(~alive, 0)
    probs = (torch.softmax(scores, -1) * alive)[..., :keys]
    # The gradient of logsumexp subtracts its result, in which a log is lost beside scores of -1e30.
    highest = scores.detach().amax(-1, keepdim=True)
    lse = torch.logsumexp(scores - highest, -1) + highest.squeeze(-1)
    return probs, lse.masked_fill(~alive[..., 0], float("-inf"))
