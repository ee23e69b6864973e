"""The sides of blocks, in tokens, that structures, attention and windows take."""

from __future__ import annotations

BLOCK_SIZES = (8, 16, 32, 64, 128)
