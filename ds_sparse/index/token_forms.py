"""Reading lists of token pairs: the forms in which callers give them, and the errors of what is none.

A pair (i, j) says that query token i sees key token j. The forms are a bool mask, a list of pairs, values + offsets
(the key of each pair in row order, and where each row ends: CSR), and a jagged nested tensor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from .masks import check_bool
from .transforms import unwrap_functorch

Nested: TypeAlias = "Tensor | list[Nested]"
"""A tensor; for lists of each head a list of tensors; for lists of each sequence and head a list of such lists."""


TokenPairs: TypeAlias = tuple[Tensor, Tensor, list[int], int, int, int, int]
"""The pairs of all lists, one list after another in (batch, head) order, in the order in which they were given: int64
(N) each, p * queries + i of pair (i, j) of list p, and j; the pairs of each list; the sequences and the heads that have
lists of their own, 1 where all share them; and how many queries and keys there are."""


def pairs_of_mask(mask: Tensor) -> TokenPairs:
    """Raises TypeError, ValueError as `TokenIndex.from_mask`."""
    check_bool(mask)
    if mask.dim() not in (2, 3, 4):
        raise ValueError(
            "A mask has shape (queries, keys), (heads or 1, queries, keys) or (batch or 1, heads or 1, queries, "
            f"keys), got {tuple(mask.shape)}."
        )
    batch, heads, queries, keys = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    mask = mask.reshape(batch * heads, queries, keys)
    p, row, column = mask.nonzero().unbind(1)
    return p * queries + row, column, mask.sum((1, 2)).tolist(), batch, heads, queries, keys


def pairs_of_pairs(pairs: Tensor | Sequence, queries: int, keys: int) -> TokenPairs:
    """Raises TypeError, ValueError as `TokenIndex.from_pairs`."""
    queries, keys = length("queries", queries), length("keys", keys)
    pairs = lists_of("indices", pairs, 2)
    lists, batch, heads = _as_lists("indices", pairs, 2)
    for p, one in enumerate(lists):
        if one.shape[1] != 2:
            raise ValueError(
                f"indices{_in_list(p, lists)} have shape {tuple(one.shape)}; pairs have the shape (pairs, 2)."
            )
    if isinstance(pairs, Tensor) and pairs.dim() > 2:
        real = (torch.stack(lists) != -1).any(2)
        last = real * torch.arange(1, real.shape[1] + 1, device=real.device)
        lists = [one[:end] for one, end in zip(lists, pad(last, (1, 0)).amax(1).tolist(), strict=True)]
    counts = [len(one) for one in lists]
    row, column = torch.cat(lists).long().unbind(1)
    wrong = _first((row < 0) | (row >= queries) | (column < 0) | (column >= keys), counts)
    if wrong is not None:
        p, n = wrong
        pair = i, _ = tuple(lists[p][n].tolist())
        side, tokens = ("key", keys) if 0 <= i < queries else ("query", queries)
        raise ValueError(
            f"indices{_in_list(p, lists)}[{n}] is {pair}; {side} tokens are 0 to {tokens - 1}."
            + (" Rows of -1 fill up what is stacked, (heads, N, 2), and come last." if pair == (-1, -1) else "")
        )
    first_rows = of_lists([p * queries for p in range(len(lists))], counts, row.device)
    return first_rows + row, column, counts, batch, heads, queries, keys


def pairs_of_csr(values: Tensor | Sequence, offsets: Tensor | Sequence, queries: int, keys: int) -> TokenPairs:
    """Raises TypeError, ValueError as `TokenIndex.from_csr`."""
    queries, keys = length("queries", queries), length("keys", keys)
    values, offsets = lists_of("values", values, 1), lists_of("offsets", offsets, 1)
    lists, batch, heads = _as_lists("values", values, 1)
    all_offsets, *of_offsets = _as_lists("offsets", offsets, 1)
    if of_offsets != [batch, heads]:
        raise ValueError(
            f"values are {len(lists)} lists and offsets {len(all_offsets)}; give offsets for each list of values."
        )
    padded = isinstance(values, Tensor) and values.dim() > 1
    # Where rows end is looked at on the CPU: each look would wait for a GPU.
    on_cpu = torch.cat(all_offsets).long().cpu().split([len(x) for x in all_offsets])
    ends, counts = [_row_ends(x, queries, _in_list(p, lists)) for p, x in enumerate(on_cpu)], []
    for p, (one, of_rows) in enumerate(zip(lists, ends, strict=True)):
        last = int(of_rows[-1]) if len(of_rows) else 0
        if last != len(one) and not (padded and last < len(one)):
            where = _in_list(p, lists)
            raise ValueError(
                f"offsets{where} end at {last} and values{where} has {len(one)} pairs; the last row has to end there."
            )
        counts.append(last)
    column = torch.cat([one[:last] for one, last in zip(lists, counts, strict=True)]).long()
    per_row = torch.cat([x.diff(prepend=x.new_zeros(1)) for x in ends]).to(column.device)
    lines = torch.arange(len(lists) * queries, device=column.device)
    row = lines.repeat_interleave(per_row, output_size=len(column))
    wrong = _first((column < 0) | (column >= keys), counts)
    if wrong is not None:
        p, n = wrong
        raise ValueError(
            f"values{_in_list(p, lists)}[{n}], in row {int((ends[p] <= n).sum())}, is {int(lists[p][n])}; key tokens "
            f"are 0 to {keys - 1}."
        )
    return row, column, counts, batch, heads, queries, keys


def tensors_in(x: Tensor | Sequence) -> list[Tensor]:
    """The tensors of nested lists, one after another."""
    return [x] if isinstance(x, Tensor) else [tensor for part in x for tensor in tensors_in(part)]


def lists_of(name: str, x: Tensor | Sequence, dims: int) -> Nested:
    """Lists of pairs, or of keys, as tensors of so many dimensions and more: what is given in Python integers, too.
    Raises TypeError for another form of lists, or no such thing."""
    if isinstance(x, Tensor):
        x = unwrap_functorch(name, x)
        if x.is_nested:
            raise TypeError(f"{name} are a jagged tensor; give TokenIndex.from_jagged of it in place of lists.")
        if x.layout != torch.strided:
            raise TypeError(f"{name} are a tensor of layout {x.layout}; give its col_indices() and crow_indices().")
        if x.dtype == torch.bool:
            raise TypeError(f"{name} are a mask; give TokenIndex.from_mask of it in place of lists.")
        return x
    if not isinstance(x, (list, tuple)) or not x:
        raise TypeError(f"{name} are {x!r}; they have to be a tensor, or a list of one for each head.")
    depth, leaf = 0, x
    while isinstance(leaf, (list, tuple)) and leaf:
        depth, leaf = depth + 1, leaf[0]
    if isinstance(leaf, int) and depth == dims:
        try:
            made = torch.tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} are no lists of integers of equal lengths: {error}.") from error
        return lists_of(name, made, dims)
    return [lists_of(f"{name}[{i}]", part, dims) for i, part in enumerate(x)]


def length(name: str, tokens: int) -> int:
    """A number of tokens as an integer of Python."""
    if isinstance(tokens, bool) or not isinstance(tokens, Integral):
        raise TypeError(f"{name} is {tokens!r}; it has to be an integer, the number of tokens.")
    if not 0 <= tokens < 2**31:
        raise ValueError(f"{name} is {tokens!r}; it has to be 0 or more and below 2**31, the number of tokens.")
    return int(tokens)


def csr_of_jagged(x: Nested) -> tuple[Nested, Nested]:
    """Values and offsets of jagged tensors, as these lie in one another."""
    if isinstance(x, (list, tuple)) and x:
        values, offsets = zip(*map(csr_of_jagged, x))
        return list(values), list(offsets)
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged or x.dim() != 2:
        raise TypeError("Give a nested tensor of layout torch.jagged with 2 dimensions, or a list of such.")
    jagged: Any = x  # of a class that torch keeps to itself
    if jagged.lengths() is not None:
        # Its rows are parts of what lies between the offsets.
        return torch.cat([jagged.values()[:0], *jagged.unbind()]), pad(jagged.lengths().cumsum(0), (1, 0))
    return jagged.values(), jagged.offsets()


def _as_lists(name: str, x: Nested, dims: int) -> tuple[list[Tensor], int, int]:
    """Tensors of so many dimensions, one a list in (batch, head) order; how many sequences and heads have theirs."""
    if isinstance(x, Tensor):
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} are {x.dtype}; they have to be int32 or int64, such as {name}.long().")
        if not dims <= x.dim() <= dims + 2:
            raise ValueError(
                f"{name} have {x.dim()} dimensions; they have to have {dims}, and perhaps before these (heads,) or "
                "(batch, heads)."
            )
        lead = (1, 1, *x.shape[: x.dim() - dims])[-2:]
        return list(x.reshape(math.prod(lead), *x.shape[x.dim() - dims :])), *lead
    parts = [_as_lists(f"{name}[{i}]", part, dims) for i, part in enumerate(x)]
    inner = {(batch, heads) for _, batch, heads in parts}
    depth = {_depth(part, dims) for part in x}
    if len(inner) > 1 or len(depth) > 1 or max(depth) > 1:
        raise ValueError(
            f"{name} are a list of unlike or too deeply nested parts; give one list of tensors for each head."
        )
    lists = [tensor for tensors, _, _ in parts for tensor in tensors]
    heads = len(parts[0][0])
    return (lists, len(x), heads) if max(depth) == 1 else (lists, 1, len(x))


def _depth(x: Tensor | Sequence, dims: int) -> int:
    return x.dim() - dims if isinstance(x, Tensor) else 1 + _depth(x[0], dims)


def _in_list(p: int, lists: list[Tensor]) -> str:
    """How a message names one of several lists."""
    return f" of list {p}" if len(lists) > 1 else ""


def of_lists(numbers: Sequence[int], counts: Sequence[int], device: torch.device) -> Tensor:
    """int64 (N): for each pair its list's number."""
    total = sum(counts)
    number, count = torch.tensor([numbers, counts]).to(device)
    return number.repeat_interleave(count, output_size=total)


