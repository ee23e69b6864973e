"""Settings of torch for a time; each counts for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Sums are in a fixed order, where operations have one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def poisoned_memory() -> AbstractContextManager[None]:
    """Memory that torch hands out uninitialised holds NaN, as in this mode: an element that a kernel forgets shows."""
    return deterministic_algorithms()


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Sets the number of threads of an operation: for small tensors one is fastest, above all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
