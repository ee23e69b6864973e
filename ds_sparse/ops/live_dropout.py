"""Dropout of probabilities on live blocks, drawn as kernels draw it (`reference.dropout_keep`)."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 32768
"""Steps of a probability: a random number has 15 bits."""

_LOW = 0xFFFFFFFF
_FACTORS, _KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def threshold_of(dropout_p: float) -> int:
    """The least number that is kept."""
    return min(int(dropout_p * STEPS + 0.5), STEPS - 1)


def kept_on_blocks(
    seed: Tensor, dropout_p: float, matrices: Tensor, rows: Tensor, columns: Tensor, block: int
) -> Tensor:
    """Draws which probabilities of live blocks are kept.

    Eight elements of a 16 x 16 square share a draw, at distances of 8 rows, of 1 column and of 8 columns: a draw is
    made once, or twice where a block is half a square.

    Args:
        seed: int64 (2,), seed and offset.
        matrices: int64 (...), the number of each batch and head.
        rows, columns: int64 (n,), block row and block column of each block.
        block: tokens on a block's side.

    Returns:
        bool (..., n, block, block).
    """
    device, side = seed.device, max(block // 16, 1)
    own = torch.arange(min(block, 16) // 8, device=device)  # 8 rows of a square, and 8 columns: which of the two halves
    square = torch.arange(side, device=device)

    def squares(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """(n, side), and the halves of each that belong to the block: (n, 1 or 2)."""
        return (blocks * block // 16)[:, None] + square, (blocks * block % 16 // 8)[:, None] + own

    (row_square, row_half), (column_square, column_half) = squares(rows), squares(columns)
    eight, four = torch.arange(8, device=device), torch.arange(4, device=device)
    words = _draws(
        seed,
        (column_square * 4)[:, None, None, :, None] + four,
        (row_square * 8)[:, :, None, None, None] + eight[:, None, None],
        matrices[..., None, None, None, None, None],
    )  # each (..., n, side, 8, side, 4)
    of_element = []
    for word in words:
        of_element += [word & 0x7FFF, (word >> 16) & 0x7FFF]
    numbers = torch.stack(of_element, -1)
    # Element: column % 2 + 2 * half of rows + 4 * half of columns.
    numbers = numbers.unflatten(-1, (2, 2, 2))  # ..., half of columns, half of rows, column % 2
    numbers = _halves(numbers, -2, row_half, matrices.dim())
    numbers = _halves(numbers, -3, column_half, matrices.dim())
    # (..., n, side, 8, side, 4, column halves, row halves, 2) -> rows, then columns.
    first = matrices.dim() + 1
    order = (*range(first), first, first + 5, first + 1, first + 2, first + 4, first + 3, first + 6)
    return numbers.permute(order).reshape(*matrices.shape, len(rows), block, block) >= threshold_of(dropout_p)


def _halves(numbers: Tensor, dim: int, halves: Tensor, before: int) -> Tensor:
    """The halves of squares along a dimension that each block has."""
    if halves.shape[1] == 2:
        return numbers
    shape = [1] * numbers.dim()
    shape[before] = len(halves)
    index = halves.view(shape)
    sizes = list(numbers.shape)
    sizes[dim] = 1
    return numbers.gather(dim, index.expand(sizes))


def _draws(seed: Tensor, *counter: Tensor) -> list[Tensor]:
    """The four words of 32 bits of Philox4x32 with 7 rounds, in int64."""
    a, b, c, d = (*counter, seed[1] & _LOW)
    keys = [seed[0] & _LOW, (seed[0] >> 32) & _LOW]
    for _ in range(7):
        # Products wrap around int64, which leaves the 64 bits of the unsigned product.
        first, second = _FACTORS[0] * a, _FACTORS[1] * c
        a, b = (second >> 32) & _LOW ^ b ^ keys[0], second & _LOW
        c, d = (first >> 32) & _LOW ^ d ^ keys[1], first & _LOW
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return list(torch.broadcast_tensors(a, b, c, d))
