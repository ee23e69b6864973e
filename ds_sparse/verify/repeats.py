"""Repeats a call while memory is busy: results have to be the same bits.

A race that shows once in a thousand calls passes a comparison; it shows here. On a GPU another stream copies all the
while; on the CPU other threads make the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from ..tools.torch_settings import cpu_threads

THREADS = 3
"""Threads that make the same call, on the CPU."""

COPIED = 2**28
"""Bytes that keep a GPU's memory busy."""

Run = Callable[[], Sequence[Tensor]]
Busy = Callable[[], None]


@contextmanager
def busy_memory(device: torch.device) -> Iterator[Busy]:
    """Yields what keeps a GPU's memory busy for the next call; on the CPU it does nothing: threads make that call."""
    if device.type == "cpu":
        yield lambda: None
        return
    stream, source = torch.cuda.Stream(device), torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    torch.cuda.synchronize(device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                target.copy_(source, non_blocking=True)

    yield copy
    torch.cuda.synchronize(device)


def differing(first: Sequence[Tensor], run: Run, device: torch.device, repeats: int, busy: Busy) -> str:
    """Says which repeat differs from the first call's results, and where; "" if none does."""
    for number, results in enumerate(_repeated(run, device, repeats, busy)):
        for place, (one, other) in enumerate(zip(first, results, strict=True)):
            if not torch.equal(one, other):
                count = int((one != other).sum())
                return f"repeat {number + 1} differs in {count} of {one.numel()} numbers of result {place}"
    return ""


def _repeated(run: Run, device: torch.device, repeats: int, busy: Busy) -> Iterator[Sequence[Tensor]]:
    if device.type == "cpu":
        with cpu_threads(2), ThreadPoolExecutor(THREADS) as threads:
            yield from [task.result() for task in [threads.submit(run) for _ in range(repeats)]]
        return
    for _ in range(repeats):
        busy()
        yield run()
