"""Training steps of models beside one another: each is made and verified to run, then all are timed in turns."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ds_sparse.bench.machine import CALLS_ON_CUDA, GIB, in_turns, timed, wall_ms
from ds_sparse.bench.reasons import in_short

Step = Callable[[], object]

ROUND_MS = 100
"""What a round of a step takes at least on a GPU: as many steps as that, at most `CALLS_ON_CUDA`."""


@dataclass(frozen=True)
class Measured:
    """Attributes:
    peak_gib: memory on the GPU at its highest during a step, with what the step was made of; None on a CPU.
    reason: why there is no time.
    """

    milliseconds: float | None = None
    peak_gib: float | None = None
    rounds: int = 0
    reason: str = ""


def measure_steps(
    make: Mapping[str, Callable[[], Step]],
    wrong: Mapping[str, str],
    device: torch.device,
    repeats: int,
    seconds: float,
    title: str,
) -> dict[str, Measured]:
    """Times steps in turns: `repeats` rounds, or as many as begin within `seconds`, three at least. One that takes
    longer than `seconds` by itself is timed once.

    Args:
        make: by name, what makes a step; what it raises is the reason why that one has no time.
        wrong: reasons why some are not even made.

    Returns:
        By name, in the order of `make`.
    """
    measured: dict[str, Measured] = {}
    runs: dict[str, Callable[[], float]] = {}
    for name, made in make.items():
        if name in wrong:
            measured[name] = Measured(reason=wrong[name])
            continue
        try:
            step, measured[name] = tried(made, device)
            if measured[name].milliseconds <= seconds * 1e3:
                runs[name] = partial(time_unless_failed, measured, name, step, device)
            del step
        except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
            measured[name] = Measured(reason=in_short(error))
        release_memory(device)
    for name, samples in in_turns(runs, repeats, seconds, title).items():
        found = measured[name]
        if not found.reason:
            measured[name] = Measured(statistics.median(samples), found.peak_gib, len(samples))
    return measured


def tried(make: Callable[[], Step], device: torch.device) -> tuple[Step, Measured]:
    """A step, after two of them: the memory of the first, which may compile something, and the time of the second."""
    on_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    step = make()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = (torch.cuda.max_memory_allocated(device) - before) / GIB if on_cuda else None
    return step, Measured(wall_ms(step, device), peak, 1)


def time_unless_failed(measured: dict[str, Measured], name: str, step: Step, device: torch.device) -> float:
    """Milliseconds of one step; of one that fails, the reason is noted, and it is not called again."""
    if measured[name].reason:
        return float("nan")
    calls = max(1, min(CALLS_ON_CUDA, round(ROUND_MS / measured[name].milliseconds)))
    try:
        return timed(step, device, calls)
    except Exception as error:  # noqa: BLE001 - whatever stops one is a line of the table
        measured[name] = Measured(reason=in_short(error))
        return float("nan")


def release_memory(device: torch.device) -> None:
    """What nobody holds any more is the GPU's again, so that the next step finds it in one piece."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
