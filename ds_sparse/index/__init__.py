"""Indices: which blocks, windows or pairs of tokens are live, in the forms that operations walk."""

from .block import BlockIndex, as_index
from .packed import PackedIndex
from .token import TokenIndex
from .transforms import outside_transforms, unwrap_functorch
from .window import WindowIndex

__all__ = [
    "BlockIndex",
    "PackedIndex",
    "TokenIndex",
    "WindowIndex",
    "as_index",
    "outside_transforms",
    "unwrap_functorch",
]
