"""A structure's layout for its longest sequence, and the indices of its top-left parts, which shorter sequences use."""

from __future__ import annotations

from base64 import b85decode, b85encode
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakValueDictionary
from zlib import compress, decompress

import torch

from ..layout import crop, pack_bits, unpack_bits
from .block import BlockIndex
from .cache import Cache, Refusal
from .transforms import in_a_thread

_REFUSAL = Refusal(
    "The index of a layout cannot be built",
    "call once with this length before, or use the fused implementation, which looks it up when the graph runs.",
    "call once with this length before the capture.",
)


class MasterLayout:
    """An immutable square layout, and the indices of its top-left parts, built at first use.

    A compiled or exported graph holds it as text. Its operators find the layout and the index by that when they run, so
    that nothing of the index is in the graph.

    Args:
        layout: bool (L, R, R), L = 1 when all heads are equal.
        block: tokens on a block's side.
        num_heads: heads of those that use it, L if it is not given.

    Attributes:
        layout, block, num_heads: as given.
        blocks: R.
        text: block, L, R and the layout's bits.
    """

    def __init__(self, layout: torch.Tensor, block: int, num_heads: int | None = None):
        layout = layout.clone()  # what the caller does to his own later changes no module
        self.block = block
        heads, self.blocks = layout.shape[:2]
        self.num_heads = heads if num_heads is None else num_heads
        bits = compress(pack_bits(layout).cpu().numpy().tobytes())
        self.text = f"{block} {heads} {self.blocks} {b85encode(bits).decode()}"
        # Layers that were built one by one from one structure have one tensor, and one index.
        equal = _in_use.get(self.text)
        self._equal = equal  # found by the text as long as one of the equals lives
        self.layout: torch.Tensor = layout if equal is None else equal.layout
        self._indices: Cache[BlockIndex] = Cache() if equal is None else equal._indices
        _in_use.setdefault(self.text, self)

    @property
    def device(self) -> torch.device:
        return self.layout.device

    @classmethod
    def read(cls, text: str) -> MasterLayout:
        """The layout of a text: one in use, or one made of it, as where an exported program was loaded."""
        return _in_use.get(text) or _read.get(text, lambda: cls._from(text))

    @classmethod
    def _from(cls, text: str) -> MasterLayout:
        *numbers, bits = text.split()
        block, heads, blocks = map(int, numbers)
        bytes_of_bits = torch.frombuffer(bytearray(decompress(b85decode(bits))), dtype=torch.uint8)
        return cls(unpack_bits(bytes_of_bits.view(heads, blocks, -1), blocks), block)

    def index(self, tokens: int, device: torch.device, causal: bool = False) -> BlockIndex:
        """Index of the part for `tokens` tokens, the last block perhaps short; with `causal` without the blocks above
        the diagonal. Raises RuntimeError where it is not there yet, and torch.compile traces or a CUDA graph is
        captured."""
        blocks = -(-tokens // self.block)
        key = blocks, device, causal
        return self._indices.get(key, lambda: in_a_thread(partial(self._build, *key)), _REFUSAL, device)

    def _build(self, blocks: int, device: torch.device, causal: bool) -> BlockIndex:
        part = crop(self.layout, blocks, blocks)
        index = BlockIndex.build(part if device.type == "meta" else part.to(device), self.block)
        return (index.causal() if causal else index).to(device)

    def _held(self) -> Iterator[torch.Tensor]:
        yield self.layout
        yield from self._indices._held()

    def __deepcopy__(self, memo: Any) -> MasterLayout:
        return self

    def __reduce__(self):
        return MasterLayout, (self.layout, self.block, self.num_heads)


_in_use: WeakValueDictionary[str, MasterLayout] = WeakValueDictionary()  # by text
_read: Cache[MasterLayout] = Cache()  # made of a text, by it
