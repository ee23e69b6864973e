"""How much memory there is: what can never fit is refused in words, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SMALL = 1 << 30


def machine_memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_too_large(what: Callable[[], str], size: int, device: torch.device, instead: str) -> None:
    """Raises MemoryError where something of so many bytes is larger than all memory of the device.

    Args:
        what: gives the words, as in "A band of 3 numbers a token"; a graph of torch.compile that wrote the number out
            would be of that number alone.
        instead: what to do.
    """
    if size <= _SMALL or device.type not in ("cpu", "cuda"):
        return
    have, where = machine_memory(), "this machine has"
    if device.type == "cuda":
        import torch

        have, where = torch.cuda.get_device_properties(device).total_memory, f"{device} has"
    if size > have:
        raise MemoryError(f"{what()} takes {size >> 30:,} GiB, and {where} {have >> 30:,} GiB; {instead}.")
