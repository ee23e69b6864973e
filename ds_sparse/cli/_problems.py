"""Problems of a machine or an installation, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterator

from ..tools.hardware import Problem, driver_problem, gpu_problem
from ._facts import Facts

BUILD = "build ds_sparse again beside this torch: pip install --no-build-isolation --force-reinstall --no-deps ."
LEAST_VERSIONS = {"torch": (2, 11), "deepspeed": (0, 19, 7), "transformers": (5,)}


def problems(facts: Facts) -> list[Problem]:
    """Problems and remedies, what hinders most first."""
    if facts.torch_error:
        return [Problem(f"torch cannot be imported: {facts.torch_error}.", "install torch again, 2.11 or later.")]
    return [*_of_versions(facts), *_of_libraries(facts), *_of_gpus(facts), *_of_cpu(facts)]


def _of_versions(facts: Facts) -> Iterator[Problem]:
    if facts.installed not in (None, facts.version):
        yield Problem(
            f"pip has ds_sparse {facts.installed}, and {facts.version} is imported.",
            "install this one, or take its folder from PYTHONPATH.",
        )
    for name, least in LEAST_VERSIONS.items():
        given = facts.packages.get(name)
        if given is not None and _numbers(given)[: len(least)] < least:
            wanted = ".".join(map(str, least))
            yield Problem(
                f"{name} is {given}, and ds_sparse takes {wanted} and later.", f"pip install '{name}>={wanted}'."
            )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".") if part.isdecimal())


def _of_libraries(facts: Facts) -> Iterator[Problem]:
    cpu, cuda = facts.libraries["CPU"], facts.libraries["CUDA"]
    if not cpu.built:
        yield Problem(
            "The CPU library is not built; no operation runs, on a GPU neither.",
            "install ds_sparse with a C++ compiler present: pip install --no-build-isolation . in its folder.",
        )
    elif cpu.state:
        yield Problem(f"The CPU library does not load: {cpu.state}.", f"{BUILD}")
    if cuda.built and cuda.state and facts.torch_cuda is not None:
        yield Problem(
            f"The CUDA library does not load, so that no operation runs: {cuda.state}.",
            f"{BUILD} DS_SPARSE_CUDA=0 before it leaves the library out.",
        )
    missing = {name: library.missing for name, library in facts.libraries.items() if library.missing}
    for name, operators in missing.items():
        yield Problem(f"The {name} library lacks {', '.join(operators)}: it is of another version of ds_sparse.", BUILD)
    if facts.operators_error and not missing and not any(x.built and x.state for x in (cpu, cuda)) and cpu.built:
        yield Problem(
            f"Operators cannot be imported: {facts.operators_error}. The libraries may be of another version.", BUILD
        )


def _of_gpus(facts: Facts) -> Iterator[Problem]:
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus})) or facts.gpu
    if facts.torch_hip is not None:
        yield Problem("torch is built for AMD GPUs, which have no kernels here.", "use an NVIDIA GPU, or the CPU.")
    elif facts.gpus and facts.torch_cuda is None:
        yield Problem(
            f"There is a GPU ({names}), and this torch is without CUDA.",
            "install a torch with CUDA (pytorch.org names the command), then build ds_sparse again.",
        )
    elif facts.gpus and not facts.gpu:
        yield Problem(
            f"There is a GPU ({names}), and torch cannot use it: {facts.cuda_error}.",
            f"update the driver ({facts.driver}) to one for CUDA {facts.torch_cuda}, or look at CUDA_VISIBLE_DEVICES.",
        )
    of_gpu = gpu_problem(facts.gpu, facts.gpu_capability, facts.has_machine_code) if facts.gpu else None
    if facts.gpu and not facts.libraries["CUDA"].built and of_gpu is None:
        of_gpu = Problem(
            f"torch can use {facts.gpu}, and the CUDA library is not built: operations run on the CPU alone.",
            "install nvcc, and reinstall with DS_SPARSE_CUDA=1 set before pip install --no-build-isolation .",
        )
    if of_gpu is not None:
        yield of_gpu
    if facts.driver_cuda and (of_driver := driver_problem(facts.runtime_cuda, facts.driver_cuda)):
        yield of_driver


def _of_cpu(facts: Facts) -> Iterator[Problem]:
    for name, limit in facts.cpu_limits.items():
        if name == "DS_SPARSE_CPU" and not facts.instruction_set:
            yield Problem(
                f"{name} is {limit!r}, which is no instruction set that this machine runs: no operation runs on it.",
                "unset it.",
            )
        else:
            yield Problem(
                f"{name} is {limit!r}, which bounds the instructions that CPU kernels use.",
                "unset it, unless you mean it.",
            )
    if "amx_bf16" in facts.features and facts.instruction_set == "avx512" and not facts.cpu_limits:
        yield Problem(
            "The processor multiplies bf16 in tiles (amx_bf16), and Linux does not let this process use them: bf16 on "
            "the CPU is slower than it could be.",
            "run on Linux 5.16 or later; in a container or sandbox, let it call arch_prctl.",
        )
