"""The machine, without torch: its processor, and the GPUs that NVIDIA's driver knows."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

FOR_16_BITS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16")
"""Features of processors for products of 16 bits."""

FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", *FOR_16_BITS, "asimd", "sve", "bf16")
"""Features of processors, as Linux names them, by which kernels here, or PyTorch's, are chosen."""

LEAST_CAPABILITY = 8.0
"""Compute capability of the first GPUs that kernels are for."""

PEAKS_OF_16_BITS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""FLOPs a second of dense products of 16-bit numbers by NVIDIA's data sheets, by the name that the driver has."""


class Gpu(NamedTuple):
    """capability: as NVIDIA writes it, such as '9.0'."""

    name: str
    capability: str
    memory: str


class Problem(NamedTuple):
    """A fault of a machine or an installation, in a sentence, and what to do about it."""

    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.what.removesuffix('.')}; {self.do}"


def driver_problem(runtime: int, driver: int) -> Problem | None:
    """A driver that is older than the CUDA library's major version of CUDA; versions as 13020."""
    major = runtime // 1000
    if driver // 1000 >= major:
        return None
    return Problem(
        f"ds_sparse's CUDA library is of CUDA {major}, and this machine's GPU driver serves CUDA {driver // 1000}."
        f"{driver % 1000 // 10} at most.",
        f"update the driver, or build ds_sparse from source with nvcc of CUDA {driver // 1000}.",
    )


def gpu_problem(gpu: str, capability: str, has_code: bool) -> Problem | None:
    """A GPU that is too old, or that the CUDA library has no machine code for."""
    if float(capability) < LEAST_CAPABILITY:
        return Problem(
            f"{gpu} has compute capability {capability}, and ds_sparse's kernels are for {LEAST_CAPABILITY} and later.",
            "move model and data to the CPU, or use a later GPU.",
        )
    if has_code:
        return None
    return Problem(
        f"ds_sparse's CUDA library was compiled for other GPUs than {gpu}, of compute capability {capability}.",
        f"compile it on this machine, or with TORCH_CUDA_ARCH_LIST='{capability}' set.",
    )


def processor() -> str:
    names = _told_by_linux("model name")
    return names or platform.machine()


def features() -> list[str]:
    """Names the `FEATURES` that the processor has."""
    told = (_told_by_linux("flags") or _told_by_linux("Features")).split()
    return [name for name in FEATURES if name in told]


def _told_by_linux(key: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def driver() -> str:
    """The version of NVIDIA's driver; 'unknown' where its own program does not say."""
    told = _told_by_driver("driver_version")
    return told[0][0] if told else "unknown"


def gpus() -> list[Gpu]:
    """Lists the GPUs of NVIDIA's driver, whether torch can use them or not; none where its own program does not say."""
    return [Gpu(*told) for told in _told_by_driver("name", "compute_cap", "memory.total") if len(told) == 3]


def _told_by_driver(*fields: str) -> list[list[str]]:
    """The fields of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[word.strip() for word in line.split(",")] for line in printed.splitlines() if line.strip()]
