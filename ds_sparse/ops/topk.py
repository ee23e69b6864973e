"""Attention of queries on lists of the keys that each of them sees, one number for a key or for a few that lie together:
DeepSeek's sparse attention. The lists' keys are gathered for some tokens at a time, in plain PyTorch, as operators that
graphs hold whole; larger blocks are those of `selected`."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..index.packed import Borders, check_form
from ..index.selection import check_chosen
from ..index.transforms import outside_transforms_or_traced
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed
from ._library import check_alike, check_inputs, under_autocast
from .attention_function import attention_function
from .operands import distinct_when_traced, empty_as, factor_of, of_flash, wide_dtype
from .packed_attention import goes_by_places
from .packed_operands import check_row, packed_operands, row_of
from .query_offset import Offset, position_of
from .selected import selected_attention
from .sinks import check_sinks

GATHERED_SIZES = (1, 2, 4, 8)
"""Keys of a number in a list, whose keys are gathered."""

MOST_GATHERED = {"cpu": 2**18, "cuda": 2**26}
"""Numbers of keys and scores that are held at a time, unless those of one token are more."""


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
    """softmax(scale * query @ key^T) @ value, where each query token sees the keys that its list names."""
    check_inputs(query=query, key=key, value=value, sinks=sinks)
    if isinstance(granularity, bool) or granularity not in GATHERED_SIZES + CHOSEN_BLOCK_SIZES:
        sizes = listed(GATHERED_SIZES + CHOSEN_BLOCK_SIZES, "or")
        raise ValueError(f"granularity is {granularity!r}; it has to be {sizes} keys for each number of topk_idxs.")
    tokens_first = query.dim() == 3
    if cu_seqlens is not None:
        if isinstance(query_offset, Tensor) or query_offset:
            raise ValueError(goes_by_places("query_offset"))
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
    scale = factor_of(scale, query.shape[3])
    attend = _attend_blocks if granularity in CHOSEN_BLOCK_SIZES else _attend_keys
    output, lse = attend(query, key, value, chosen, granularity, causal, scale, sinks, cu_seqlens, query_offset)
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
        operands = {"query": query, "key": key, "value": value}
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in operands.items())
        raise ValueError(f"Shapes are {shapes}; {wanted}.")
    check_alike(query=query, key=key, value=value)


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, block: int, causal: bool, scale: float,
    sinks: Tensor | None, cu_seqlens: Tensor | None, query_offset: Offset,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse of whole blocks; value's head size is made key's, or theirs its."""
    depth = max(key.shape[3], value.shape[3])
    of_value = value.shape[3]
    query, key, value = (x if x.shape[3] == depth else pad(x, (0, depth - x.shape[3])) for x in (query, key, value))
    chosen = chosen.masked_fill(chosen >= -(-key.shape[2] // block), -1)
    output, lse = selected_attention(
        query, key, value, chosen, block, causal=causal, scale=scale, sinks=sinks, cu_seqlens=cu_seqlens,
        query_offset=query_offset, return_lse=True,
    )  # fmt: skip
    return output[..., :of_value], lse


def _attend_keys(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, granularity: int, causal: bool, scale: float,
    sinks: Tensor | None, cu_seqlens: Tensor | None, query_offset: Offset,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse of single keys, or of a few that lie together."""
    offset, _ = position_of(query_offset, query.shape[0], query.shape[2], False)
    limits, lost = _limits(query, key, causal, cu_seqlens, offset)
    operands = distinct_when_traced(query, key, value)
    # Which pairs of tokens count is said by lists, in the place of a mask.
    output, lse, _ = _TopkAttention.apply(
        *operands, None, sinks, None, chosen, limits, None, None, (granularity, scale)
    )
    if lost is not None:
        # NaN times a result is NaN in its gradients, too.
        sound = torch.where(lost == 0, 1.0, torch.nan)
        output, lse = output * sound.to(output.dtype), lse * sound.to(lse.dtype)
    return output, lse


@outside_transforms_or_traced
def _limits(
    query: Tensor, key: Tensor, causal: bool, cu_seqlens: Tensor | None, offset: Offset
) -> tuple[Tensor, Tensor | None]:
    """Of each token the first key that it may see, from which its list counts, and the one after the last, int32
    (B or 1, T, 2); and of packed documents whose borders nobody has read, whether these are wrong, int32 (1)."""
    tokens, keys, device, lost = query.shape[2], key.shape[2], query.device, None
    position = torch.arange(tokens, dtype=torch.int32, device=device).unsqueeze(0)
    if cu_seqlens is not None:
        borders = Borders.of(cu_seqlens, tokens, device)
        first, end = borders.limits([tokens]).clamp(0, tokens).unbind(-1)
        lost = borders.in_blocks(CHOSEN_BLOCK_SIZES[0], tokens)[2]
    else:
        if isinstance(offset, Tensor):
            position = position + offset.to(device, torch.int32, non_blocking=query.is_cuda).unsqueeze(1)
        else:
            position = position + offset
        first, end = torch.zeros_like(position), torch.full_like(position, keys)
    if causal:
        end = torch.minimum(end, position + 1)
    return torch.stack([first, end], -1), lost


class Lists:
    """The keys of tokens' lists, gathered for some tokens at a time. Letters: P the pairs of a head of keys and a list,
    which m neighbouring heads of query share, n the keys that a list names.

    Args:
        x: what an operator is given, by the names of its schema.
    """

    def __init__(self, x: Any) -> None:
        self.x = x
        (self.batch, heads, self.tokens, depth), (_, key_heads, self.keys, _) = x.query.shape, x.key.shape
        self.pairs = max(x.topk_idxs.shape[1], key_heads)
        self.together = heads // self.pairs
        listed = x.topk_idxs.shape[3] * x.granularity
        of_token = self.batch * self.pairs * listed * (depth + x.value.shape[3] + 2 * self.together)
        most = MOST_GATHERED.get(x.query.device.type, MOST_GATHERED["cuda"])
        self.step = max(1, most // max(1, of_token))
        # Behind the keys of each head is a row of zeros, the key that unused places of lists name.
        head = torch.arange(self.pairs, device=x.query.device) // (self.pairs // key_heads)
        sequence = torch.arange(self.batch, device=x.query.device).unsqueeze(1)
        self.first_row = ((sequence * key_heads + head) * (self.keys + 1))[..., None, None]
        self.key, self.value = (pad(y, (0, 0, 0, 1)).flatten(0, 2) for y in (x.key, x.value))

    def __iter__(self):
        """The tokens, (begin, end); the rows of their keys, (B * P * c * n); whether there is a key, (B * P * c, 1, n)."""
        x, granularity = self.x, self.x.granularity
        for begin in range(0, self.tokens, self.step):
            end = min(begin + self.step, self.tokens)
            numbers, limits = x.topk_idxs[:, :, begin:end], x.limits[:, None, begin:end]
            first, stop = limits.unsqueeze(-1).unbind(-2)
            exists = (numbers >= 0) & (numbers < (stop - first + granularity - 1) // granularity)
            numbers = numbers.masked_fill(~exists, -1).sort(-1).values
            exists = numbers >= 0
            exists[..., 1:] &= numbers[..., 1:] != numbers[..., :-1]  # those that are named twice count once
            place = torch.arange(granularity, device=numbers.device)
            key = (first.unsqueeze(-1) + numbers.long().unsqueeze(-1) * granularity + place).flatten(-2)
            seen = exists.repeat_interleave(granularity, -1) & (key < stop)
            row = self.first_row + torch.where(seen, key, self.keys)
            seen = seen.expand(self.batch, self.pairs, -1, -1)
            yield begin, end, row.flatten(), seen.flatten(0, 2).unsqueeze(1)

    def of_tokens(self, y: Tensor, begin: int, end: int) -> Tensor:
        """y (B, H, T, D), those tokens' as (B * P * c, m, D)."""
        return y[:, :, begin:end].unflatten(1, (self.pairs, -1)).transpose(2, 3).flatten(0, 2)

    def put(self, y: Tensor, begin: int, end: int, of_tokens: Tensor) -> None:
        """Writes what `of_tokens` would read."""
        of_tokens = of_tokens.unflatten(0, (self.batch, self.pairs, -1)).transpose(2, 3)
        y[:, :, begin:end] = of_tokens.flatten(1, 2)

    def gathered(self, y: Tensor, row: Tensor) -> Tensor:
        """(B * P * c, n, D)."""
        return y.index_select(0, row).unflatten(0, (-1, self.x.topk_idxs.shape[3] * self.x.granularity))

    def scores(self, begin: int, end: int, key: Tensor, seen: Tensor) -> Tensor:
        """(B * P * c, m, n), -inf where a key is not there."""
        scores = _product(self.of_tokens(self.x.query, begin, end), key.mT) * self.x.scale
        return scores.masked_fill_(~seen, float("-inf"))


def run_forward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the operator `topk_attention_forward`."""
    output, lse, rows = empty_results(x)
    with torch.autocast(x.query.device.type, enabled=False):
        lists = Lists(x)
        for begin, end, row, seen in lists:
            scores = lists.scores(begin, end, lists.gathered(lists.key, row), seen)
            maximum = scores.amax(-1, keepdim=True)
            maximum = maximum.masked_fill(maximum == float("-inf"), 0)
            weights = (scores - maximum).exp_()
            total = weights.sum(-1, keepdim=True)
            of_tokens = _product(weights, lists.gathered(lists.value, row)) / total.masked_fill(total == 0, 1)
            lists.put(output, begin, end, of_tokens.to(output.dtype))
            lists.put(rows, begin, end, torch.cat([maximum, total], -1))
        torch.add(rows[..., 0], rows[..., 1].log(), out=lse)
    return output, lse, rows


def run_backward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the operator `topk_attention_backward`."""
    grad_query, wide = empty_as(x.query), wide_dtype(x.query.dtype)
    with torch.autocast(x.query.device.type, enabled=False):
        lists = Lists(x)
        grad_key, grad_value = (torch.zeros_like(y, dtype=wide) for y in (lists.key, lists.value))
        inner = (x.grad_output.to(wide) * x.output).sum(-1, keepdim=True)
        if x.grad_lse is not None:
            inner = inner - x.grad_lse.unsqueeze(-1)
        for begin, end, row, seen in lists:
            key, value = lists.gathered(lists.key, row), lists.gathered(lists.value, row)
            maximum, total = lists.of_tokens(x.rows, begin, end).split(1, -1)
            probs = (lists.scores(begin, end, key, seen) - maximum).exp_() / total.masked_fill(total == 0, 1)
            grad = lists.of_tokens(x.grad_output, begin, end)
            grad_scores = probs * (_product(grad, value.mT) - lists.of_tokens(inner, begin, end)) * x.scale
            for y in (probs, grad_scores):
                y.masked_fill_(~seen, 0)  # NaN of the row, and of gradients, stays where keys are
            lists.put(grad_query, begin, end, _product(grad_scores, key).to(grad_query.dtype))
            query = lists.of_tokens(x.query, begin, end)
            grad_key.index_add_(0, row, _product(grad_scores.mT, query).flatten(0, 1))
            grad_value.index_add_(0, row, _product(probs.mT, grad).flatten(0, 1))
        grads = (
            y.unflatten(0, (*z.shape[:2], -1))[:, :, :-1].to(z.dtype, memory_format=torch.contiguous_format)
            for y, z in ((grad_key, x.key), (grad_value, x.value))
        )
    return grad_query, *grads


def empty_results(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and rows, without values."""
    shape, wide = x.query.shape[:3], wide_dtype(x.query.dtype)
    output = empty_as(x.query[..., :1].expand(-1, -1, -1, x.value.shape[3]))
    return output, x.query.new_empty(shape, dtype=wide), x.query.new_empty((*shape, 2), dtype=wide)


def empty_gradients(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, without values."""
    return empty_as(x.query), x.key.new_empty(x.key.shape), x.value.new_empty(x.value.shape)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of two stacks of matrices, in fp32 or wider."""
    if b.is_cuda and b.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    wide = wide_dtype(b.dtype)
    return torch.bmm(a.to(wide), b.to(wide))


def _run(index, walk, numbers, query, key, value, bias, key_bias, topk_idxs, limits):
    return ops.topk_attention_forward.default(query, key, value, topk_idxs, limits, *numbers)


def _gradients(index, walk, numbers, wanted, forced, *tensors):
    *saved, _, _, topk_idxs, limits = tensors
    if not any(wanted[:3]):
        return None, None, None, None
    return *ops.topk_attention_backward.default(*saved, topk_idxs, limits, *numbers), None


_TopkAttention = attention_function("_TopkAttention", "topk_attention", _run, _gradients, lambda grad: grad)