def _first(wrong: Tensor, counts: Sequence[int]) -> tuple[int, int] | None:
    """The list of the first entry that is wrong, and its place in there; None where all are right."""
    if not bool(wrong.any()):
        return None
    n = int(wrong.nonzero()[0])
    p = bisect_right(ends := list(accumulate(counts)), n)
    return p, n - ends[p] + counts[p]


def _row_ends(offsets: Tensor, queries: int, where: str) -> Tensor:
    """(T,), the end of each row; offsets: int64."""
    if len(offsets) not in (queries, queries + 1):
        raise ValueError(
            f"offsets{where} has {len(offsets)} entries for {queries} query tokens; it has to have the end of each "
            f"row, {queries}, or a CSR row pointer, {queries + 1}."
        )
    pointer = offsets if len(offsets) == queries + 1 else pad(offsets, (1, 0))
    if int(pointer[0]) != 0:
        raise ValueError(f"offsets{where}[0] is {int(pointer[0])}; a CSR row pointer begins with 0.")
    falling = (pointer.diff() < 0).nonzero()
    if len(falling):
        # The row that ends before it begins.
        row = int(falling[0])
        at = row + len(offsets) - queries
        raise ValueError(
            f"offsets{where}[{at}] is {int(pointer[row + 1])} after {int(pointer[row])}; the ends of rows must not "
            "fall."
        )
    return pointer[1:]
