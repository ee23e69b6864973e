"""Facts that `ds_sparse report` finds out. Each part stands alone: the report is for what is broken."""

from __future__ import annotations

import os
import platform
import re
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..tools import hardware
from ..tools.hardware import Gpu
from ..tools.wording import reason

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "triton", "numpy")


@dataclass
class Library:
    """state: '' if it is loaded, else why not. missing: operators that it has to have and has not."""

    built: bool
    state: str = ""
    missing: list[str] = field(default_factory=list)


@dataclass
class Facts:
    """Facts of a machine and of what is installed. Attributes that end in `error` are sentences, '' where all is well.

    Attributes:
        installed: the version that pip has of ds_sparse; None: it is on the path only.
        torch_cuda: the version of CUDA that torch is built with; None: without.
        gpus: those of the driver.
        gpu: torch's name of the one that kernels run on; '' where torch can use none.
        driver_cuda: the latest CUDA that the driver serves, and runtime_cuda that of our library, as 13020.
        operations: by device, operation and dtype, the implementations that serve, the best first.
        others: by device, implementations that do not serve, and why.
    """

    version: str = __version__
    installed: str | None = None
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver()) or 'no glibc'}"
    packages: dict[str, str | None] = field(default_factory=dict)
    processor: str = ""
    cores: int = 0
    threads: int = 0
    features: list[str] = field(default_factory=list)
    instruction_set: str = ""
    cpu_limits: dict[str, str] = field(default_factory=dict)
    torch_error: str = ""
    torch_cuda: str | None = None
    torch_hip: str | None = None
    driver: str = "unknown"
    gpus: list[Gpu] = field(default_factory=list)
    gpu: str = ""
    gpu_capability: str = ""
    cuda_error: str = ""
    driver_cuda: int = 0
    runtime_cuda: int = 0
    has_machine_code: bool = True
    libraries: dict[str, Library] = field(default_factory=dict)
    operators_error: str = ""
    operations: dict[str, dict[str, dict[str, list[str]]]] = field(default_factory=dict)
    others: dict[str, dict[str, str]] = field(default_factory=dict)


def gather() -> Facts:
    """Looks at this machine and this process; raises nothing for what is broken."""
    facts = Facts(installed=_version("ds_sparse"), packages={name: _version(name) for name in PACKAGES})
    facts.processor, facts.features = hardware.processor(), hardware.features()
    facts.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = {name: os.environ.get(name, "") for name in ("ATEN_CPU_CAPABILITY", "DS_SPARSE_CPU")}
    facts.cpu_limits = {name: limit for name, limit in limits.items() if limit}
    facts.driver, facts.gpus = hardware.driver(), hardware.gpus()
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken installation fails in many ways
        facts.torch_error = without_paths(error)
        return facts
    facts.packages["torch"], facts.threads = torch.__version__, torch.get_num_threads()
    facts.torch_cuda, facts.torch_hip = torch.version.cuda, torch.version.hip
    _look_at_gpu(facts)
    _look_at_libraries(facts)
    _look_at_operations(facts)
    return facts


def without_paths(error: Exception) -> str:
    """An error in one line, with the names of files and without the folders that they lie in, which name users."""
    return re.sub(r"(?<![\w./])/(?!/)(?:[^\s:'\"(),]+/)+", "", reason(error)).rstrip(".")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _look_at_gpu(facts: Facts) -> None:
    import torch

    if facts.torch_cuda is None:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            facts.gpu = torch.cuda.get_device_name()
            facts.gpu_capability = "{}.{}".format(*torch.cuda.get_device_capability())
    except Exception as error:  # noqa: BLE001
        facts.cuda_error = without_paths(error).split(". ")[0]


def _look_at_libraries(facts: Facts) -> None:
    import torch

    from .. import native

    for name, path in (("CPU", native.CPU_LIBRARY), ("CUDA", native.CUDA_LIBRARY)):
        facts.libraries[name] = Library(path.exists(), _state(name, path, facts))
    try:
        from ..index.kernels import (
            GPU_OPERATORS,
            HOPPER_OPERATORS,
            INDEX_OPERATORS,
            OPERATORS,
            cuda_versions,
            has_machine_code,
            missing_kernels,
        )
    except Exception as error:  # noqa: BLE001
        facts.operators_error = without_paths(error)
        return
    facts.libraries["CPU"].missing = missing_kernels("cpu", OPERATORS + INDEX_OPERATORS)
    facts.instruction_set = native.instruction_set()
    if not facts.libraries["CUDA"].state:
        on_gpu = OPERATORS + INDEX_OPERATORS + HOPPER_OPERATORS + GPU_OPERATORS
        facts.libraries["CUDA"].missing = missing_kernels("cuda", on_gpu)
        try:
            facts.runtime_cuda, facts.driver_cuda = cuda_versions()
            facts.has_machine_code = not facts.gpu or has_machine_code(torch.device("cuda"))
        except (OSError, AttributeError) as error:
            facts.libraries["CUDA"].state = without_paths(error)


def _state(name: str, path: Path, facts: Facts) -> str:
    from .. import native

    if not path.exists():
        return "not built"
    if name == "CUDA" and facts.torch_cuda is None:
        return "not loaded, as this torch is without CUDA"
    try:
        native.load(path)
    except ImportError as error:
        return without_paths(error.__cause__ if isinstance(error.__cause__, OSError) else error)
    return ""


def _look_at_operations(facts: Facts) -> None:
    import torch

    from ..dispatch import IMPLEMENTATIONS, Call
    from ..dispatch.implementations import LIMITS
    from ..verify.variants import variants

    served = {"cpu": not facts.libraries["CPU"].state, "cuda": bool(facts.gpu) and not facts.libraries["CUDA"].state}
    for name in (name for name, is_served in served.items() if is_served and not facts.operators_error):
        device = torch.device(name)
        table = facts.operations[name] = {}
        for variant in variants(device):
            by_dtype = table.setdefault(variant.operation, {})
            names = by_dtype.setdefault(str(variant.dtype).removeprefix("torch."), [])
            if variant.implementation not in names:
                names.append(variant.implementation)
        limit, call = LIMITS[0], Call(device, torch.float16, 1)
        facts.others[name] = {
            i.name: limit.sentence(i, call)
            for those in IMPLEMENTATIONS.values()
            for i in those
            if not limit.holds(i, call)
        }
