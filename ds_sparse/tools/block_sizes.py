"""The sides of blocks, in tokens, that structures, attention and windows take."""

from __future__ import annotations

BLOCK_SIZES = (8, 16, 32, 64, 128)

CHOSEN_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Of blocks that queries choose for themselves."""


def forced_blocks(first: int, local: int, causal: bool, own: int = 1) -> int:
    """Blocks that are chosen whatever they score: `first` from the start, and around the `own` of a query, or of a
    block of queries, those of which `local` go up to it."""
    return first + (own + local - 1 + (0 if causal else local - 1) if local else 0)


def not_whole_blocks(tokens: int, block: int) -> str:
    """The sentence about a length that has to be one of whole blocks, and is not."""
    return (
        f"The sequence length, {tokens}, is not a multiple of the block, {block}; use {rounded_up(tokens or 1, block)}."
    )


def rounded_up(tokens: int, block: int) -> int:
    """Tokens of whole blocks that hold a sequence, the last of which may be short in it."""
    return -(-tokens // block) * block
