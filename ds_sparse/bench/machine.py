"""The machine: the time of a call, and the conditions that numbers depend on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..tools.hardware import FOR_16_BITS, driver, features, processor
from ..tools.terminal import Terminal
from ..tools.wording import counted

Key = TypeVar("Key", bound=Hashable)
Kind = TypeVar("Kind")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

GIB = 2**30

FORWARD, BACKWARD, TRAIN = "forward", "backward", "forward+backward"
DIRECTIONS = (FORWARD, BACKWARD, TRAIN)

NO_GRAPH = "CUDA graphs are a GPU's"

CALLS_ON_CUDA = 8
"""Calls between two events."""

CYCLES_PER_MS = 2_000_000
LONGEST_WAIT_MS = 100


def timed(call: Callable[[], object], device: torch.device, calls: int = CALLS_ON_CUDA) -> float:
    """Milliseconds of one call.

    On CUDA those of the device alone, mean of so many calls in a row: it is kept waiting until Python has issued them
    all. What they work on is in L2 as far as the call before left it there.
    """
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        issued_ms = (time.perf_counter() - start) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(min(2 * calls * issued_ms, LONGEST_WAIT_MS) * CYCLES_PER_MS))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls
    return wall_ms(call, device)


def wall_ms(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, what Python takes to issue it included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def time_of(
    call: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad: torch.Tensor | None,
    direction: str,
    device: torch.device,
) -> float:
    """Milliseconds of one call; of the gradients of all inputs, on a graph that is kept; or of both.

    The forward of inputs that require gradients is that of training, which keeps what the backward needs. A forward
    takes no `grad`.
    """
    if direction == FORWARD:
        return timed(lambda: call(*inputs), device)
    leaves = [x.detach().requires_grad_() for x in inputs]
    if direction == TRAIN:
        return timed(lambda: torch.autograd.grad(call(*leaves), leaves, grad), device)
    output = call(*leaves)
    return timed(lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True), device)


def captured(call: Callable[[], Kind], before: int = 1) -> tuple[torch.cuda.CUDAGraph, Kind]:
    """A CUDA graph of a call, and the result, which each replay writes anew; after so many calls without it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


class Repeated:
    """A call without arguments, and a CUDA graph of it, which is captured when it is first asked for, after so many
    calls without it. kept: the result of the graph, which each replay writes anew."""

    def __init__(self, call: Callable[[], Any], before: int = 1) -> None:
        self.call, self.before = call, before

    def __call__(self) -> Any:
        return self.call()

    @cached_property
    def graph(self) -> torch.cuda.CUDAGraph:
        graph, self.kept = captured(self.call, self.before)
        return graph

    def replay(self) -> Any:
        self.graph.replay()
        return self.kept


def in_turns(
    runs: Mapping[Key, Callable[[], float]], repeats: int, seconds: float, title: str
) -> dict[Key, list[float]]:
    """Calls the runs of a round one after the other, so that all meet the same machine; what each gives in each round.

    `repeats` rounds after one that does not count, or as many as begin within `seconds`, three at least.
    """
    times: dict[Key, list[float]] = {key: [] for key in runs}
    start = time.perf_counter()
    with Terminal().progress(repeats + 1, title) as done:
        for round_ in range(-1, repeats):
            if round_ >= 3 and time.perf_counter() - start > seconds:
                break
            for key, run in runs.items():
                elapsed = run()
                if round_ >= 0:
                    times[key].append(elapsed)
            done(title)
    return times


def in_three_digits(number: float) -> str:
    """Writes as many digits as mean something, but leaves none out before the point."""
    return f"{number:#.3g}".rstrip(".") if number < 999.5 else f"{number:.0f}"


def conditions(device: torch.device) -> dict[str, str]:
    """Names what numbers depend on besides the case."""
    if device.type == "cuda":
        described = {"machine": torch.cuda.get_device_name(device), "driver": driver()}
    else:
        parts = [
            processor(),
            torch.backends.cpu.get_cpu_capability(),
            *(name for name in features() if name in FOR_16_BITS),
        ]
        described = {"machine": ", ".join([*parts, counted(torch.get_num_threads(), "thread")])}
    date = datetime.now(UTC).date().isoformat()
    return described | {"torch": torch.__version__, "commit": commit(), "date": date}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed, and of cuDNN, which PyTorch brings; nothing for no packages."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if packages and torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def commit() -> str:
    """The checkout's commit, marked if there are changes on top of it; 'no checkout' for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "no checkout"
    return described.stdout.strip()
