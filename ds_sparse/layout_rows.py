"""A layout whose block rows are made when they are asked for, so that it never exists whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .layout import as_bool_layout

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
