"""A layout whose block rows are made when they are asked for, so that it never exists whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from .layout import as_bool_layout

ROWS_AT_ONCE = 128
"""Block rows that exist at a time. So few that uint8 holds their sums."""

RowMaker = Callable[[range], Tensor]
"""From a range of block rows of one head to bool (rows, columns)."""


@dataclass(frozen=True)
class LayoutRows:
    """A layout (heads, rows, columns) in blocks.

    Attributes:
        heads: 1 when all heads are equal.
        maker: from a head to what makes its rows; what is random in a head is drawn by this call.
    """

    heads: int
    rows: int
    columns: int
    maker: Callable[[int], RowMaker]

    @classmethod
    def of(cls, layout: Tensor) -> LayoutRows:
        """The rows of a layout (H, R, C) or (R, C) that exists, bool or 0/1 integers.

        Raises:
            TypeError, ValueError: as `as_bool_layout`.
        """
        live = as_bool_layout(layout).cpu()
        heads, rows, columns = live.shape
        return cls(heads, rows, columns, lambda h: lambda rows: live[h, rows.start : rows.stop])

    def pieces(self, h: int) -> Iterator[tuple[range, Tensor]]:
        """All rows of a head, bool, no more than ROWS_AT_ONCE at a time, and which they are."""
        make = self.maker(h)
        for start in range(0, self.rows, ROWS_AT_ONCE):
            piece = range(start, min(start + ROWS_AT_ONCE, self.rows))
            yield piece, make(piece)

    def density(self) -> float:
        """Share of live blocks, 0 to 1, over all heads."""
        live = sum(int(part.count_nonzero()) for h in range(self.heads) for _, part in self.pieces(h))
        return live / (self.heads * self.rows * self.columns)
