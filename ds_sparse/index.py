"""Layout -> BlockIndex: the sorted lists of live blocks that every operation walks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .layout import as_bool_layout, share_equal_heads


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """The live blocks of a layout by rows and by columns. Built once, immutable, shared by every operation.

    Letters: L stored layout heads (1 when all heads are equal, else `num_heads`), R/C block rows and columns,
    N live blocks of the L stored heads together.

    Attributes:
        block: tokens on a block's side.
        num_heads: heads of the layout as given; 1 means that any number of heads share it.
        layout_heads: L.
        rows, columns: R and C.
        row_offsets: int32 (L*R + 1). Block row i of layout head l owns the entries from row_offsets[l*R+i] to
            row_offsets[l*R+i+1].
        row_columns: int32 (N). The block column of each entry, ascending within a row.
        column_offsets: int32 (L*C + 1). The same by columns.
        column_rows: int32 (N). The block row of each entry in column order, ascending within a column.
        column_slots: int32 (N). The entry's number in row order, which is where sparse values store it.
    """

    block: int
    num_heads: int
    layout_heads: int
    rows: int
    columns: int
    row_offsets: torch.Tensor
    row_columns: torch.Tensor
    column_offsets: torch.Tensor
    column_rows: torch.Tensor
    column_slots: torch.Tensor

    @classmethod
    def build(cls, layout: torch.Tensor, block: int) -> BlockIndex:
        """Builds the lists on the layout's device; synchronises with it once.

        Args:
            layout: bool or integer 0/1, (R, C) or (H or 1, R, C).
            block: a power of two, 8 or more.

        Raises:
            TypeError, ValueError: a layout of another type, dtype, shape or value; another block.
        """
        check_block(block)
        layout = as_bool_layout(layout)
        num_heads, rows, columns = layout.shape
        layout = share_equal_heads(layout)
        layout_heads = layout.shape[0]
        head, row, column = layout.nonzero(as_tuple=True)
        if head.numel() >= 2**31:
            raise ValueError(
                f"The layout has {head.numel()} live blocks; the index holds fewer than 2**31. Use a larger block."
            )
        by_column = torch.argsort((head * columns + column) * rows + row)
        return cls(
            block=block,
            num_heads=num_heads,
            layout_heads=layout_heads,
            rows=rows,
            columns=columns,
            row_offsets=_offsets(layout.sum(2)),
            row_columns=column.int(),
            column_offsets=_offsets(layout.sum(1)),
            column_rows=row[by_column].int(),
            column_slots=by_column.int(),
        )

    def to(self, device: torch.device | str) -> BlockIndex:
        """The same index on another device; itself if it is there already."""
        device = torch.device(device)
        if self.row_offsets.device == device:
            return self
        names = ("row_offsets", "row_columns", "column_offsets", "column_rows", "column_slots")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def device(self) -> torch.device:
        return self.row_offsets.device

    def num_values(self, heads: int) -> int:
        """V, the live blocks of `heads` heads: the size of dimension 1 of sparse values."""
        return self.row_columns.numel() * heads // self.layout_heads

    def heads_of(self, num_values: int) -> int | None:
        """The number of heads whose sparse values have `num_values` blocks; None where there is none.

        A layout without a live block says nothing about heads: its own number is taken.
        """
        live = self.row_columns.numel()
        if live == 0:
            return self.num_heads if num_values == 0 else None
        heads, rest = divmod(num_values * self.layout_heads, live)
        return heads if rest == 0 and (self.num_heads in (1, heads)) else None


def as_index(layout: torch.Tensor | BlockIndex, block: int) -> BlockIndex:
    """The index of a layout, or the one given. Raises ValueError where that is for another block."""
    index = layout if isinstance(layout, BlockIndex) else BlockIndex.build(layout, block)
    if index.block != block:
        raise ValueError(f"block is {block}, and the index was built for blocks of {index.block}; pass that one.")
    return index


def index_on(indices: dict[torch.device, BlockIndex], device: torch.device) -> BlockIndex:
    """The index on `device`, copied there and remembered in `indices` when it is first asked for."""
    if device not in indices:
        indices[device] = next(iter(indices.values())).to(device)
    return indices[device]


def check_block(block: int) -> None:
    """Raises ValueError unless `block` is a power of two and at least 8."""
    if not isinstance(block, int) or isinstance(block, bool) or block < 8 or block & (block - 1):
        raise ValueError(f"block is {block!r}; it has to be a power of two and at least 8, such as 16, 32, 64 or 128.")


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)).int()
