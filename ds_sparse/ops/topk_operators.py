"""What the operators of `topk_attention` compute: attention of tokens on the keys that their lists name.

Lists are written out for some tokens at a time. Where many heads share keys and list, these keys are gathered, and the
heads are the rows of products; else each pair of a token and a key is one of the lists that kernels of `sparse_attn`
walk. Nothing waits for a device: lists have places for all that could be named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..dispatch import largest_head_dim
from .operands import empty_as, wide_dtype

LEAST_TOGETHER = 64
"""Heads that share keys and list, from which products take less time than walks of pairs, on CPUs and on GPUs."""

MOST_PAIRS = 2**23
"""Pairs that are listed at a time for all heads, unless those of one token, or four for each key, are more."""

MOST_GATHERED = {"cpu": 2**20, "cuda": 2**26}
"""Numbers of gathered keys, values and scores that are held at a time, unless those of one token are more."""


def empty_results(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse, and maximum and sum of each row, without values.

    Args:
        x: what the operator is given, by the names of its schema; so everywhere here.
    """
    shape, wide = x.query.shape[:3], wide_dtype(x.query.dtype)
    output = empty_as(x.query[..., :1].expand(-1, -1, -1, x.value.shape[3]))
    return output, x.query.new_empty(shape, dtype=wide), x.query.new_empty((*shape, 2), dtype=wide)


