"""The tiles of an index that attention walks, and what they hold."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..index import BlockIndex, PackedIndex, WindowIndex
from ..index.packing import block_of, owner_bit
from ..index.tiles import SIDES, Tiles
from ..ops import block_sparse_attention

Index = TypeVar("Index", BlockIndex, PackedIndex, WindowIndex)


def with_tiles(index: Index, head_dim: int, dtype: torch.dtype) -> Index:
    """An index, with all that attention of operands like these walks."""
    for side in SIDES:
        tiles_of(index, side, head_dim, dtype)
    return index


def tiles_of(index: Index, side: str, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The tiles of a side that attention walks; an exact index has them."""
    blocks = index.blocks if isinstance(index, WindowIndex) else index
    height = height_of_tiles(blocks.block, head_dim, dtype, index.device)
    if not isinstance(blocks, PackedIndex):
        return blocks.tiles(side, height)
    if height == blocks.block:
        return blocks.prepared().blocks.tiles(side, height)
    # Hopper's kernels, whose tiles are taller, read documents where they lie.
    blocks.tile_spans(side, height, causal=False)
    return blocks.tiles(side, height, causal=False)


@cache
def height_of_tiles(block: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """The height that attention asks a bounded index for."""
    index = BlockIndex.from_blocks(torch.zeros(1, 1, dtype=torch.int64, device=device), block)
    x = torch.zeros(1, 1, block, head_dim, dtype=dtype, device=device)
    block_sparse_attention(x, x, x, index)
    return next(x.tile for x in index._made.values() if isinstance(x, Tiles))


def require_blocks(index: Index, live: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Holds an index and its tiles to blocks, bool (L, R, C).

    Raises:
        ArithmeticError: it has others.
    """
    blocks = index if isinstance(index, BlockIndex) else index.blocks
    missing = blocks.rows - live.shape[-2]  # a bounded index has blocks without tokens
    live = pad(live, (0, missing, 0, missing))
    if not torch.equal(blocks.layout(), live):
        raise ArithmeticError("its layout is another")
    for side, of_side in zip(SIDES, (live, live.mT), strict=True):
        if not hold(tiles_of(index, side, head_dim, dtype), of_side, blocks.block):
            raise ArithmeticError(f"its tiles of {side} hold other blocks")


def hold(tiles: Tiles, live: Tensor, block: int) -> bool:
    """Tells if tiles, which list the other side for lines, decode to blocks (L, lines, other side)."""
    height = max(1, tiles.tile // block)
    tile, first, count, _ = tiles.units[tiles.units[:, 0] >= 0].long().unbind(1)
    before = (count.cumsum(0) - count - first).repeat_interleave(count)
    entries = tiles.entries[torch.arange(len(before), device=before.device) - before].long()
    tile = tile.repeat_interleave(count)
    entry, line = owner_bit(entries[:, None], torch.arange(height, device=live.device)).nonzero(as_tuple=True)
    found = torch.zeros_like(live, memory_format=torch.contiguous_format)
    head = tile[entry] // -(-live.shape[1] // height)
    found[head, tiles.lines.view(-1, height).long()[tile[entry], line], block_of(entries[entry])] = True
    return torch.equal(found, live)
