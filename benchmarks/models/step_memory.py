"""What a GPU's memory is for in a training step."""

from __future__ import annotations

import torch

from ds_sparse.bench.machine import GIB


class MemoryMeter:
    """The most that was allocated while each of some spans was open, over what was allocated when it opened.

    Args:
        device: a CUDA GPU.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._open: dict[str, tuple[int, int]] = {}
        self.gib: dict[str, float] = {}
        torch.cuda.reset_peak_memory_stats(device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def open(self, name: str) -> None:
        self._cut()
        self._open[name] = self.allocated(), 0

    def close(self, name: str) -> None:
        self._cut()
        before, highest = self._open.pop(name)
        self.gib[name] = max(self.gib.get(name, 0.0), (highest - before) / GIB)

    def _cut(self) -> None:
        """The allocator has one mark of the highest, which all open spans share."""
        highest = torch.cuda.max_memory_allocated(self._device)
        self._open = {name: (before, max(top, highest)) for name, (before, top) in self._open.items()}
        torch.cuda.reset_peak_memory_stats(self._device)
