"""The gradient of `distance_bias`: scores and probabilities of live blocks are computed once more, some rows at a time,
and the gradients of the scores added up along the blocks' diagonals.

Block row r and block column c meet on the diagonal c - r + R - 1, of R block rows; diagonals overlap by half. Within
blocks queries are in the opposite order, so that a distance lies on an antidiagonal: the sum of two places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import ops
from ..dispatch import Call, choose
from ..index import BlockIndex
from ..index.master_layout import MasterLayout
from .live_dropout import STEPS, kept_on_blocks, threshold_of
from .matmul import allow_tf32
from .operands import as_added, raised, wide_dtype

SCORES_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 24}
"""Scores that are held at a time: some tens of MB, on a GPU some hundreds. Not fewer than those of one block row."""


class _Part(NamedTuple):
    """Some neighbouring block rows of some heads."""

    heads: slice
    first_row: int
    lengths: list[int]  # live blocks of each row
    offsets: Tensor  # int32 (rows + 1), from 0
    columns: Tensor  # int32 (n)


class _Operands(NamedTuple):
    """Operands of some sequences: those of products in fp32 or wider, key and value with as many heads
    as query, tokens in whole blocks."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    maximum: Tensor  # (B, H, T), of each row's scores
    share: Tensor  # (B, H, T), one over the sum of exponentials; 0 of a row with nothing left
    drop: Tensor  # (B, H, T), what is subtracted from the gradients of a row's probabilities
    attn_mask: Tensor | None
    key_bias: Tensor | None  # (B or 1, S)


def distance_bias_backward(index: BlockIndex | MasterLayout, *call) -> Tensor:
    """The gradient of rpe by distance, of what `attention_bias_backward` takes."""
    if isinstance(index, MasterLayout):
        return ops.layout_attention_distance_backward(*call, index.text)
    lengths = index.row_lengths  # asked first, as they say what to do where they cannot be had
    return ops.block_attention_distance_backward(
        *call, index.row_offsets, index.row_columns, lengths, index.layout_heads, index.block
    )