def empty_gradients(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, without values."""
    return empty_as(x.query), x.key.new_empty(x.key.shape), x.value.new_empty(x.value.shape)


def run_forward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `topk_attention_forward`."""
    results = empty_results(x)
    if x.query.numel():
        with torch.autocast(x.query.device.type, enabled=False):
            _way_of(x).forward(*results)
    return results


def run_backward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs `topk_attention_backward`."""
    if x.query.numel() == 0:
        return empty_as(x.query), torch.zeros_like(x.key), torch.zeros_like(x.value)
    grad_query, dtype = empty_as(x.query), x.query.dtype
    with torch.autocast(x.query.device.type, enabled=False):
        of_key, of_value = _way_of(x).backward(grad_query)
    return grad_query, of_key.to(dtype).contiguous(), of_value.to(dtype).contiguous()


def _way_of(x: Any) -> _Pairs | _Products:
    """How a call is computed."""
    together = x.query.shape[1] // max(x.topk_idxs.shape[1], x.key.shape[1])
    largest = largest_head_dim("sparse_attn", x.query.device)
    is_large = largest is not None and max(x.key.shape[3], x.value.shape[3]) > largest
    return _Products(x) if is_large or together >= LEAST_TOGETHER else _Pairs(x)


def _named_keys(x: Any, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The keys that lists name, of `step` tokens at a time: which tokens these are, the key of each place in their
    lists, (B or 1, G, step, n), ascending, and bool which of them count."""
    for begin in range(0, x.query.shape[2], step):
        tokens = slice(begin, min(begin + step, x.query.shape[2]))
        first, end = x.limits[:, None, tokens].unsqueeze(-1).unbind(-2)
        number = x.topk_idxs[:, :, tokens]
        counts = (number >= 0) & (number < (end - first + x.granularity - 1) // x.granularity)
        number = number.masked_fill(~counts, -1).sort(-1).values
        counts = number >= 0
        counts[..., 1:] &= number[..., 1:] != number[..., :-1]  # what is named twice
        place = torch.arange(x.granularity, dtype=number.dtype, device=number.device)
        key = ((first + number * x.granularity).unsqueeze(-1) + place).flatten(-2)
        yield tokens, key, counts.repeat_interleave(x.granularity, -1) & (key < end)


class _Pairs:
    """Walks of pairs. Letters: L = B * G the lists of a token, each of which H / G heads share."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.batch, heads, _, _ = x.query.shape
        key_heads, keys = x.key.shape[1:3]
        self.lists = self.batch * x.topk_idxs.shape[1]
        repeated = (y.unsqueeze(2).expand(-1, -1, heads // key_heads, -1, -1) for y in (x.key, x.value))
        self.key, self.value = (y.reshape(self.lists, -1, *y.shape[3:]) for y in repeated)
        of_all, of_token = self.batch * heads, x.topk_idxs.shape[3] * x.granularity
        self.step = max(1, max(MOST_PAIRS // of_all, 4 * keys) // of_token)

    def _by_lists(self, y: Tensor) -> Tensor:
        """(B, H, ...) as (L, H / G, ...)."""
        return y.reshape(self.lists, -1, *y.shape[2:])

    def forward(self, output: Tensor, lse: Tensor, rows: Tensor) -> None:
        x = self.x
        for tokens, key, counts in _named_keys(x, self.step):
            by_row = self._by_rows(key, counts)
            query = self._by_lists(x.query[:, :, tokens])
            found = ops.token_attention_forward(query, self.key, self.value, *by_row, self.lists, 1, x.scale)
            for to, y in zip((output, lse, rows), found, strict=True):
                to[:, :, tokens] = y.view(self.batch, -1, *y.shape[2:])

    def backward(self, grad_query: Tensor) -> list[Tensor]:
        """Writes the gradient of query. Returns those of key and value, in fp32 or wider."""
        x, wide = self.x, wide_dtype(self.x.query.dtype)
        sums = [torch.zeros_like(y, dtype=wide) for y in (x.key, x.value)]
        given = x.grad_output, x.grad_lse, x.query, x.output, x.rows
        for tokens, key, counts in _named_keys(x, self.step):
            by_row = self._by_rows(key, counts)
            grad, grad_lse, query, output, rows = (
                None if y is None else self._by_lists(y[:, :, tokens]).contiguous() for y in given
            )
            of_query, *of_keys = ops.token_attention_backward(
                grad,
                grad_lse,
                query,
                self.key,
                self.value,
                output,
                rows,
                *by_row,
                *self._by_keys(*by_row),
                self.lists,
                1,
                x.scale,
            )
            grad_query[:, :, tokens] = of_query.view(self.batch, -1, *of_query.shape[2:])
            for total, y in zip(sums, of_keys, strict=True):
                total += y.view(*total.shape[:2], -1, *y.shape[2:]).sum(2, dtype=wide)
        return sums

    def _by_rows(self, key: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs by tokens, as `TokenIndex` has them. On a GPU, which would be waited for, the list has all places,
        the last of which nobody reads."""
        key, counts = (y.expand(self.batch, -1, -1, -1).flatten(0, 1) for y in (key, counts))
        ends, size = counts.flatten().cumsum(0, dtype=torch.int32), key.numel()
        # Those that do not count are written behind the last.
        to = torch.where(counts.flatten(), ends - 1, size).long()
        columns = torch.zeros(size + 1, dtype=torch.int32, device=key.device).scatter_(0, to, key.int().flatten())
        return pad(ends[key.shape[2] - 1 :: key.shape[2]], (1, 0)), columns[: int(ends[-1]) if key.is_cpu else size]

    def _by_keys(self, row_offsets: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same pairs as `TokenIndex.by_key`; what nobody reads is behind the last key."""
        keys, device = self.x.key.shape[2], columns.device
        tokens = (len(row_offsets) - 1) // self.lists
        begins = torch.zeros(len(columns) + 1, dtype=torch.int32, device=device)
        begins.index_add_(0, row_offsets[1:], torch.ones_like(row_offsets[1:]))
        row = begins[:-1].cumsum(0, dtype=torch.int32)  # all rows, where there is no pair
        line, slots = (row // tokens * keys + columns).sort(stable=True)
        lines = torch.arange(self.lists * keys + 1, dtype=torch.int32, device=device)
        return torch.searchsorted(line, lines, out_int32=True), (row % tokens)[slots], slots.int()


class _Products:
    """Products of gathered keys. Letters: P pairs of a head of keys and a list, which m heads share, c tokens, n places
    in a list; R = B * P * c."""

    def __init__(self, x: Any) -> None:
        self.x = x
        (self.batch, heads, _, depth), (_, key_heads, self.keys, _) = x.query.shape, x.key.shape
        self.pairs = max(x.topk_idxs.shape[1], key_heads)
        self.places = x.topk_idxs.shape[3] * x.granularity
        each = depth + x.value.shape[3] + 2 * (heads // self.pairs)
        self.step = max(1, MOST_GATHERED[x.query.device.type] // (self.batch * self.pairs * self.places * each))
        # Behind the keys of each head is a row of zeros, which stands for what does not count.
        self.key, self.value = (pad(y, (0, 0, 0, 1)).flatten(0, 2) for y in (x.key, x.value))
        head = torch.arange(self.pairs, device=x.key.device) // (self.pairs // key_heads)
        sequence = torch.arange(self.batch, device=x.key.device).unsqueeze(1)
        self.first_line = ((sequence * key_heads + head) * (self.keys + 1))[..., None, None]

    def forward(self, output: Tensor, lse: Tensor, rows: Tensor) -> None:
        for tokens, line, hidden in self._lines():
            scores = self._scores(tokens, self._gathered(self.key, line), hidden)
            maximum = scores.amax(-1, keepdim=True)
            maximum = maximum.masked_fill(maximum == float("-inf"), 0)
            weights = (scores - maximum).exp_()
            total = weights.sum(-1, keepdim=True)
            of_tokens = _product(weights, self._gathered(self.value, line)) / total.masked_fill(total == 0, 1)
            self._put(output, tokens, of_tokens)
            self._put(rows, tokens, torch.cat([maximum, total], -1))
        torch.add(rows[..., 0], rows[..., 1].log(), out=lse)

    def backward(self, grad_query: Tensor) -> list[Tensor]:
        """As of `_Pairs`."""
        x, wide = self.x, wide_dtype(self.x.query.dtype)
        grad_key, grad_value = (torch.zeros_like(y, dtype=wide) for y in (self.key, self.value))
        inner = (x.grad_output.to(wide) * x.output).sum(-1, keepdim=True)
        if x.grad_lse is not None:
            inner = inner - x.grad_lse.unsqueeze(-1)
        for tokens, line, hidden in self._lines():
            key, value = (self._gathered(y, line) for y in (self.key, self.value))
            query, grad, maximum = (self._taken(y, tokens) for y in (x.query, x.grad_output, x.rows[..., :1]))
            total = self._taken(x.rows[..., 1:], tokens)
            probs = (self._scores(tokens, key, hidden) - maximum).exp_() / total.masked_fill(total == 0, 1)
            grad_scores = probs * (_product(grad, value.mT) - self._taken(inner, tokens)) * x.scale
            for y in (probs, grad_scores):
                y.masked_fill_(hidden, 0)  # where a row or its gradient is NaN
            self._put(grad_query, tokens, _product(grad_scores, key))
            grad_key.index_add_(0, line, _product(grad_scores.mT, query).flatten(0, 1))
            grad_value.index_add_(0, line, _product(probs.mT, grad).flatten(0, 1))
        return [y.unflatten(0, (*x.key.shape[:2], -1))[:, :, :-1] for y in (grad_key, grad_value)]

    def _lines(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Which tokens, the lines of keys that they see, (R * n), and which of these do not count, bool (R, 1, n)."""
        for tokens, key, counts in _named_keys(self.x, self.step):
            line = self.first_line + torch.where(counts, key, self.keys)
            hidden = ~counts.expand(self.batch, self.pairs, -1, -1)
            yield tokens, line.flatten(), hidden.flatten(0, 2).unsqueeze(1)

    def _scores(self, tokens: slice, key: Tensor, hidden: Tensor) -> Tensor:
        """(R, m, n), -inf where a key does not count."""
        scores = _product(self._taken(self.x.query, tokens), key.mT) * self.x.scale
        return scores.masked_fill_(hidden, float("-inf"))

    def _gathered(self, y: Tensor, line: Tensor) -> Tensor:
        """(R, n, D)."""
        return y.index_select(0, line).unflatten(0, (-1, self.places))

    def _taken(self, y: Tensor, tokens: slice) -> Tensor:
        """y (B, H, T, D) of these tokens, (R, m, D)."""
        return y[:, :, tokens].unflatten(1, (self.pairs, -1)).transpose(2, 3).flatten(0, 2)

    def _put(self, y: Tensor, tokens: slice, taken: Tensor) -> None:
        """Writes what `_taken` would take."""
        taken = taken.unflatten(0, (self.batch, self.pairs, -1)).transpose(2, 3)
        y[:, :, tokens] = taken.flatten(1, 2)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of two stacks of matrices, in fp32 or wider."""
    if b.is_cuda and b.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    wide = wide_dtype(b.dtype)
    return torch.bmm(a.to(wide), b.to(wide))
