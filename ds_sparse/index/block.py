"""Layout -> BlockIndex: the live blocks of a layout, in the forms that operations walk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from .._ops import ops
from ..dispatch import TILE, tile_heights
from ..layout import check_values, unpack_bits, with_heads
from .build import TilePlan, bits_of
from .lists import Lists
from .masks import layout_of_flex, layout_of_mask
from .on_device import OnDevice
from .packing import MAX_BLOCKS
from .ready_event import ReadyEvent
from .strips import Strips
from .tiles import SIDES, Tiles
from .transforms import outside_transforms, refuse_without_values, unwrap_functorch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_BLOCK = 1 << 15
"""A block has fewer than 2**31 numbers."""


@dataclass(frozen=True, eq=False)
class BlockIndex(OnDevice):
    """The live blocks of a layout, in tiles and one by one.

    Built once, by `build`, `from_mask` or `from_flex`; immutable, shared by every operation, on any stream (see
    `ReadyEvent`). The tiles are what attention walks, and products on a Hopper GPU. The rest is made from the layout's
    bits when it is first asked for, and kept: the `Lists` of MatMul and Softmax, the `Strips` of Softmax on a GPU,
    tiles of another height, the index cut for causal attention, or with its rows in the opposite order.

    Letters: L stored layout heads (1 when all heads are equal, else `num_heads`), R/C block rows and columns,
    V live blocks of the L stored heads together.

    Attributes:
        block: tokens on a block's side.
        num_heads: heads of the layout as given; 1 means that any number of heads share it.
        layout_heads: L.
        rows, columns: R and C.
        live_blocks: V.
        reaches_ahead: whether a block above the diagonal is live.
        bits: uint8 (L, R, 4 * ceil(C / 32)). The layout: bit k of byte j is block 8 * j + k, in whole words.
        row_tiles: block rows in tiles of `TILE` tokens, which list block columns.
        column_tiles: block columns in tiles of `TILE` tokens, which list block rows.
        row_offsets, row_columns, column_offsets, column_rows, column_slots: those of `lists`.

    Raises:
        TypeError: the class is called, in place of one of these.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> layout = ds_sparse.LocalSlidingWindowSparsityConfig(num_heads=4, block=16, causal=True).make_layout(64)
        >>> index = ds_sparse.BlockIndex.build(layout, block=16)
        >>> index
        BlockIndex(4 x 4 blocks of 16, 4 heads alike, density 43.8%, cpu)
        >>> index.live_blocks, index.reaches_ahead
        (7, False)
        >>> query, key, value = (torch.randn(2, 4, 64, 16) for _ in range(3))
        >>> ds_sparse.block_sparse_attention(query, key, value, index, causal=True).shape
        torch.Size([2, 4, 64, 16])
    """

    block: int
    num_heads: int
    layout_heads: int
    rows: int
    columns: int
    live_blocks: int
    reaches_ahead: bool
    bits: torch.Tensor
    _made: dict[Any, Any]  # Lists, Strips, Tiles and a BlockIndex, by what they are

    def __new__(cls, *given: Any, **fields: Any) -> BlockIndex:
        if given or (fields and "_made" not in fields):
            raise TypeError(
                "A BlockIndex is built from a layout: BlockIndex.build(layout, block), or from_mask or from_flex."
            )
        return super().__new__(cls)

    @classmethod
    def build(cls, layout: torch.Tensor, block: int) -> BlockIndex:
        """Builds the index on the layout's device; synchronises with it once.

        Args:
            layout: bool, or 0 and 1 as numbers, (R, C) or (H or 1, R, C).
            block: tokens on a block's side, a power of two, 8 or more.

        Returns:
            The index, on the layout's device.

        Raises:
            TypeError, ValueError: a layout of another type, dtype, shape or value; another block; `2**31` live blocks
                or more; above `2**24` rows or columns.
            RuntimeError: a device without kernels.
        """
        block = check_block(block)
        layout = unwrap_functorch("The layout", with_heads(layout))
        return cls._of(layout, block)

    @classmethod
    def from_mask(cls, token_mask: torch.Tensor, block: int, *, partial: str = "error") -> BlockIndex:
        """Builds the index of the blocks that a mask over tokens keeps; takes as much memory as some copies of it.

        Args:
            token_mask: bool (T, S) or (H, T, S), True where a query sees a key; the last blocks may be short.
            block: tokens on a block's side, a power of two, 8 or more.
            partial: what becomes of blocks of which the mask keeps a part: 'error', or 'live', which takes all of each;
                the mask then has to go to the operation too, as attn_mask, or causal=True.

        Returns:
            The index, on the mask's device.

        Raises:
            TypeError: not a bool tensor.
            ValueError: another shape, block or `partial`; the mask cuts through a block, named by its place.

        Examples:
            >>> import torch
            >>> import ds_sparse
            >>> mask = torch.ones(64, 64, dtype=torch.bool).tril()
            >>> index = ds_sparse.BlockIndex.from_mask(mask, 16, partial="live")
            >>> query, key, value = (torch.randn(1, 2, 64, 8) for _ in range(3))
            >>> ds_sparse.block_sparse_attention(query, key, value, index, causal=True).shape
            torch.Size([1, 2, 64, 8])
        """
        block = check_block(block)
        mask = unwrap_functorch("token_mask", token_mask) if isinstance(token_mask, torch.Tensor) else token_mask
        return cls.build(outside_transforms(layout_of_mask)(mask, block, partial), block)

    @classmethod
    def from_flex(cls, block_mask: BlockMask, *, partial: str = "error") -> BlockIndex:
        """Builds the index of the blocks of a mask made for PyTorch's flex attention.

        Source: `torch.nn.attention.flex_attention`, whose full blocks are live here, as are its partial ones with
        `partial="live"`. Partial blocks that are only short, at the ends of the sequences, are whole.

        Args:
            block_mask: of one sequence (B=None or 1); with H heads, or one for any number of them; BLOCK_SIZE the same
                for queries and keys, a power of two, 8 or more.
            partial: as in `from_mask`.

        Returns:
            The index, on the mask's device.

        Raises:
            TypeError: not a BlockMask.
            ValueError: several sequences; another BLOCK_SIZE or `partial`; listed blocks that do not exist; partial
                blocks, the first named by its place.

        Examples:
            >>> import ds_sparse
            >>> from torch.nn.attention.flex_attention import create_block_mask
            >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
            >>> ds_sparse.BlockIndex.from_flex(mask, partial="live")
            BlockIndex(4 x 4 blocks of 16, any heads, density 62.5%, cpu)
        """
        layout, block = layout_of_flex(block_mask, partial)
        return cls.build(layout, block)

    @classmethod
    @outside_transforms
    def _of(cls, layout: torch.Tensor, block: int) -> BlockIndex:
        heads, rows, columns = layout.shape
        if max(rows, columns) > MAX_BLOCKS:
            raise ValueError(
                f"The layout has {rows} x {columns} blocks; the index holds up to 2**24 a side. Use a larger block."
            )
        numbers = None if layout.dtype == torch.bool else layout
        return cls._of_bits(bits_of(layout.bool()), columns, block, heads, numbers)

    @classmethod
    def _of_bits(
        cls, bits: torch.Tensor, columns: int, block: int, num_heads: int, numbers: torch.Tensor | None = None
    ) -> BlockIndex:
        """The index of a layout's bits, of one head if all are equal; `numbers`, which they were made of, have to be 0
        or 1."""
        heights = tile_heights("block_sparse_attention", bits.device, block) or [TILE]
        # Where a tile is one line, its height makes no difference to the lists.
        plan = TilePlan.of(bits, columns, block, [heights[0], *(height for height in heights[1:] if height > block)])
        if numbers is None:
            counts, _ = plan.fetch()
        else:
            counts, (are_0_or_1,) = plan.fetch((numbers == numbers.bool()).all())
            if not are_0_or_1:
                check_values(numbers)
        if counts.live_blocks >= 2**31:
            raise ValueError(
                f"The layout has {counts.live_blocks} live blocks; the index holds fewer than 2**31. Use a larger "
                "block."
            )
        tiles = plan.fill(counts)
        for side, height in product(SIDES, heights):
            tiles.setdefault((side, height), replace(tiles[side, heights[0]], tile=height))
        return cls(
            block=block,
            num_heads=num_heads,
            layout_heads=counts.layout_heads,
            rows=bits.shape[1],
            columns=columns,
            live_blocks=counts.live_blocks,
            reaches_ahead=counts.reaches_ahead,
            # A copy: a view would keep the memory of all heads.
            bits=bits if counts.layout_heads == len(bits) else bits[:1].clone(),
            _made=tiles,
        )

    def __repr__(self) -> str:
        share = self.live_blocks / (self.layout_heads * self.rows * self.columns)
        heads = "any heads" if self.num_heads == 1 else f"{self.num_heads} heads"
        return (
            f"BlockIndex({self.rows} x {self.columns} blocks of {self.block}, {heads}"
            f"{' alike' if self.layout_heads < self.num_heads else ''}, density {share:.1%}, {self.device})"
        )

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.bits.device

    @property
    def lists(self) -> Lists:
        """The live blocks one by one."""
        return self._once("lists", self._make_lists)

    @property
    def strips(self) -> Strips:
        """The live blocks as softmax walks them on a GPU. Made at the first call, which synchronises once."""
        return self._once("strips", self._make_strips)

    @property
    def row_tiles(self) -> Tiles:
        return self.tiles("rows")

    @property
    def column_tiles(self) -> Tiles:
        return self.tiles("columns")

    @property
    def row_offsets(self) -> torch.Tensor:
        return self.lists.row_offsets

    @property
    def row_columns(self) -> torch.Tensor:
        return self.lists.row_columns

    @property
    def column_offsets(self) -> torch.Tensor:
        return self.lists.column_offsets

    @property
    def column_rows(self) -> torch.Tensor:
        return self.lists.column_rows

    @property
    def column_slots(self) -> torch.Tensor:
        return self.lists.column_slots

    def for_heads(self, num_heads: int) -> BlockIndex:
        """The same of a layout that stands for so many heads: one where all are equal. What has been made is shared."""
        index = replace(self, num_heads=num_heads)
        object.__setattr__(index, "_ready", self._ready)
        return index

    def with_lists(self) -> BlockIndex:
        """The index itself, its lists made: what is compiled or captured later cannot make them."""
        _ = self.lists
        return self

    def with_strips(self) -> BlockIndex:
        """The same with its strips."""
        _ = self.strips
        return self

    def tiles(self, side: str, tile: int = TILE) -> Tiles:
        """The tiles of a side. Those of another height than `TILE` are made at the first call, which synchronises once.

        Args:
            side: 'rows' or 'columns'.
            tile: tokens of a tile's height, a power of two, up to 8 blocks.

        Returns:
            The tiles, on the index's device.

        Raises:
            ValueError: another side; a height that is not a power of two, or above 8 blocks.
        """
        if side not in SIDES:
            raise ValueError(f"side is {side!r}; it has to be 'rows' or 'columns'.")
        return self._once((side, tile), partial(self._make_tiles, side, tile))

    def causal(self) -> BlockIndex:
        """The index without the blocks above the diagonal. Built at the first call, which synchronises once.

        Returns:
            The index for causal attention; itself where there are no such blocks.
        """
        if not self.reaches_ahead:
            return self
        if "causal" not in self._made:
            what = "The blocks above the diagonal cannot be left out of an index"
            self._refuse_to_make("pass index.causal().", what)
            self._made["causal"] = self._make_causal()
        return self._made["causal"]

    @property
    def has_causal(self) -> bool:
        """Tells if `causal()` is there, and builds nothing."""
        return not self.reaches_ahead or "causal" in self._made

    @property
    def row_lengths(self) -> list[int]:
        """The live blocks of each block row, L * R numbers on the host; asking for them first synchronises once."""
        if "row_lengths" not in self._made:
            what = "The live blocks of rows, which the gradient of distance_bias takes, cannot be counted"
            self._refuse_to_make(
                "read index.row_lengths once before, for causal calls index.causal().row_lengths.", what
            )
            self._made["row_lengths"] = self._count_rows()
        return self._made["row_lengths"]

    def layout(self) -> torch.Tensor:
        """The layout, unpacked at each call.

        Returns:
            bool (L, R, C), on the index's device.
        """
        self._ready.wait(self._tensors)
        return unpack_bits(self.bits, self.columns)

    @outside_transforms
    def _copied(self, device: torch.device) -> BlockIndex:
        """With its lists and its causal part if they have been made; on a GPU it is built from the bits, as there the
        tiles depend on the device."""
        refuse_without_values("The index", self.bits)
        self._ready.wait(self._tensors)
        bits = self.bits.to(device)
        if device.type == "cuda":
            moved = self._of_bits(bits, self.columns, self.block, self.num_heads)
        else:
            tiles = {key: made.to(device) for key, made in self._made.items() if isinstance(made, Tiles)}
            moved = replace(self, bits=bits, _made=tiles)
        if "causal" in self._made:
            moved._made["causal"] = self._made["causal"].to(device)
        if "lists" in self._made:
            moved._made["lists"] = moved._make_lists() if device.type == "cuda" else self._made["lists"].to(device)
        if "strips" in self._made:
            moved._made["strips"] = self._made["strips"].to(device)
        moved._ready.record()
        return moved

    def num_values(self, heads: int) -> int:
        """V, the size of dimension 1 of sparse values.

        Args:
            heads: H.

        Returns:
            The live blocks of so many heads.
        """
        return self.live_blocks * heads // self.layout_heads

    def heads_of(self, num_values: int) -> int | None:
        """The number of heads that sparse values are of.

        A layout without a live block says nothing about heads: its own number is taken.

        Args:
            num_values: V, the size of dimension 1 of sparse values.

        Returns:
            H; None where no number of heads has so many.
        """
        if self.live_blocks == 0:
            return self.num_heads if num_values == 0 else None
        # In whole operations: torch.compile traces no divmod of a size that changes.
        heads = num_values * self.layout_heads // self.live_blocks
        whole = heads * self.live_blocks == num_values * self.layout_heads
        return heads if whole and (self.num_heads in (1, heads)) else None

    def __getstate__(self) -> dict[str, object]:
        self._ready.wait(self._tensors)
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """On another kind of device than it was made on, what that one's kernels walk is made now, not in a call."""
        vars(self).update(state)
        vars(self)["_ready"] = ReadyEvent(self.device)
        if "lists" in self._made and self._made["lists"].slots.keys() != self._walked():
            del self._made["lists"]
            _ = self.lists
        for side, height in product(SIDES, tile_heights("block_sparse_attention", self.device, self.block)):
            self.tiles(side, height)

    def _walked(self) -> set[tuple[str, int]]:
        """Sides and heights of the tiles that products walk."""
        by_rows = {("rows", height) for height in tile_heights("sdd", self.device, self.block)}
        return by_rows | set(product(SIDES, tile_heights("dsd", self.device, self.block)))

    @outside_transforms
    def _make_causal(self) -> BlockIndex:
        return self._of_bits(ops.index_causal_bits(self.bits), self.columns, self.block, self.num_heads)

    @outside_transforms
    def _count_rows(self) -> list[int]:
        return self.lists.row_offsets.diff().tolist()

    @outside_transforms
    def _make_lists(self) -> Lists:
        tiles = {key: self.tiles(*key) for key in self._walked()}
        return Lists.make(self.layout(), self.live_blocks, tiles, self.block)

    @outside_transforms
    def _make_strips(self) -> Strips:
        return Strips.make(self.lists.row_offsets, self.live_blocks, self.block)

    @outside_transforms
    def _make_tiles(self, side: str, tile: int) -> Tiles:
        plan = TilePlan.of(self.bits, self.columns, self.block, [tile], [side])
        return plan.fill(plan.fetch()[0])[side, tile]


def as_index(layout: torch.Tensor | BlockIndex, block: int) -> BlockIndex:
    """The index of a layout, or the one given. Raises ValueError where that is for another block."""
    index = layout if isinstance(layout, BlockIndex) else BlockIndex.build(layout, block)
    if index.block != block:
        raise ValueError(f"block is {block}, and the index was built for blocks of {index.block}; pass that one.")
    return index


def check_block(block: int) -> int:
    """`block` as an integer of Python. Raises ValueError unless it is a power of two, 8 to `MAX_BLOCK`."""
    if not isinstance(block, Integral) or isinstance(block, bool) or not 8 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"block is {block!r}; it has to be a power of two and at least 8, such as 16, 32, 64 or 128, and at most "
            f"{MAX_BLOCK}."
        )
    return int(block)
