"""Shares of a training step's time by purpose, from a trace of torch.profiler."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models.results import EXCHANGE, REDUCTION

ATTENTION, OPTIMIZER = "attention", "optimizer"
OTHER, IDLE = "other kernels", "no kernel"

COUNTED_FIRST = {
    "cpu": (ATTENTION, EXCHANGE, REDUCTION, OPTIMIZER, OTHER),
    "cuda": (ATTENTION, OPTIMIZER, OTHER, EXCHANGE, REDUCTION),
}
"""The part that time counts for where several run at once: on a GPU communication only where it is alone; on a
CPU operators are inside of others."""

KERNELS = {"cpu": ("cpu_op",), "cuda": ("kernel", "gpu_memcpy", "gpu_memset")}
OPTIMIZER_RANGES = {"cpu": "user_annotation", "cuda": "gpu_user_annotation"}
"""Categories of a trace's events."""

_OPTIMIZER_RANGE = "ds_sparse bench: optimizer"
_EXCHANGES = ("all_to_all", "alltoall", "sendrecv", "wait_tensor")
_COLLECTIVES = ("nccl", "c10d", "gloo")


class Interval(NamedTuple):
    """Microseconds from the beginning of the trace, and what runs then."""

    start: float
    end: float
    part: str


def optimizer_range() -> AbstractContextManager[Any]:
    """Around the optimizer's step, so that a profile knows it."""
    return record_function(_OPTIMIZER_RANGE)


def profile_of(step: Callable[[], object], milliseconds: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by where they go, with those in which nothing runs: what is left of `milliseconds`, the
    step's time without a profiler, which slows Python down."""
    on_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiler:
        step()
        if on_cuda:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    parts = shares(intervals(events, device.type), COUNTED_FIRST[device.type])
    return parts | {IDLE: max(0.0, milliseconds - sum(parts.values()))}


def intervals(events: Iterable[Mapping[str, Any]], device: str) -> Iterator[Interval]:
    """Intervals in which a trace's events ran."""
    timed = [event for event in events if "dur" in event]
    optimizer = [
        (event["ts"], event["ts"] + event["dur"])
        for event in timed
        if event.get("cat") == OPTIMIZER_RANGES[device] and event["name"] == _OPTIMIZER_RANGE
    ]
    for event in timed:
        if event.get("cat") in KERNELS[device]:
            start = event["ts"]
            is_optimizer = any(first <= start <= last for first, last in optimizer)
            yield Interval(start, start + event["dur"], OPTIMIZER if is_optimizer else part_of(event["name"]))


def part_of(name: str) -> str:
    """The part that a kernel or operator outside of the optimizer's step counts for."""
    name = name.lower()
    if "ds_sparse" in name:
        return ATTENTION
    if any(word in name for word in _EXCHANGES):
        return EXCHANGE
    return REDUCTION if any(word in name for word in _COLLECTIVES) else OTHER


def shares(found: Iterable[Interval], counted_first: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds of each part; where several run at once, those of the one that is counted first."""
    edges = sorted(
        edge for interval in found for edge in ((interval.start, 1, interval.part), (interval.end, -1, interval.part))
    )
    running: Counter[str] = Counter()
    spent = dict.fromkeys(counted_first, 0.0)
    before = 0.0
    for time, change, part in edges:
        current = next((name for name in counted_first if running[name]), None)
        if current is not None:
            spent[current] += (time - before) / 1e3
        running[part] += change
        before = time
    return spent
