"""A head of a layout as what changes from one block row to the next: small, however long the rows are.

A window that moves by a block is four numbers a row, rows that are equal are none, and a global column costs nothing
after the first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Changes:
    """A head of R block rows and C block columns. Row r is the row before, of nothing for the first, with the blocks
    flipped that lie from the first to the second of r's places, from the third to the fourth, and so on.

    Attributes:
        counts: int32 (R). How many places a row has: an even number.
        places: int32 (N), ascending in a row, from 0 to C.
        live: live blocks.
    """

    counts: np.ndarray
    places: np.ndarray
    live: int

    @classmethod
    def of(cls, pieces: Iterator[tuple[range, Tensor]]) -> Changes:
        """Changes of a head's rows, bool, piece by piece, as `LayoutRows.pieces` gives them."""
        counts, places, live, above = [], [], 0, None
        for _, part in pieces:
            live += int(part.count_nonzero())
            bits = _with_end(part)
            before = np.concatenate([np.zeros_like(bits[:1]) if above is None else above, bits[:-1]])
            count, place = _borders(bits ^ before)
            counts.append(count)
            places.append(place)
            above = bits[-1:]
        return cls(np.concatenate(counts), np.concatenate(places), live)

    def packed(self) -> bytes:
        """Little-endian int32: the counts, then the places, of each row the first less the row's number, the others
        less the one before; so that what repeats from row to row are the same bytes."""
        firsts = np.cumsum(self.counts) - self.counts
        steps = np.diff(self.places, prepend=np.int32(0))
        rows = self.counts.nonzero()[0]
        steps[firsts[rows]] = self.places[firsts[rows]] - rows
        return np.concatenate([self.counts, steps]).astype("<i4").tobytes()


def _with_end(live: Tensor) -> np.ndarray:
    """The rows as bits, the first block the highest of a byte, with a dead block at the end."""
    bits = np.packbits(live.numpy(), axis=1)
    return bits if live.shape[1] % 8 else np.pad(bits, ((0, 0), (0, 1)))


def _borders(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds where runs begin and end: how many such places a row has, and the places, row by row."""
    left = np.pad(bits[:, :-1], ((0, 0), (1, 0)))
    borders = bits ^ (bits >> 1 | left << 7)
    row, byte = borders.nonzero()
    found, bit = np.unpackbits(borders[row, byte][:, None], axis=1).nonzero()
    counts = np.bincount(row[found], minlength=len(bits))
    return counts.astype(np.int32), (byte[found] * 8 + bit).astype(np.int32)
