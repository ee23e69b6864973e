"""Strips: the token rows of a layout as softmax takes them on a GPU, in even pieces of work that lie together in
memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .packing import pack_rows

SIZES = (5120, 10240, 20480)
"""Elements that a strip may have: 40 for each thread of its thread block."""

PARTS = 5
"""A strip has at most such a part of its elements from one block: eight for each thread."""

CACHE_LINE = 64
"""Elements of 16 bits."""


@dataclass(frozen=True, eq=False)
class Strips:
    """The live blocks of a layout by neighbouring token rows of one block row, a strip. A strip has a power of two of
    them, as many as give it `most` elements or fewer, a fifth of that of each block, and one at least. So what it has
    of a block is adjacent in memory, and, but for single rows, no more than eight elements for each thread.

    Attributes:
        most: one of `SIZES`, the smallest in which rows of mean length, and of an eighth more, fill cache lines.
        units: int32 (U, 4). A strip's block row, counted through the stored layout heads; the first entry of that and
            how many it has, as `Lists.row_offsets` says; and its first token row within the block row with the log2 of
            its number of token rows, as `packing.pack_rows` has them. In the order of memory, but for strips of more
            than `most` elements, single rows, which come first, the longest at the beginning.
    """

    most: int
    units: torch.Tensor

    @classmethod
    def make(cls, row_offsets: torch.Tensor, live_blocks: int, block: int) -> Strips:
        """The strips of block rows that own, as `row_offsets` says, so many live blocks in all. Synchronises once."""
        mean = -(-live_blocks * block // (len(row_offsets) - 1))
        wanted = max(1, CACHE_LINE // block) * mean
        most = next((size for size in SIZES if 8 * wanted <= 7 * size), SIZES[-1])
        device, count = row_offsets.device, row_offsets.diff().long()
        rows = most // (count.clamp(min=1) * block)
        rows.clamp_(1, max(1, min(block, most // PARTS // block)))
        log_rows = torch.bucketize(rows, 2 << torch.arange(block.bit_length(), device=device), right=True)
        strips = (block >> log_rows).where(count > 0, 0)
        number = int(strips.sum())
        line = torch.arange(len(count), device=device).repeat_interleave(strips, output_size=number)
        number_in_line = torch.arange(number, device=device) - (strips.cumsum(0) - strips)[line]
        log_rows = log_rows[line]
        units = torch.stack([line, row_offsets[line], count[line], pack_rows(number_in_line << log_rows, log_rows)], 1)
        beyond = (count * block - most).clamp_(min=0)[line]
        return cls(most, units[beyond.argsort(descending=True, stable=True)].int())
