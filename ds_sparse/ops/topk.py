"""Attention of queries on lists of keys, each token its own: numbers of single keys, as in DeepSeek's sparse attention,
or of blocks of them."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..index.kernels import require_kernel
from ..index.packed import Borders, check_form
from ..index.selection import check_chosen
from ..index.transforms import outside_transforms_or_traced
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed
from ._library import check_alike, check_inputs, shapes_of, under_autocast
from .attention_function import attention_function
from .call import AttentionCall
from .operands import distinct_when_traced, factor_of
from .packed_operands import check_row, packed_operands, refuse_by_place
from .query_offset import Offset, is_later, offsets_of
from .selected import attend_chosen, chosen_of, nan_if_lost
from .sinks import check_sinks

LISTED_SIZES = (1, 2, 4, 8)
"""Keys of a number in lists whose keys are taken one by one."""


class Options(TypedDict, total=False):
    """Options of `topk_attention`, but for `return_lse`."""

    causal: bool
    scale: float | None
    sinks: Tensor | None
    cu_seqlens: Tensor | None
    query_offset: int | Tensor


@overload
def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_idxs: Tensor,
    granularity: int = ...,
    *,
    return_lse: Literal[False] = ...,
    **more: Unpack[Options],
) -> Tensor: ...


@overload
def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_idxs: Tensor,
    granularity: int = ...,
    *,
    return_lse: Literal[True],
    **more: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_idxs: Tensor,
    granularity: int = ...,
    *,
    return_lse: bool,
    **more: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


def topk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    topk_idxs: Tensor,
    granularity: int = 1,
    *,
    causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    query_offset: int | Tensor = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * query @ key^T) @ value, where each query token sees the keys that its list names.

    Attention by the choice of an indexer: DeepSeek's DSA (granularity 1, one key head, a list for all heads), Qwen's
    QSA (4), or blocks as in MSA and NSA (64, 128), in the terms of cuDNN's `topk_idxs`. From a granularity of 16 on it
    is `selected_attention`. Below, lists are written out for some tokens at a time, a few hundred MB: the kernels of
    `sparse_attn` walk their pairs of tokens and keys, or, where many heads share keys and list, as in DSA, the keys are
    gathered, and the heads are the rows of products. Memory is linear in tokens, times k for the lists.

    Differentiable in query, key, value and sinks; who chooses the keys has no gradient from here. Nothing waits for the
    device: CUDA graphs and torch.compile hold it. Statistics and sums are in fp32 or wider. A row without a key is
    zeros, its lse -inf or the sink, its gradients zero. NaN and infinities reach only rows that see them. The same
    input gives the same bits, but for the gradients of key and value by products on a GPU, unless
    `torch.use_deterministic_algorithms(True)` is set, and from a granularity of 16 on as `selected_attention` has it.
    Under autocast query, key and value are cast.

    Sources: DeepSeek-AI, "DeepSeek-V3.2", 2025; NVIDIA's cudnn-frontend, pull request 793, 2026: the lists' form.

    Args:
        query: (B, H, T, D), or (T, H, D), fp16, bf16, fp32 or fp64, any strides and any D.
        key: (B, Hkv, S, D), or (S, Hkv, D), H a multiple of Hkv: query head h reads head h // (H / Hkv).
        value: (B, Hkv, S, E), or (S, Hkv, E).
        topk_idxs: int32 or int64 (B or 1, G, T, k); beside a query (T, H, D) it is (T, G, k), or (T, k) for one G. G is
            1, Hkv or H: a list for all heads, for those that share a key head, or for each. Number n names the keys
            from `n * granularity` to before `(n + 1) * granularity`; in any order, repeated ones once. -1 names none,
            and so do numbers beyond the keys, and those of keys that are ahead of a causal query.
        granularity: keys that a number names: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024. From 16 on dtypes and D
            are those of `selected_attention`, and the smaller of D and E is filled up to the other.
        causal: query token i sees key tokens j <= i only.
        scale: factor of the scores; 1 / sqrt(D) if it is not given.
        sinks: (H,), a logit a head in the softmax's denominator, without a value; unscaled.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to T, as FlashAttention has it: operands are one
            row of packed documents, of which none sees another, (T, H, D) or (1, H, T, D). Numbers count from a
            document's start, and those beyond its end name none. No query_offset. On a GPU it is not read: where it
            does not ascend from 0 to T, all is NaN.
        query_offset: the position of the first query among the keys, 0 or more, S - T while decoding; or (B,) int32 or
            int64, one a sequence. `causal` counts from there.
        return_lse: whether to return each row's natural log of its sum of exponentials as well; the sink's is in the
            sum.

    Returns:
        (B, H, T, E), or (T, H, E), in query's dtype; with `return_lse` also (B, H, T), or (T, H), in fp32 (fp64 for
        fp64), differentiable.

    Raises:
        TypeError: operands that are no tensors; topk_idxs, cu_seqlens or query_offset that hold other than integers; a
            scale that is no number.
        ValueError: shapes, dtypes, devices or a number that do not fit.
        RuntimeError: a device without the kernel.

    Examples:
        Eight heads that share one key head, as in DSA: each token sees the 4 keys up to itself that score highest.

        >>> import torch
        >>> import ds_sparse
        >>> query, latent = torch.randn(64, 8, 24, requires_grad=True), torch.randn(64, 1, 24)
        >>> scores = torch.randn(64, 64).masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)
        >>> topk_idxs = scores.topk(4).indices  # what is ahead, as it is for the first tokens, names no key
        >>> output = ds_sparse.topk_attention(query, latent, latent[..., :16], topk_idxs, causal=True)
        >>> output.shape
        torch.Size([64, 8, 16])
        >>> output.sum().backward()
    """
    check_inputs(query=query, key=key, value=value, sinks=sinks)
    if type(granularity) is not int or granularity not in LISTED_SIZES + CHOSEN_BLOCK_SIZES:
        sizes = listed(LISTED_SIZES + CHOSEN_BLOCK_SIZES, "or")
        raise ValueError(f"granularity is {granularity!r}; it has to be {sizes} keys for each number of topk_idxs.")
    tokens_first = query.dim() == 3
    if cu_seqlens is not None:
        refuse_by_place(query_offset=is_later(query_offset))
        check_form(cu_seqlens)
    given = packed_operands(query, key, value, cu_seqlens)
    query, key, value = under_autocast(*given[:3])
    _check_operands(query, key, value)
    check_sinks(sinks, query)
    if cu_seqlens is not None:
        check_row(query, key, value)
    if tokens_first and isinstance(topk_idxs, Tensor) and topk_idxs.dim() == 2:
        topk_idxs = topk_idxs.unsqueeze(1)
    chosen = check_chosen(topk_idxs, query, key.shape[1], tokens_first, "topk_idxs")
    call = AttentionCall(query, key, value, factor_of(scale, query.shape[3]), causal, sinks=sinks)
    attend = _attend_blocks if granularity in CHOSEN_BLOCK_SIZES else _attend_keys
    output, lse = attend(call, chosen, granularity, query_offset, cu_seqlens)
    return (given.as_given(output), given.as_given(lse)) if return_lse else given.as_given(output)


