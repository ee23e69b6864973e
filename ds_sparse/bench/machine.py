"""What every benchmark needs of the machine: the time of a call, the rates it cannot pass, what to say of it."""

from __future__ import annotations

import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

CALLS_ON_CUDA = 8
"""Calls between two events: so many that the device never waits for Python."""


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        for _ in range(CALLS_ON_CUDA):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / CALLS_ON_CUDA
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Ceilings:
    """Rates that a kernel cannot pass: those of a large copy and of a large matrix product, measured here."""

    bytes_per_ms: float
    flops_per_ms: float

    @classmethod
    @functools.cache  # once a process: the cases of a grid are held to the same rates
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        copied = torch.empty(2**31, dtype=torch.uint8, device=device)
        target = torch.empty_like(copied)
        copy_ms = statistics.median(timed(lambda: target.copy_(copied), device) for _ in range(5))
        side = 8192
        a = torch.randn(side, side, device=device, dtype=dtype)
        product_ms = statistics.median(timed(lambda: a @ a, device) for _ in range(5))
        return cls(2 * copied.numel() / copy_ms, 2 * side**3 / product_ms)

    def floor(self, nbytes: float, flops: float) -> float:
        """Milliseconds that one kernel needs at least."""
        return max(nbytes / self.bytes_per_ms, flops / self.flops_per_ms)


def conditions(device: torch.device) -> dict[str, str]:
    """What the numbers depend on besides the case."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {"machine": machine, "torch": torch.__version__, "commit": commit()}


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


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
