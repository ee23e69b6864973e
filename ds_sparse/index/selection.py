"""The key blocks that queries have chosen for themselves, as attention walks them. Nothing waits for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .block import check_integers
from .build import TilePlan, bits_of_blocks
from .packed import Borders, places_of
from .tiles import Tiles
from .transforms import least_of, outside_transforms_or_traced, unwrap_functorch

ROW_BLOCK = 16
"""Rows of a block row, those that a warp has: kChosenRowBlock in csrc/attention_call.h."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The blocks that each query token has chosen, made of their numbers in each call.

    Attributes:
        bits: uint8 (L or B * L, T, 4 * ceil(C / 32)). Bit k of byte j of a token is block 8 * j + k.
        block: tokens in a block.
        heads: L, for each of which neighbouring heads of query, as many, have chosen the same.
        layout_heads: L, or B * L. Not read from `bits` where a graph is traced: PyTorch 2.11 cannot hand on such sizes.
        columns: C, the blocks of the keys.
        most: how many blocks a token has chosen, at most.
        row_tiles, column_tiles: what a GPU walks, where it has been made, by `with_tiles`.
    """

    bits: Tensor
    block: int
    heads: int
    layout_heads: int
    columns: int
    most: int
    row_tiles: Tiles | None = None
    column_tiles: Tiles | None = None

    @classmethod
    def of_blocks(cls, block_indices: Tensor, block: int, columns: int) -> Selection:
        """The selection of block_indices (B or 1, L, T, k), int32 or int64; what is no number of a block is none."""
        sequences, heads, tokens, listed = block_indices.shape
        layout_heads, most = sequences * heads, least_of(listed, columns)
        capacity = layout_heads * tokens * most
        if capacity >= 2**31:
            raise ValueError(
                f"block_indices has {capacity} numbers of blocks; attention takes fewer than 2**31. Use "
                "larger blocks, or fewer of them."
            )
        return cls(bits_of_blocks(block_indices.flatten(0, 1), columns), block, heads, layout_heads, columns, most)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.bits.device

    @outside_transforms_or_traced
    def with_tiles(self, rows_of_token: int, tile: int, sides: Sequence[str]) -> Selection:
        """The selection with what a GPU walks; as it is on a CPU, whose kernels read the bits.

        Args:
            rows_of_token: heads that see the same keys, which are a token's rows; 16 rows are a block row.
            tile: rows, or keys, of a tile's height.
            sides: 'rows', whose tiles list the blocks that some of their tokens have chosen, or also 'columns', whose
                tiles of keys list the block rows that have chosen some of them.
        """
        if self.device.type != "cuda":
            return self
        bits = _bits_of_rows(self.bits, ROW_BLOCK // rows_of_token)
        plan = TilePlan(bits, self.columns, self.block, [tile], sides, bounded=True, row_block=ROW_BLOCK)
        made = plan.fill(self.layout_heads, [self.layout_heads * self.bits.shape[1] * self.most])
        return replace(self, row_tiles=made["rows", tile], column_tiles=made.get(("columns", tile)))


def _bits_of_rows(bits: Tensor, tokens: int) -> Tensor:
    """The bits of block rows of so many tokens, a power of two: what some of them have chosen."""
    if tokens == 1:
        return bits
    bits = torch.nn.functional.pad(bits, (0, 0, 0, -bits.shape[1] % tokens)).unflatten(1, (-1, tokens))
    while tokens > 1:
        tokens //= 2
        bits = bits[:, :, :tokens] | bits[:, :, tokens:]
    return bits.squeeze(2)


@dataclass(frozen=True, eq=False)
class AlignedDocuments:
    """The documents of a row as they lie where each begins with a whole block. Letters: T tokens, N blocks.

    Attributes:
        block: tokens in a block.
        ranges: int32 (N, 2). The first block of each block's document, and the one after its last.
        aligned: int64 (T). The aligned number of each token.
        tokens_of: int64 (N * block). The token of each aligned number, 0 where there is none.
        exists: bool (1, N * block). Whether there is one.
        lost: int32 (1), where nobody has read the borders: 1 where these are not as they have to be. Then all is NaN.
    """

    block: int
    ranges: Tensor
    aligned: Tensor
    tokens_of: Tensor
    exists: Tensor
    lost: Tensor | None

    @classmethod
    @outside_transforms_or_traced
    def of(cls, cu_seqlens: Tensor, tokens: int, block: int, device: torch.device) -> AlignedDocuments:
        """Raises TypeError or ValueError for `cu_seqlens` of another form, and on a CPU, outside of graphs, for one
        that does not ascend from 0 to the tokens."""
        borders = Borders.of(cu_seqlens, tokens, device)
        spans, ranges, lost = borders.in_blocks(block, -(-tokens // block), own=True)
        return cls(block, ranges, *places_of(spans, block, tokens), lost)

    @outside_transforms_or_traced
    def selection(self, block_indices: Tensor) -> Selection:
        """The selection of aligned tokens, of block_indices (1, L, T, k), which count from each document's start: those
        beyond its last block are none."""
        chosen = block_indices.index_select(2, self.tokens_of)
        of_tokens = self.ranges[:, None].expand(-1, self.block, -1).flatten(0, 1)
        first, end = of_tokens[:, :1], of_tokens[:, 1:]
        is_there = self.exists[0].unsqueeze(-1) & (chosen >= 0) & (chosen < end - first)
        return Selection.of_blocks(torch.where(is_there, chosen + first, -1), self.block, len(self.ranges))


def check_chosen(
    block_indices: Tensor, query: Tensor, key_heads: int, tokens_first: bool, name: str = "block_indices"
) -> Tensor:
    """block_indices as (B or 1, Hkv or H or 1, T, k), without the wrappers of transforms.

    Args:
        query: (B, H, T, D).
        key_heads: Hkv.
        tokens_first: they are given as (T, Hkv or H or 1, k), of one sequence.
        name: how sentences call them.

    Raises:
        TypeError: no tensor of whole numbers.
        ValueError: another shape, or device; other numbers for each sample of torch.vmap.
    """
    check_integers(name, block_indices, "the numbers of what each query token sees, -1 for none")
    if not _fits(block_indices, query, key_heads, tokens_first):
        sequences, heads, tokens, _ = query.shape
        of_batch, of_heads = (" or ".join(map(str, dict.fromkeys(x))) for x in ((sequences, 1), (key_heads, heads, 1)))
        wanted = f"({tokens}, {of_heads}, k)" if tokens_first else f"({of_batch}, {of_heads}, {tokens}, k)"
        raise ValueError(
            f"{name} has shape {tuple(block_indices.shape)}; for {tokens} tokens of {heads} heads, and "
            f"{key_heads} heads of keys, it has to be {wanted}: k numbers of what each token sees, -1 for none."
        )
    if block_indices.device != query.device and not query.is_meta:
        raise ValueError(f"{name} is on {block_indices.device} and query on {query.device}; move it there.")
    chosen = unwrap_functorch(name, block_indices, needs_values=False)
    return chosen.transpose(0, 1).unsqueeze(0) if tokens_first else chosen


def _fits(block_indices: Tensor, query: Tensor, key_heads: int, tokens_first: bool) -> bool:
    """Sizes are compared one by one, as those of a traced tensor may be symbols, which torch.compile does not find in a
    tuple."""
    sequences, heads, tokens, _ = query.shape
    if block_indices.dim() != 4 - tokens_first or block_indices.shape[-1] == 0:
        return False
    if tokens_first:
        (of_tokens, of_heads, _), of_batch = block_indices.shape, 1
    else:
        of_batch, of_heads, of_tokens, _ = block_indices.shape
    if of_tokens != tokens or not (of_batch == 1 or of_batch == sequences):
        return False
    return any(of_heads == wanted for wanted in (1, key_heads, heads))


@outside_transforms_or_traced
def check_numbers(block_indices: Tensor, block: int, columns: int) -> None:
    """Raises ValueError where the host can see, without waiting, that blocks beyond the keys are named."""
    if torch.compiler.is_compiling() or not block_indices.is_cpu or isinstance(block_indices, FakeTensor):
        return
    beyond = block_indices >= columns
    if beyond.any():
        sequence, head, token, place = beyond.nonzero()[0].tolist()
        raise ValueError(
            f"block_indices names block {int(block_indices[sequence, head, token, place])} for token {token} of "
            f"sequence {sequence}, head {head}, and the keys fill blocks up to number "
            f"{columns - 1}, of {block} each; give numbers up to that, and -1 for none."
        )
