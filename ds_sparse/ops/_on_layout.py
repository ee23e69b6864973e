"""Shared by operations that are made for a layout: its index, on each device that they meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from ..index import BlockIndex


class OnLayout:
    """Holds the index of a layout, which is copied to a device when it is first asked for there."""

    def __init__(self, layout: torch.Tensor | BlockIndex, index: BlockIndex):
        self.block = index.block
        self._given = layout if isinstance(layout, BlockIndex) else (layout.dtype, layout.shape)
        index = index.for_all_sequences("MatMul and Softmax are").exact()
        self._indices = {index.device: index}

    @property
    def layout(self) -> torch.Tensor | BlockIndex:
        """The layout that this works on, which it read when it was made, in the given form: the `BlockIndex`, or a
        tensor of the given dtype and shape, unpacked at each call."""
        if isinstance(self._given, BlockIndex):
            return self._given
        dtype, shape = self._given
        return self._index.layout().to(dtype).expand((self._index.num_heads, -1, -1)).reshape(shape)

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
