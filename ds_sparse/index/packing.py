"""Packing: how two numbers stand in the 32 bits of one, in the entries of tiles and in the units of strips.

The kernels unpack them by the same rules (csrc/packing.h); csrc/library.cpp describes the lists.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Number = TypeVar("Number", int, Tensor)

BLOCK_BITS = 24
"""Low bits of an entry, which number a block on the other side."""

MAX_BLOCKS = 1 << BLOCK_BITS
"""Blocks on a side of the layout, as an entry has no more numbers for them."""

MAX_LINES = 32 - BLOCK_BITS
"""Lines of a tile, as an entry has so many owner bits. The last is the sign: entries are to be read as uint32."""

SIZE_BITS = 5
"""Low bits of a strip's rows, which have the log2 of their number."""


def block_of(entries: Number) -> Number:
    """The numbers of the entries' blocks."""
    return entries & (MAX_BLOCKS - 1)


def owner_bit(entries: Tensor, line: int | Tensor) -> Tensor:
    """1 where the line of the tile, numbered from 0, is live at the entry's block, else 0."""
    return entries >> (BLOCK_BITS + line) & 1


def place_of(tile: Tensor, block: Tensor) -> Tensor:
    """A number for a block of a tile, int64 as both are, ascending by tile and then by block."""
    return tile << BLOCK_BITS | block


def pack_rows(first: Tensor, log_count: Tensor) -> Tensor:
    """A strip's first token row within its block row, and the log2 of its number of token rows, in one number."""
    return (first << SIZE_BITS) + log_count
