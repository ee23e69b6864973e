"""Layouts of masks over tokens: bool ones, and those of PyTorch's flex attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def layout_of_mask(mask: Tensor, block: int, partial: str) -> Tensor:
    """Blocks, bool (H or 1, R, C), of a bool mask (T, S) or (H, T, S). Raises as `BlockIndex.from_mask`."""
    _check_partial(partial)
    check_bool(mask)
    if mask.is_nested or mask.layout != torch.strided:
        kind, instead = ("nested", "to_padded_tensor(False)") if mask.is_nested else (mask.layout, "to_dense()")
        raise TypeError(f"A mask is a dense tensor, got one that is {kind}; give mask.{instead}.")
    if mask.dim() not in (2, 3) or 0 in mask.shape:
        raise ValueError(
            f"A mask has shape (queries, keys) or (heads, queries, keys), none of them 0, got {tuple(mask.shape)}."
        )
    tokens = (mask.shape[-2], mask.shape[-1])
    missing = (0, -tokens[1] % block, 0, -tokens[0] % block)

    def in_blocks(filled_with: bool) -> Tensor:
        padded = pad(mask.reshape(-1, *tokens), missing, value=filled_with)
        return padded.unflatten(2, (-1, block)).unflatten(1, (-1, block)).transpose(2, 3).flatten(3)

    live, whole = in_blocks(False).any(3), in_blocks(True).all(3)
    if partial == "error":
        _refuse_cut(live & ~whole, live, block, tokens)
    return live


def layout_of_flex(mask: BlockMask, partial: str) -> tuple[Tensor, int]:
    """Blocks of a mask of flex attention, bool (H or 1, R, C), and their size. Raises as `BlockIndex.from_flex`."""
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    _check_partial(partial)
    if not isinstance(mask, BlockMask):
        raise TypeError(f"block_mask is a {type(mask).__name__}; it has to be a BlockMask of flex attention.")
    block, width = mask.BLOCK_SIZE
    if block != width:
        raise ValueError(
            f"The BlockMask has blocks of {block} x {width} tokens; make it with one BLOCK_SIZE for queries and keys."
        )
    if mask.kv_num_blocks.dim() > 2 and mask.kv_num_blocks.shape[0] != 1:
        raise ValueError(
            f"The BlockMask has {mask.kv_num_blocks.shape[0]} sequences, and from_flex takes one. Make it with B=None "
            "if they are alike; else make one a sequence, and give block_sparse_attention the layouts together, "
            "torch.stack([BlockIndex.from_flex(mask).layout() for mask in masks])."
        )
    keys = mask.seq_lengths[1]
    live = cut = _listed("kv", mask.kv_num_blocks, mask.kv_indices, keys, block)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        live = cut | _listed("full_kv", mask.full_kv_num_blocks, mask.full_kv_indices, keys, block)
    if partial == "error" and mask.mask_mod is not noop_mask:
        cut = cut & ~_whole_at_the_ends(mask, cut, block)
        _refuse_cut(cut, live, block, mask.seq_lengths)
    return live, block


def check_bool(mask: Tensor) -> None:
    """Raises TypeError unless a mask is a bool tensor."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"A mask is a bool tensor, got {given}; convert it with mask != 0.")


def _check_partial(partial: str) -> None:
    """Raises ValueError for an unknown fate of blocks of which a mask keeps a part: an error, or all is live."""
    if partial not in ("error", "live"):
        raise ValueError(f"partial is {partial!r}; it has to be 'error' or 'live'.")


def _refuse_cut(cut: Tensor, live: Tensor, block: int, tokens: tuple[int, int]) -> None:
    """Raises ValueError, which says where, if there is a block that the mask cuts through."""
    places = cut.nonzero()
    if not len(places):
        return
    head, row, column = places[0].tolist()
    (first, last), (left, right) = (
        (place * block, min(length, (place + 1) * block) - 1) for place, length in zip((row, column), tokens)
    )
    raise ValueError(
        f"The mask cuts through {len(places)} of {int(live.sum())} live blocks of {block} x {block} tokens, first"
        f"{f' in head {head}' if len(cut) > 1 else ''} at block row {row}, column {column}: query tokens {first} to "
        f"{last}, key tokens {left} to {right}. With partial='live' such blocks are live as a whole; give the mask to "
        "the operation besides, as attn_mask, or causal=True. Or take a smaller block, or TokenIndex, which has single "
        "pairs."
    )


def _listed(name: str, counts: Tensor, columns: Tensor, keys: int, block: int) -> Tensor:
    """bool (H, R, C) of so many block columns of each row, (1, H, R), which come first in (1, H, R, N): any order, and
    behind them anything."""
    counts, columns = counts.reshape(-1, counts.shape[-1]), columns.reshape(-1, *columns.shape[-2:])
    blocks, width = -(-keys // block), columns.shape[2]
    if (counts > width).any():
        raise ValueError(
            f"The BlockMask's {name}_num_blocks has {int(counts.max())}, and its {name}_indices lists {width} blocks a "
            "row; make it with lists as long as the counts say."
        )
    listed = torch.arange(width, device=columns.device) < counts[..., None]
    unknown = columns[listed & ((columns < 0) | (columns >= blocks))].tolist()
    if unknown:
        raise ValueError(
            f"The BlockMask's {name}_indices lists block {unknown[0]}, and its {keys} keys have the blocks 0 to "
            f"{blocks - 1}; where rows list fewer blocks than there are, make it with seq_lengths."
        )
    # What is not listed goes to a column behind the last.
    live = listed.new_zeros(*listed.shape[:2], blocks + 1)
    return live.scatter_(2, torch.where(listed, columns, blocks).long(), True)[..., :blocks]


def _whole_at_the_ends(mask: BlockMask, cut: Tensor, block: int) -> Tensor:
    """Blocks at the ends of the sequences that are whole, and that BlockMask calls partial because they are short."""
    whole, lengths = torch.zeros_like(cut), mask.seq_lengths
    row, column = (length // block for length in lengths)
    at_end = torch.zeros_like(cut)
    at_end[:, row:], at_end[:, :, column:] = True, True
    places = (cut & at_end).nonzero()
    if not len(places):
        return whole
    head, *sides = places.unbind(1)
    tokens = [side[:, None] * block + torch.arange(block, device=cut.device) for side in sides]
    seen = mask.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, 0, 0)):
        seen = torch.vmap(seen, dims)
    inside = [place < length for place, length in zip(tokens, lengths)]
    kept = seen(head.new_zeros(()), head, *(place.clamp(max=n - 1) for place, n in zip(tokens, lengths)))
    whole[places.unbind(1)] = (kept | ~(inside[0][:, :, None] & inside[1][:, None])).all(2).all(1)
    return whole
