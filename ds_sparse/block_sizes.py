"""The sides of blocks, in tokens, that structures, attention and windows take."""

from __future__ import annotations

BLOCK_SIZES = (8, 16, 32, 64, 128)


def listed(word: str) -> str:
    """The sizes as a sentence has them: of "or" 8, 16, 32, 64 or 128."""
    *first, largest = map(str, BLOCK_SIZES)
    return f"{', '.join(first)} {word} {largest}"
