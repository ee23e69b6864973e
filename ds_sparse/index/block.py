"""Layout -> BlockIndex: the live blocks of a layout, in the forms that operations walk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._ops import ops
from ..dispatch import TILE, tile_heights
from ..layout import LayoutRows, check_values, unpack_bits, with_heads_of_sequences
from .build import NUMBERS, TilePlan, bits_of, bits_of_blocks
from .cache import is_in_graph
from .lists import Lists
from .masks import layout_of_flex, layout_of_mask
from .on_device import OnDevice, copied
from .packing import MAX_BLOCKS
from .strips import Strips
from .tiles import SIDES, Tiles
from .transforms import least_of, outside_transforms, refuse_without_values, unwrap_functorch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_BLOCK = 1 << 15
"""A block has fewer than 2**31 numbers."""

_OUTSIDE = "What attention walks of a bounded index, made outside, cannot be made"


@dataclass(frozen=True, eq=False)
class BlockIndex(OnDevice):
    """The live blocks of a layout, in tiles and one by one.

    Built once, by `build`, `from_blocks`, `from_mask` or `from_flex`; immutable, shared by every operation, on any
    stream (see `ReadyEvent`). The tiles are what attention walks, and products on a Hopper GPU. The rest is made from
    the layout's bits when it is first asked for, and kept: the `Lists` of MatMul and Softmax, the `Strips` of Softmax
    on a GPU, tiles of another height, and the index cut for causal attention.

    A *bounded* index, which `from_blocks` and a `capacity` give, waits for no device: it may be built in each step, in
    the capture of a CUDA graph, and in a graph of torch.compile, of a layout that the graph computes. An entry takes 4
    bytes; on each side there are as many as `capacity`, and no more than the blocks of the layout divided by the lines
    of a tile.

    Letters: L stored layout heads (1 when all heads are equal, else `num_heads`, for each of `num_sequences`), R/C
    block rows and columns, V live blocks of the L stored heads together.

    Attributes:
        block: tokens on a block's side.
        num_heads: heads of the layout as given; 1 means that any number of heads share it.
        num_sequences: sequences that have a layout of their own; 1: any number of them share it.
        layout_heads: L.
        rows, columns: R and C.
        capacity: live blocks for which a bounded index has space; None: sizes are exact.
        bits: uint8 (L, R, 4 * ceil(C / 32)). The layout: bit k of byte j is block 8 * j + k, in whole words.
        by_sequence: whether the stored layouts are those of sequences.
        heads_of_sequence: stored layout heads of each sequence.
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
    _live_blocks: int | None  # None: not counted
    _reaches_ahead: bool | None
    bits: Tensor
    _made: dict[Any, Any]  # Lists, Strips, Tiles and a BlockIndex, by what they are
    num_sequences: int = 1
    capacity: int | None = None
    _lost: Tensor | None = None  # int32 (1): 1 where what the bits were made of was not as it has to be
    _most_of_line: int | None = None  # live blocks that no row or column has more of, where that is known

    by_sequence: bool = field(init=False)
    heads_of_sequence: int = field(init=False)

    def __new__(cls, *given: Any, **fields: Any) -> BlockIndex:
        if given or (fields and "_made" not in fields):
            raise TypeError(
                "A BlockIndex is built from a layout: BlockIndex.build(layout, block), or from_blocks, from_mask or "
                "from_flex."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Now: torch.compile cannot trace a backward pass that computes them of symbols.
        by_sequence = self.num_sequences > 1 and self.layout_heads > 1
        object.__setattr__(self, "by_sequence", by_sequence)
        heads = self.layout_heads // self.num_sequences if by_sequence else self.layout_heads
        object.__setattr__(self, "heads_of_sequence", heads)

    @classmethod
    def build(cls, layout: Tensor, block: int, *, capacity: int | None = None) -> BlockIndex:
        """Builds the index on the layout's device; synchronises with it once, or, where it is bounded, not at all.

        Args:
            layout: bool, or 0 and 1 as numbers, (R, C) or (H or 1, R, C); for attention also (Hkv, R, C), one for each
                group of heads that share a key head, and (B, H, Hkv or 1, R, C), one for each sequence.
            block: tokens on a block's side, a power of two, 8 or more.
            capacity: live blocks, of all heads and sequences together, for which a bounded index of a bool layout has
                space. In attention rows that have none are NaN, and reading `live_blocks` raises. None: as many as
                there are; in a graph of torch.compile and in the capture of a CUDA graph, where nobody can wait for
                that number, as many as the layout has blocks.

        Returns:
            The index, on the layout's device.

        Raises:
            TypeError, ValueError: a layout of another type, dtype, shape or value; another block or capacity; `2**31`
                live blocks or more; above `2**24` rows or columns.
            RuntimeError: a device without kernels.
        """
        block = check_block(block)
        given, num_sequences = with_heads_of_sequences(layout)
        layout = unwrap_functorch("The layout", given)
        heads, rows, columns = layout.shape
        _check_size(rows, columns)
        size = columns, block, heads // num_sequences, num_sequences
        if capacity is None and not is_in_graph(layout):
            return cls._of_bits(bits_of(layout), *size, given=None if layout.dtype == torch.bool else layout)
        if layout.dtype != torch.bool:
            raise TypeError(
                f"The layout is {layout.dtype}, and nobody can wait here to see that it holds only 0 and 1; give a "
                "bool layout, such as layout != 0."
            )
        if capacity is None:
            capacity = heads * rows * columns
        elif isinstance(capacity, bool) or not isinstance(capacity, Integral) or not 0 <= capacity < 2**31:
            raise ValueError(
                f"capacity is {capacity!r}; it has to be an integer of 0 or more and below 2**31, the most live blocks."
            )
        if heads * rows * columns >= 2**31:
            raise ValueError(
                f"The layout has {heads * rows * columns} blocks, and nobody can wait here to see that fewer than "
                "2**31 are live. Use a larger block, or build the index without capacity."
            )
        return cls._bounded(bits_of(layout), *size, capacity)

    @classmethod
    def from_blocks(cls, block_indices: Tensor, block: int, columns: int | None = None) -> BlockIndex:
        """Builds the bounded index of the blocks that are named for each block row; waits for no device.

        Sources: Lu et al., "MoBA", 2025; Yuan et al., "Native sparse attention", 2025: models that choose their blocks
        in every step.

        Args:
            block_indices: int32 or int64 (R, k), (H, Hkv or 1, R, k) or (B, H, Hkv or 1, R, k): the block columns that
                each block row sees, in any order, repeated ones once; -1 for none.
            block: tokens on a block's side, a power of two, 8 or more.
            columns: C; R if it is not given. On the CPU a block beyond them is an error; elsewhere, and in a graph of
                torch.compile, it is none.

        Returns:
            The index, with space for k blocks a row, on the device of `block_indices`.

        Raises:
            TypeError, ValueError: a tensor of another type, dtype or shape; another block; columns that are no integer
                of 1 or more; a block beyond them, named by its place; above `2**24` rows or columns.
            RuntimeError: a device without kernels.

        Examples:
            >>> import torch
            >>> import ds_sparse
            >>> scores = torch.rand(2, 4, 16, 16)  # of two sequences, for four groups of heads
            >>> index = ds_sparse.BlockIndex.from_blocks(scores.topk(3).indices, block=16).causal()
            >>> index
            BlockIndex(16 x 16 blocks of 16, 4 heads of 2 sequences, at most 384 live, cpu)
            >>> query, key = torch.randn(2, 8, 256, 32), torch.randn(2, 4, 256, 32)
            >>> ds_sparse.block_sparse_attention(query, key, key, index, causal=True).shape
            torch.Size([2, 8, 256, 32])
        """
        block = check_block(block)
        named = _named_blocks(block_indices)
        sequences, heads, rows, listed = named.shape
        columns = rows if columns is None else columns
        if isinstance(columns, bool) or not isinstance(columns, Integral) or columns < 1:
            raise ValueError(f"columns is {columns!r}; it has to be an integer of 1 or more, the blocks of the keys.")
        _check_size(rows, columns)
        if named.is_cpu and not torch.compiler.is_compiling() and (named >= columns).any():
            place = (named >= columns).nonzero()[0].tolist()
            raise ValueError(
                f"block_indices names block {int(named[tuple(place)])} for row {place[2]} of head {place[1]}, and "
                f"there are {columns} columns; give numbers below that, and -1 for none."
            )
        capacity = sequences * heads * rows * least_of(listed, columns)
        if capacity >= 2**31:
            raise ValueError(
                f"block_indices has {capacity} numbers of blocks; the index holds fewer than 2**31. Use larger blocks."
            )
        return cls._bounded(bits_of_blocks(named.flatten(0, 1), columns), columns, block, heads, sequences, capacity)

    @classmethod
    def from_mask(cls, token_mask: Tensor, block: int, *, partial: str = "error") -> BlockIndex:
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
        mask = unwrap_functorch("token_mask", token_mask) if isinstance(token_mask, Tensor) else token_mask
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
    def _bounded(
        cls, bits: Tensor, columns: int, block: int, num_heads: int, num_sequences: int, capacity: int,
        is_causal: bool = False, lost: Tensor | None = None, most_of_line: int | None = None,
    ) -> BlockIndex:  # fmt: skip
        """The bounded index of a layout's bits, whose tiles are made when they are first asked for. is_causal: none is
        above the diagonal. lost: as of `TilePlan.fill`, where the bits are those of documents that nobody has read.
        most_of_line: as of `TilePlan`."""
        heads, rows, _ = bits.shape
        return cls(
            block=block, num_heads=num_heads, layout_heads=heads, rows=rows, columns=columns, _live_blocks=None,
            _reaches_ahead=False if is_causal else None, bits=bits, _made={}, num_sequences=num_sequences,
            capacity=capacity, _lost=lost, _most_of_line=most_of_line,
        )  # fmt: skip

    @classmethod
    @outside_transforms
    def _of_bits(
        cls, bits: Tensor, columns: int, block: int, num_heads: int, num_sequences: int = 1, given: Tensor | None = None
    ) -> BlockIndex:
        """The index of a layout's bits, of one head if all are equal; `given`, which they were made of, have to be 0
        or 1."""
        heights = tile_heights("block_sparse_attention", bits.device, block) or [TILE]
        # Where a tile is one line, its height makes no difference to the lists.
        plan = TilePlan(bits, columns, block, [heights[0], *(height for height in heights[1:] if height > block)])
        if given is None:
            counts, _ = plan.fetch()
        else:
            counts, (are_0_or_1,) = plan.fetch((given == given.bool()).all())
            if not are_0_or_1:
                check_values(given)
        if counts.live_blocks >= 2**31:
            raise ValueError(
                f"The layout has {counts.live_blocks} live blocks; the index holds fewer than 2**31. Use a larger "
                "block."
            )
        tiles = plan.fill(counts.layout_heads, counts.sizes, counts.live_blocks)
        for side, height in product(SIDES, heights):
            tiles.setdefault((side, height), replace(tiles[side, heights[0]], tile=height))
        heads, rows, _ = bits.shape
        # A copy: a view would keep the memory of all heads.
        bits = bits if counts.layout_heads == heads else bits[:1].clone()
        return cls(
            block=block, num_heads=num_heads, layout_heads=counts.layout_heads, rows=rows, columns=columns,
            _live_blocks=counts.live_blocks, _reaches_ahead=counts.reaches_ahead, bits=bits, _made=tiles,
            num_sequences=num_sequences,
        )  # fmt: skip

    def __repr__(self) -> str:
        heads = "any heads" if self.num_heads == 1 else f"{self.num_heads} heads"
        if self.num_sequences > 1:
            heads += f" of {self.num_sequences} sequences"
        if self._live_blocks is None:  # nobody waits to print it
            live = f"at most {self.capacity} live"
        else:
            heads += " alike" if self.layout_heads < self.num_heads * self.num_sequences else ""
            live = f"density {self._live_blocks / (self.layout_heads * self.rows * self.columns):.1%}"
        return f"BlockIndex({self.rows} x {self.columns} blocks of {self.block}, {heads}, {live}, {self.device})"

    @property
    def live_blocks(self) -> int:
        """V. A bounded index counts them when it is first asked, which waits for the device.

        Raises:
            ValueError: they are more than `capacity`.
        """
        return self._counted[0] if self._live_blocks is None else self._live_blocks

    @property
    def reaches_ahead(self) -> bool:
        """Whether a block above the diagonal is live; counted and raised as `live_blocks`."""
        return self._counted[1] if self._reaches_ahead is None else self._reaches_ahead

    @property
    def _counted(self) -> tuple[int, bool]:
        what = "The live blocks of an index that nobody waited for cannot be counted"
        live_blocks, reaches_ahead = self._once("counted", self._count, "read index.live_blocks once before.", what)
        if live_blocks > self.capacity:
            raise ValueError(
                f"The layout has {live_blocks} live blocks, and its index space for {self.capacity}: what had none is "
                f"NaN. Build it with capacity={live_blocks} or more."
            )
        return live_blocks, reaches_ahead

    def _refuse_lost(self) -> None:
        if self._lost is not None and self._lost.item():
            raise ValueError(
                "cu_seqlens, at which nobody looked while the index was built, does not ascend from 0 to the tokens of "
                "the row, or the layout is smaller than a document: all is NaN. Set DS_SPARSE_CHECK_LAYOUTS=1 to learn "
                "which."
            )

    def _instead(self) -> str | None:
        """What to do before a graph, which makes, and keeps, no parts of a bounded index from outside: they would have
        no values until it runs."""
        return "build the index in there, or call once before." if self.bounded and self._ready.is_recorded else None

    @property
    def device(self) -> torch.device:
        """Where the index is."""
        return self.bits.device

    @property
    def bounded(self) -> bool:
        """Whether its sizes are bounded, and not exact."""
        return self.capacity is not None

    @property
    def lists(self) -> Lists:
        """The live blocks one by one. Raises ValueError for layouts of sequences, which attention alone walks."""
        self.for_all_sequences(
            "Lists of live blocks, which MatMul, Softmax and the gradient of distance_bias walk, are"
        )
        if self.bounded:
            return self.exact().lists
        return self._once("lists", self._make_lists, traced=False)

    @property
    def strips(self) -> Strips:
        """The live blocks as softmax walks them on a GPU. Made at the first call, which synchronises once."""

        def make() -> Strips:
            return Strips.make(self.lists.row_offsets, self.live_blocks, self.block)

        return self._once("strips", make, traced=False)

    @property
    def row_tiles(self) -> Tiles:
        return self.tiles("rows")

    @property
    def column_tiles(self) -> Tiles:
        return self.tiles("columns")

    @property
    def row_offsets(self) -> Tensor:
        return self.lists.row_offsets

    @property
    def row_columns(self) -> Tensor:
        return self.lists.row_columns

    @property
    def column_offsets(self) -> Tensor:
        return self.lists.column_offsets

    @property
    def column_rows(self) -> Tensor:
        return self.lists.column_rows

    @property
    def column_slots(self) -> Tensor:
        return self.lists.column_slots

    def for_heads(self, num_heads: int) -> BlockIndex:
        """The same of a layout that stands for so many heads: one where all are equal. What has been made is shared."""
        index = replace(self, num_heads=num_heads)
        object.__setattr__(index, "_ready", self._ready)
        return index

    def exact(self) -> BlockIndex:
        """The index with as many entries as there are live blocks, which products and Softmax walk: itself, or, of a
        bounded one, an index that is built at the first call, which synchronises once. Raises ValueError as
        `live_blocks`."""
        if not self.bounded:
            return self
        what = "The live blocks of a bounded index cannot be counted"
        return self._once("exact", self._make_exact, "pass index.exact().", what)

    def for_all_sequences(self, what: str) -> BlockIndex:
        """The index itself. Raises ValueError where sequences have layouts of their own; `what` needs one for all."""
        if self.num_sequences > 1:
            raise ValueError(
                f"{what} of one layout for all sequences, and this index has one for each of {self.num_sequences}. "
                "Call once for each sequence, with an index of its layout, and put the results together by torch.cat."
            )
        return self

    def with_lists(self) -> BlockIndex:
        """The index itself, its lists made: what is compiled or captured later cannot make them."""
        _ = self.lists
        return self

    def with_tiles(self) -> BlockIndex:
        """The same with the tiles that attention walks, which a bounded index has not from the start."""
        for height in tile_heights("block_sparse_attention", self.device, self.block):
            self.tiles("rows", height)
        return self

    def with_strips(self) -> BlockIndex:
        """The same with its strips."""
        _ = self.strips
        return self

    def tiles(self, side: str, tile: int = TILE) -> Tiles:
        """The tiles of a side. Those of another height than `TILE` are made at the first call, which synchronises
        once; a bounded index makes all then, both sides together, and waits for nothing.

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
        make = partial(self._make_tiles, side, tile)
        return self._once((side, tile), make, self._instead(), _OUTSIDE, traced=self.bounded)

    def causal(self) -> BlockIndex:
        """The index without the blocks above the diagonal. Built at the first call, which synchronises once; not for
        a bounded index, whose causal one is bounded.

        Returns:
            The index for causal attention; itself where there are no such blocks.
        """
        if self._reaches_ahead is False:
            return self
        instead, what = self._instead(), _OUTSIDE
        if not self.bounded:
            instead, what = "pass index.causal().", "The blocks above the diagonal cannot be left out of an index"
        causal = self._once("causal", self._make_causal, instead, what)
        if causal.num_heads == self.num_heads:
            return causal
        # Made for another number of heads, which share what is made.
        return self._made.setdefault(("causal", self.num_heads), causal.for_heads(self.num_heads))

    @property
    def row_lengths(self) -> list[int]:
        """The live blocks of each block row, L * R numbers on the host; asking for them first synchronises once."""
        what = "The live blocks of rows, which the gradient of distance_bias takes, cannot be counted"
        instead = "read index.row_lengths once before, for causal calls index.causal().row_lengths."
        return self._once("row_lengths", lambda: self.lists.row_offsets.diff().tolist(), instead, what)

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The layout; waits for the device."""
        layout = self.layout().unflatten(0, (-1, self.heads_of_sequence))
        return LayoutRows.of(layout, None if self.num_heads == 1 else self.num_heads), self.block

    def layout(self) -> Tensor:
        """The layout, unpacked at each call.

        Returns:
            bool (L, R, C), on the index's device.
        """
        self._ready.wait(self)
        return unpack_bits(self.bits, self.columns)

    @outside_transforms
    def _copied(self, device: torch.device) -> BlockIndex:
        """With its lists and its causal part if they have been made; on a GPU it is built from the bits, as there the
        tiles depend on the device."""
        refuse_without_values("The index", self.bits)
        self._ready.wait(self)
        bits = self.bits.to(device)
        if self.bounded:
            lost = None if self._lost is None else self._lost.to(device)
            moved = replace(self, bits=bits, _made={}, _lost=lost)
            return moved.with_tiles() if any(isinstance(made, Tiles) for made in self._made.values()) else moved
        if device.type == "cuda":
            moved = self._with(bits)
        else:
            tiles = {key: copied(made, device) for key, made in self._made.items() if isinstance(made, Tiles)}
            moved = replace(self, bits=bits, _made=tiles)
        if "causal" in self._made:
            moved._made["causal"] = self._made["causal"].to(device)
        if "lists" in self._made:
            has_slots = device.type == "cuda"
            lists = moved._make_lists() if has_slots else replace(copied(self._made["lists"], device), slots={})
            moved._made["lists"] = lists
        if "strips" in self._made:
            moved._made["strips"] = copied(self._made["strips"], device)
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
        return heads if whole and (self.num_heads == 1 or self.num_heads == heads) else None

    def __getstate__(self) -> dict[str, object]:
        self._ready.wait(self)
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """On another kind of device than it was made on, what that one's kernels walk is made now, not in a call."""
        vars(self).update(state)
        self.__post_init__()
        if "lists" in self._made and self._made["lists"].slots.keys() != self._walked():
            del self._made["lists"]
            _ = self.lists
        if not self.bounded:
            for side, height in product(SIDES, tile_heights("block_sparse_attention", self.device, self.block)):
                self.tiles(side, height)

    def _walked(self) -> set[tuple[str, int]]:
        """Sides and heights of the tiles that products walk."""
        by_rows = {("rows", height) for height in tile_heights("sdd", self.device, self.block)}
        return by_rows | set(product(SIDES, tile_heights("dsd", self.device, self.block)))

    def _with(self, bits: Tensor) -> BlockIndex:
        """The exact index of other bits."""
        return self._of_bits(bits, self.columns, self.block, self.num_heads, self.num_sequences)

    def _make_causal(self) -> BlockIndex:
        bits = ops.index_causal_bits(self.bits)
        if self.capacity is None:
            return self._with(bits)
        size = self.columns, self.block, self.num_heads, self.num_sequences, self.capacity
        return self._bounded(bits, *size, is_causal=True, lost=self._lost, most_of_line=self._most_of_line)

    def _make_exact(self) -> BlockIndex:
        self._refuse_lost()
        exact = self._with(self.bits)
        self._made["counted"] = exact.live_blocks * self.layout_heads // exact.layout_heads, exact.reaches_ahead
        _ = self._counted
        return exact

    def _count(self) -> tuple[int, bool]:
        """The live blocks of all L heads, and whether one is above the diagonal."""
        self._refuse_lost()
        numbers = TilePlan(self.bits, self.columns, self.block, [TILE], ["rows"]).counts[:NUMBERS].tolist()
        return numbers[4], bool(numbers[0])

    def _make_lists(self) -> Lists:
        tiles = {key: self.tiles(*key) for key in self._walked()}
        return Lists.make(self.layout(), self.live_blocks, tiles, self.block)

    def _make_tiles(self, side: str, tile: int) -> Tiles:
        if self.capacity is None:
            plan = TilePlan(self.bits, self.columns, self.block, [tile], [side])
            counts, _ = plan.fetch()
            return plan.fill(counts.layout_heads, counts.sizes, counts.live_blocks)[side, tile]
        plan = TilePlan(self.bits, self.columns, self.block, [tile], bounded=True, most_of_line=self._most_of_line)
        both = plan.fill(self.layout_heads, [self.capacity], lost=self._lost)
        self._made.update(both)
        return both[side, tile]


def _named_blocks(block_indices: Tensor) -> Tensor:
    """Blocks named for block rows as (B or 1, H or 1, R, k). Raises TypeError or ValueError for anything else."""
    check_integers("block_indices", block_indices, "the numbers of the key blocks that each block row sees")
    if not 2 <= block_indices.dim() <= 4 or 0 in block_indices.shape:
        raise ValueError(
            f"block_indices has shape {tuple(block_indices.shape)}; it has to be (R, k), (H, R, k) or (B, H, R, k): "
            "the blocks of each row, of each head, of each sequence, one of each at least."
        )
    given = unwrap_functorch("block_indices", block_indices)
    return given.reshape((1,) * (4 - given.dim()) + given.shape)


def _check_size(rows: int, columns: int) -> None:
    if max(rows, columns) > MAX_BLOCKS:
        raise ValueError(
            f"The layout has {rows} x {columns} blocks; the index holds up to 2**24 a side. Use a larger block."
        )


def as_index(layout: Tensor | BlockIndex, block: int) -> BlockIndex:
    """The index of a layout, or the one given. Raises ValueError where that is for another block."""
    index = layout if isinstance(layout, BlockIndex) else BlockIndex.build(layout, block)
    if index.block != block:
        raise ValueError(f"block is {block}, and the index was built for blocks of {index.block}; pass that one.")
    return index


def check_integers(name: str, x: Tensor, of_what: str) -> None:
    """Raises TypeError, which says what is wanted, unless x is an int32 or int64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} is {what}; it has to be an int32 or int64 tensor with {of_what}.")


def check_block(block: int) -> int:
    """`block` as an integer of Python. Raises ValueError unless it is a power of two, 8 to `MAX_BLOCK`."""
    if not isinstance(block, Integral) or isinstance(block, bool) or not 8 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"block is {block!r}; it has to be a power of two and at least 8, such as 16, 32, 64 or 128, and at most "
            f"{MAX_BLOCK}."
        )
    return int(block)
