"""The gradient of `distance_bias`: scores and probabilities of live blocks are computed once more, some rows at a time,
and the gradients of the scores added up along the blocks' diagonals.

Block row r and block column c meet on the diagonal c - r + R - 1, of R block rows; diagonals overlap by half. Within
blocks queries are in the opposite order, so that a distance lies on an antidiagonal: the sum of two places.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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


class Blocks(NamedTuple):
    """The live blocks of a layout, by rows, as `BlockIndex` has them."""

    row_offsets: Tensor
    row_columns: Tensor
    row_lengths: list[int]
    layout_heads: int
    block: int


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


def distance_bias_gradient(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    rows: Tensor,
    distances: Tensor,
    key_bias: Tensor | None,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    blocks: Blocks,
) -> Tensor:
    """The gradient of distances (H or 1, 2M - 1), alike, summed in fp32 or wider, in the order of batch and live
    blocks. Operands as `block_attention_backward` takes them."""
    batch, heads, tokens, keys = *query.shape[:3], key.shape[2]
    block, wide = blocks.block, wide_dtype(query.dtype)
    rows_of_blocks, columns = -(-tokens // block), -(-keys // block)
    # Distances from that of the last query and the first key to that of the first query and the last key.
    around = rows_of_blocks * block - 1 - distances.shape[1] // 2, columns * block - 1 - distances.shape[1] // 2
    biases = pad(as_added(distances, wide), around)
    if causal:
        ahead = torch.arange(biases.shape[1], device=biases.device) >= rows_of_blocks * block
        biases = biases.masked_fill(ahead, float("-inf"))
    windows = biases.unfold(-1, 2 * block - 1, block)  # of each diagonal
    total = query.new_zeros(rows_of_blocks + columns - 1, len(distances), 2 * block - 1, dtype=wide)
    per_sequence = sum(blocks.row_lengths) * heads // blocks.layout_heads * block**2
    room = SCORES_AT_ONCE["cuda" if query.is_cuda else "cpu"]
    together = min(max(1, room // max(1, per_sequence)), batch)
    for start in range(0, batch, together):
        part = slice(start, min(start + together, batch))
        given = _operands(
            grad_output[part], None if grad_lse is None else grad_lse[part], query[part], key[part], value[part],
            output[part], rows[part], _of_sequences(key_bias, part), _of_sequences(attn_mask, part), block,
        )  # fmt: skip
        for piece in _parts(blocks, heads, room // (part.stop - part.start)):
            first_matrix = start * heads + piece.heads.start
            dropped = None if dropout_seed is None else (dropout_seed, dropout_p, first_matrix, heads)
            _add_part(total, piece, given, windows, scale, block, dropped)
    side = total.transpose(0, 1)
    grad = pad(side[..., :block].flatten(1), (0, block))
    grad[:, block:] += pad(side[..., block:], (0, 1)).flatten(1)
    first, last = around
    return pad(grad[:, : (rows_of_blocks + columns) * block - 1], (-first, -last)).contiguous()


def _of_sequences(mask: Tensor | None, part: slice) -> Tensor | None:
    return mask if mask is None or len(mask) == 1 else mask[part]


def _operands(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    rows: Tensor,
    key_bias: Tensor | None,
    attn_mask: Tensor | None,
    block: int,
) -> _Operands:
    """Fills tokens up to whole blocks, where what has no query has no share, and what has no key is masked; and turns
    the queries of each block around."""
    missing_queries, missing_keys = -query.shape[2] % block, -key.shape[2] % block

    def turned(x: Tensor) -> Tensor:
        x = pad(x, (*(0, 0) * (x.dim() - 3), 0, missing_queries))
        return x.unflatten(2, (-1, block)).flip(3).flatten(2, 3)

    wide, shared_by = rows.dtype, query.shape[1] // key.shape[1]
    drop = (grad_output.to(wide) * output).sum(-1)
    drop = drop if grad_lse is None else drop - grad_lse
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
    query, grad_output = (turned(x.to(wide)) for x in (query, grad_output))
    key, value = (pad(x.to(wide), (0, 0, 0, missing_keys)).repeat_interleave(shared_by, 1) for x in (key, value))
    maximum, share, drop = (turned(x) for x in (maximum, share, drop))
    return _Operands(query, key, value, grad_output, maximum, share, drop, attn_mask, key_bias)


def _parts(blocks: Blocks, heads: int, room: int) -> Iterator[_Part]:
    """The live blocks in parts of so many scores: all heads together where they share a layout, else one by one."""
    rows = len(blocks.row_lengths) // blocks.layout_heads
    own = heads // blocks.layout_heads
    room //= own * blocks.block**2
    entry = 0
    for head in range(blocks.layout_heads):
        lengths = blocks.row_lengths[head * rows : (head + 1) * rows]
        first = 0
        while first < rows:
            last, count = first + 1, lengths[first]
            while last < rows and count + lengths[last] <= room:
                count, last = count + lengths[last], last + 1
            if count:
                offsets = blocks.row_offsets[head * rows + first : head * rows + last + 1]
                columns = blocks.row_columns[entry : entry + count]
                heads_of_part = slice(head * own, (head + 1) * own)
                yield _Part(heads_of_part, first, lengths[first:last], offsets - offsets[0], columns)
            entry, first = entry + count, last


def _add_part(
    total: Tensor,
    part: _Part,
    given: _Operands,
    windows: Tensor,
    scale: float,
    block: int,
    dropped: tuple[Tensor, float, int, int] | None,
) -> None:
    """Adds what the blocks of a part give to the diagonals.

    Args:
        total: (R + C - 1, H or 1, 2 * block - 1).
        windows: (H or 1, R + C - 1, 2 * block - 1), the distances of each diagonal.
        dropped: seed, probability, the first matrix's number, and heads, where dropout drops.
    """
    heads, number = part.heads, len(part.lengths)
    columns = part.columns.long()
    lengths = part.offsets.diff()
    row = torch.arange(number, device=columns.device).repeat_interleave(lengths, output_size=len(columns))
    diagonal = columns - row - part.first_row + given.query.shape[2] // block - 1
    tokens = slice(part.first_row * block, (part.first_row + number) * block)

    def of_rows(x: Tensor) -> Tensor:
        """A number a query for each of the blocks: (B, h, n, block, 1)."""
        return x[:, heads, tokens].unflatten(2, (number, block))[:, :, row].unsqueeze(-1)

    own = windows if len(windows) == 1 else windows[heads]
    added = own[:, diagonal].unfold(-1, block, 1)  # (h or 1, n, block, block)
    dead = (added == float("-inf")) | (of_rows(given.share) == 0)
    for mask in _masks(given, heads, tokens, row, columns, block):
        if mask.dtype == torch.bool:
            dead = dead | ~mask
        else:
            dead = dead | (mask == float("-inf"))
            added = raised(added + as_added(mask, added.dtype))
    scores = _product(given.query[:, heads, tokens], given.key[:, heads], part, block).mul_(scale).add_(added)
    probs = scores.sub_(of_rows(given.maximum)).exp_().mul_(of_rows(given.share))
    grad = _product(given.grad_output[:, heads, tokens], given.value[:, heads], part, block)
    if dropped is not None:
        seed, dropout_p, first, all_heads = dropped
        sequences, of_heads = (torch.arange(n, device=row.device) for n in grad.shape[:2])
        matrices = first + sequences[:, None] * all_heads + of_heads
        kept = kept_on_blocks(seed, dropout_p, matrices, row + part.first_row, columns, block)
        grad.masked_fill_(~kept.flip(-2), 0).mul_(STEPS / (STEPS - threshold_of(dropout_p)))
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
