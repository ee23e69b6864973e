"""Indices: which blocks, windows or pairs of tokens are live, in the forms that operations walk."""

from .block import BlockIndex, as_index
from .lasting import lasting, plain
from .packed import PackedIndex
from .token import TokenIndex
from .window import WindowIndex

__all__ = ["BlockIndex", "PackedIndex", "TokenIndex", "WindowIndex", "as_index", "lasting", "plain"]
