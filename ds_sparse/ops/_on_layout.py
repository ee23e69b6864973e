"""What the operations that are made for a layout have in common: its index, on each device that they meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from ..index import BlockIndex


class OnLayout:
    """Holds a layout as it was given, and its index, which is copied to a device when it is first asked for there."""

    def __init__(self, layout: torch.Tensor | BlockIndex, index: BlockIndex):
        self.layout, self.block = layout, index.block
        self._indices = {index.device: index}

    @property
    def spdims(self) -> torch.Size:
        """(H, R, C) of the layout."""
        return torch.Size((self._index.num_heads, self._index.rows, self._index.columns))

    @property
    def lut_cache(self) -> Mapping[torch.device, BlockIndex]:
        """The index on each device that this has met: what DeepSpeed's look-up tables were. For reading."""
        return MappingProxyType(self._indices)

    @property
    def _index(self) -> BlockIndex:
        """The index that this was made with."""
        return next(iter(self._indices.values()))

    def _index_on(self, device: torch.device) -> BlockIndex:
        if device not in self._indices:
            self._indices[device] = self._index.to(device)
        return self._indices[device]

    def _held(self) -> Iterator[torch.Tensor]:
        for index in tuple(self._indices.values()):
            yield from index._held()
