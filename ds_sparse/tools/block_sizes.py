"""The sides of blocks, in tokens, that structures, attention and windows take."""

from __future__ import annotations

BLOCK_SIZES = (8, 16, 32, 64, 128)

CHOSEN_BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
"""Of blocks that queries choose for themselves."""


def rounded_up(tokens: int, block: int) -> int:
    """Tokens of whole blocks that hold a sequence, the last of which may be short in it."""
    return -(-tokens // block) * block