def distance_bias_gradient(x: Any) -> Tensor:
    """The gradient of distances (H or 1, 2M - 1), alike, summed in fp32 or wider, in the order of batch and live
    blocks.

    Args:
        x: what the operator is given, by the names of its schema; so everywhere here. Operands are as
            `block_attention_backward` takes them, live blocks by rows, as `BlockIndex` has them.
    """
    (batch, heads, tokens, _), keys = x.query.shape, x.key.shape[2]
    distances, block, wide = x.distances, x.block, wide_dtype(x.query.dtype)
    rows_of_blocks, columns = -(-tokens // block), -(-keys // block)
    # Distances from that of the last query and the first key to that of the first query and the last key.
    around = rows_of_blocks * block - 1 - distances.shape[1] // 2, columns * block - 1 - distances.shape[1] // 2
    biases = pad(as_added(distances, wide), around)
    if x.causal:
        ahead = torch.arange(biases.shape[1], device=biases.device) >= rows_of_blocks * block
        biases = biases.masked_fill(ahead, float("-inf"))
    windows = biases.unfold(-1, 2 * block - 1, block)  # of each diagonal
    total = x.query.new_zeros(rows_of_blocks + columns - 1, len(distances), 2 * block - 1, dtype=wide)
    per_sequence = sum(x.row_lengths) * heads // x.layout_heads * block**2
    room = SCORES_AT_ONCE["cuda" if x.query.is_cuda else "cpu"]
    together = min(max(1, room // max(1, per_sequence)), batch)
    for start in range(0, batch, together):
        part = slice(start, min(start + together, batch))
        given = _operands(x, part)
        for piece in _parts(x, room // (part.stop - part.start)):
            _add_part(total, piece, given, windows, x, start * heads + piece.heads.start)
    side = total.transpose(0, 1)
    grad = pad(side[..., :block].flatten(1), (0, block))
    grad[:, block:] += pad(side[..., block:], (0, 1)).flatten(1)
    first, last = around
    return pad(grad[:, : (rows_of_blocks + columns) * block - 1], (-first, -last)).contiguous()


def _operands(x: Any, part: slice) -> _Operands:
    """Fills tokens of some sequences up to whole blocks, where what has no query has no share, and what has no key is
    masked; and turns the queries of each block around."""
    query, key, value, grad_output, output, rows = (
        y[part] for y in (x.query, x.key, x.value, x.grad_output, x.output, x.rows)
    )
    key_bias, attn_mask = (y if y is None or len(y) == 1 else y[part] for y in (x.key_bias, x.attn_mask))
    block, missing_queries, missing_keys = x.block, -query.shape[2] % x.block, -key.shape[2] % x.block

    def turned(y: Tensor) -> Tensor:
        y = pad(y, (*(0, 0) * (y.dim() - 3), 0, missing_queries))
        return y.unflatten(2, (-1, block)).flip(3).flatten(2, 3)

    wide, shared_by = rows.dtype, query.shape[1] // key.shape[1]
    drop = (grad_output.to(wide) * output).sum(-1)
    drop = drop if x.grad_lse is None else drop - x.grad_lse[part]
    maximum, total = rows.unbind(-1)
    share = total.reciprocal().masked_fill(total == 0, 0)
    if missing_keys and key_bias is None:
        key_bias = rows.new_zeros(1, key.shape[2])
    if key_bias is not None:
        masked = False if key_bias.dtype == torch.bool else float("-inf")
        key_bias = pad(key_bias, (0, missing_keys), value=masked)
    if attn_mask is not None:
        attn_mask = pad(attn_mask, (0, missing_keys))
        attn_mask = turned(attn_mask) if attn_mask.shape[2] > 1 else attn_mask
    query, grad_output = (turned(y.to(wide)) for y in (query, grad_output))
    key, value = (pad(y.to(wide), (0, 0, 0, missing_keys)).repeat_interleave(shared_by, 1) for y in (key, value))
    maximum, share, drop = (turned(y) for y in (maximum, share, drop))
    return _Operands(query, key, value, grad_output, maximum, share, drop, attn_mask, key_bias)


def _parts(x: Any, room: int) -> Iterator[_Part]:
    """The live blocks in parts of so many scores: all heads together where they share a layout, else one by one."""
    rows = len(x.row_lengths) // x.layout_heads
    own = x.query.shape[1] // x.layout_heads
    room //= own * x.block**2
    entry = 0
    for head in range(x.layout_heads):
        lengths = x.row_lengths[head * rows : (head + 1) * rows]
        first = 0
        while first < rows:
            last, count = first + 1, lengths[first]
            while last < rows and count + lengths[last] <= room:
                count, last = count + lengths[last], last + 1
            if count:
                offsets = x.row_offsets[head * rows + first : head * rows + last + 1]
                columns = x.row_columns[entry : entry + count]
                heads_of_part = slice(head * own, (head + 1) * own)
                yield _Part(heads_of_part, first, lengths[first:last], offsets - offsets[0], columns)
            entry, first = entry + count, last


def _add_part(total: Tensor, part: _Part, given: _Operands, windows: Tensor, x: Any, first_matrix: int) -> None:
    """Adds what the blocks of a part give to the diagonals.

    Args:
        total: (R + C - 1, H or 1, 2 * block - 1).
        windows: (H or 1, R + C - 1, 2 * block - 1), the distances of each diagonal.
        first_matrix: the number of the part's first head, by which dropout draws.
    """
    heads, number, block = part.heads, len(part.lengths), x.block
    columns = part.columns.long()
    lengths = part.offsets.diff()
    row = torch.arange(number, device=columns.device).repeat_interleave(lengths, output_size=len(columns))
    diagonal = columns - row - part.first_row + given.query.shape[2] // block - 1
    tokens = slice(part.first_row * block, (part.first_row + number) * block)

    def of_rows(y: Tensor) -> Tensor:
        """A number a query for each of the blocks: (B, h, n, block, 1)."""
        return y[:, heads, tokens].unflatten(2, (number, block))[:, :, row].unsqueeze(-1)

    own = windows if len(windows) == 1 else windows[heads]
    added = own[:, diagonal].unfold(-1, block, 1)  # (h or 1, n, block, block)
    dead = (added == float("-inf")) | (of_rows(given.share) == 0)
    for mask in _masks(given, heads, tokens, row, columns, block):
        if mask.dtype == torch.bool:
            dead = dead | ~mask
        else:
            dead = dead | (mask == float("-inf"))
            added = raised(added + as_added(mask, added.dtype))
    scores = _product(given.query[:, heads, tokens], given.key[:, heads], part, block).mul_(x.scale).add_(added)
    probs = scores.sub_(of_rows(given.maximum)).exp_().mul_(of_rows(given.share))
    grad = _product(given.grad_output[:, heads, tokens], given.value[:, heads], part, block)
    if x.dropout_seed is not None:
        sequences, of_heads = (torch.arange(n, device=row.device) for n in grad.shape[:2])
        matrices = first_matrix + sequences[:, None] * x.query.shape[1] + of_heads
        kept = kept_on_blocks(x.dropout_seed, x.dropout_p, matrices, row + part.first_row, columns, block)
        grad.masked_fill_(~kept.flip(-2), 0).mul_(STEPS / (STEPS - threshold_of(x.dropout_p)))
    # What is masked may be NaN.
    grad = grad.sub_(of_rows(given.drop)).mul_(probs).masked_fill_(dead, 0).sum(0)
    if len(windows) == 1:
        grad = grad.sum(0, keepdim=True)
    # Each row of a block moved on by its number: antidiagonals become columns.
    grad = pad(grad, (0, block)).flatten(-2)[..., : block * (2 * block - 1)].unflatten(-1, (block, -1)).sum(-2)
    target = total if len(windows) == 1 else total[:, heads]
    _add_in_order(target, diagonal, grad.transpose(0, 1))


def _product(a: Tensor, b: Tensor, part: _Part, block: int) -> Tensor:
    """a @ b^T on the blocks of a part, (B, h, n, block, block)."""
    call = Call(a.device, a.dtype, a.shape[-1], block, (a, b))
    chosen = choose("gradient of distance_bias", call)
    values = ops.matmul_sdd(
        a, b.mT, part.offsets, part.columns, None, None, None, None, 1, block, allow_tf32(), chosen.name
    )
    return values.unflatten(1, (a.shape[1], -1))


def _masks(given: _Operands, heads: slice, tokens: slice, row: Tensor, columns: Tensor, block: int) -> Iterator[Tensor]:
    """Masks and biases besides distances, on the blocks of a part: the result broadcasts to (B, h, n, block, block)."""
    if given.key_bias is not None:
        yield given.key_bias.unflatten(-1, (-1, block))[:, columns][:, None, :, None]
    mask = given.attn_mask
    if mask is not None:
        mask = mask if mask.shape[1] == 1 else mask[:, heads]
        mask = mask.unflatten(-1, (-1, block))
        if mask.shape[2] == 1:
            yield mask[:, :, 0, columns].unsqueeze(-2)
        else:
            yield mask[:, :, tokens].unflatten(2, (-1, block)).transpose(3, 4)[:, :, row, columns]


def _add_in_order(total: Tensor, places: Tensor, x: Tensor) -> None:
    """total[places[i]] += x[i], in an order that is the same each time."""
    if total.is_cuda:
        total.index_put_((places,), x, accumulate=True)  # sorts the places; index_add_ adds as it comes
    else:
        total.index_add_(0, places, x)