def _check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless query (B, H, T, D), key (B, Hkv, S, D) and value (B, Hkv, S, E) belong together."""
    wanted = ""
    if query.dim() != 4 or key.dim() != 4 or value.shape[:-1] != key.shape[:-1]:
        wanted = "they have to be (batch, heads, tokens, D), or all (tokens, heads, D), those of key and value equal"
    elif query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        wanted = "batch, and head sizes of query and key, have to be equal"
    elif query.shape[1] % key.shape[1] if key.shape[1] else query.shape[1]:
        wanted = "query's heads have to be a multiple of key's"
    elif 0 in (query.shape[2], key.shape[2], key.shape[3], value.shape[3]):
        wanted = "there has to be at least one token, with one number"
    if wanted:
        raise ValueError(f"Shapes are {shapes_of(query=query, key=key, value=value)}; {wanted}.")
    check_alike(query=query, key=key, value=value)


def _attend_blocks(
    call: AttentionCall, chosen: Tensor, block: int, query_offset: Offset, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    """Output and lse of whole blocks; value's head size is made key's, or theirs its."""
    of_value, keys = call.value.shape[3], call.key.shape[2]
    depth = max(call.key.shape[3], of_value)
    query, key, value = (x if x.shape[3] == depth else pad(x, (0, depth - x.shape[3])) for x in call[:3])
    call = call._replace(query=query, key=key, value=value).checked("selected_attention_forward")
    chosen = chosen.masked_fill(chosen >= -(-keys // block), -1)
    made = None if query.numel() == 0 else chosen_of(call, chosen, block, cu_seqlens)
    output, lse = attend_chosen(call, made, query_offset, True)
    return output[..., :of_value], lse


def _attend_keys(
    call: AttentionCall, chosen: Tensor, granularity: int, query_offset: Offset, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    """Output and lse of single keys, or of a few that lie together."""
    if not call.query.is_cpu:
        require_kernel("token_attention_forward", call.device)
    limits, lost = _limits(call, query_offset, cu_seqlens)
    operands = distinct_when_traced(*call[:3])
    # Which pairs of tokens count is said by lists, in the place of a mask.
    output, lse, _ = _TopkAttention.apply(
        *operands, None, call.sinks, None, chosen, limits, None, None, (granularity, call.scale)
    )
    return nan_if_lost(lost, output, lse)


def _limits(call: AttentionCall, query_offset: Offset, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of each token the first key that it may see, from which its list counts, and the one after the last, int32
    (B or 1, T, 2); and of packed documents whose borders nobody has read, whether these are wrong, int32 (1)."""
    tokens, device, lost = call.query.shape[2], call.device, None
    offset, offsets = offsets_of(query_offset, call.query)
    position = torch.arange(tokens, device=device) + (offset if offsets is None else offsets.long().unsqueeze(1))
    position = position.view(-1, tokens)
    if cu_seqlens is None:
        first, end = torch.zeros_like(position), torch.full_like(position, call.key.shape[2])
    else:
        ranges, lost = _ranges(cu_seqlens, tokens, device)
        first, end = ranges.unbind(-1)
    if call.causal:
        end = torch.minimum(end, position + 1)
    return torch.stack([first, end], -1).int(), lost


@outside_transforms_or_traced
def _ranges(cu_seqlens: Tensor, tokens: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The first token of each token's document, and the one after its last, int32 (1, T, 2); and as `_limits`."""
    borders = Borders.of(cu_seqlens, tokens, device)
    lost = None if borders.known else borders.in_blocks(CHOSEN_BLOCK_SIZES[0], tokens)[2]
    return borders.limits([tokens]).clamp(0, tokens), lost


def _run(index, walk, numbers, query, key, value, bias, key_bias, topk_idxs, limits):
    return ops.topk_attention_forward.default(query, key, value, topk_idxs, limits, *numbers)


def _gradients(index, walk, numbers, wanted, forced, *tensors):
    *saved, _, _, topk_idxs, limits = tensors
    if not any(wanted[:3]):
        return None, None, None, None
    return *ops.topk_attention_backward.default(*saved, topk_idxs, limits, *numbers), None


_TopkAttention = attention_function("_TopkAttention", "topk_attention", _run, _gradients, lambda grad: grad)
