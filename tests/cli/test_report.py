"""`ds_sparse report`: what it says of this machine, of broken installations, and what it advises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ds_sparse
from ds_sparse.cli import main
from ds_sparse.cli._facts import Facts, Library, _state, gather, without_paths
from ds_sparse.cli._problems import problems
from ds_sparse.cli.report import lines
from ds_sparse.tools.hardware import Gpu

PACKAGE = Path(ds_sparse.__file__).parent
H200 = Gpu("NVIDIA H200", "9.0", "143771 MiB")
RIGHT = Facts(
    packages={"torch": "2.13.0"},
    torch_cuda="13.0",
    driver="580.1",
    gpus=[H200],
    gpu="NVIDIA H200",
    gpu_capability="9.0",
    libraries={"CPU": Library(True), "CUDA": Library(True)},
    driver_cuda=13010,
    runtime_cuda=13020,
)


def report_of(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The report of the package that lies in a folder, as a process."""
    found = os.environ | {"PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""} | environment
    command = [sys.executable, "-m", "ds_sparse", "report", *words]
    return subprocess.run(command, cwd=folder, env=found, capture_output=True, text=True, check=False)


def copied(folder: Path) -> Path:
    """The package without its libraries."""
    shutil.copytree(PACKAGE, folder / "ds_sparse", ignore=shutil.ignore_patterns("lib", "__pycache__", "results"))
    (folder / "ds_sparse" / "lib").mkdir()
    return folder


def test_a_report_fits_an_issue_and_names_no_folder(capsys):
    assert main(["report"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"ds_sparse {ds_sparse.__version__}, Python ")
    assert f"torch {torch.__version__}" in printed and "CPU: loaded, with all operators" in printed
    assert "float64 by cpu" in printed.replace("\n    ", " ")
    assert len(printed.splitlines()) <= 40
    assert str(Path.home()) not in printed and str(PACKAGE.parent) not in printed


def test_json_has_every_fact_and_the_problems(capsys):
    assert main(["report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(Facts.__dataclass_fields__) | {"problems"} == found.keys()
    assert found["operations"]["cpu"]["sdd"]["float32"] == ["cpu"]
    assert "hopper" in found["others"]["cpu"]


SLOW = pytest.mark.slow("starts a process with torch")


@SLOW
@pytest.mark.parametrize(
    ("name", "limit", "runs", "problem"),
    [
        ("ATEN_CPU_CAPABILITY", "default", "portable", "which bounds"),
        ("DS_SPARSE_CPU", "portable", "portable", "which bounds"),
        ("DS_SPARSE_CPU", "sse9", "", "which is no instruction set that this machine runs"),
    ],
)
def test_the_instruction_set_is_that_of_the_environment(name, limit, runs, problem):
    found = json.loads(report_of(PACKAGE.parent, "--json", **{name: limit}).stdout)
    assert found["instruction_set"] == runs
    assert f"{name} is '{limit}', {problem}" in found["problems"][-1]["what"]


def test_without_a_library_it_says_how_to_build_one(tmp_path):
    done = report_of(copied(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "  CPU: not built" in done.stdout and "with a C++ compiler present" in done.stdout
    assert str(tmp_path) not in done.stdout


@SLOW
def test_a_library_that_does_not_load_is_named_with_the_loaders_reason(tmp_path):
    (copied(tmp_path) / "ds_sparse" / "lib" / "libds_sparse_cpu.so").write_bytes(b"no library")
    done = report_of(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "problem: The CPU library does not load: OSError: libds_sparse_cpu.so: file too short." in done.stdout
    assert "do: build ds_sparse again beside this torch" in done.stdout
    assert str(tmp_path) not in done.stdout
    command = [sys.executable, "-c", "import ds_sparse.ops"]
    found = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, check=False)
    assert b"ImportError: ds_sparse's native library libds_sparse_cpu.so does not load beside torch" in done.stderr


def test_a_file_that_is_no_library_is_known_by_the_loaders_reason(tmp_path):
    file = tmp_path / "libds_sparse_cpu.so"
    file.write_bytes(b"no library")
    assert _state("CPU", file, RIGHT) == "OSError: libds_sparse_cpu.so: file too short"


def test_a_torch_that_cannot_be_imported_is_the_problem(tmp_path):
    (copied(tmp_path) / "torch.py").write_text("raise ImportError('/home/me/lib/libcudart.so.13: cannot open')")
    done = report_of(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "problem: torch cannot be imported: ImportError: libcudart.so.13: cannot open." in done.stdout


def test_nothing_is_advised_where_all_is_well():
    assert problems(RIGHT) == []
    assert "1 of 143771 MiB; compute capability 9.0; driver 580.1, which serves CUDA 13.1; torch of CUDA 13.0" in (
        "\n".join(lines(RIGHT))
    )


@pytest.mark.parametrize(
    "changes, what, do",
    [
        ({"torch_cuda": None, "gpu": "", "gpu_capability": ""}, "this torch is without CUDA", "a torch with CUDA"),
        (
            {"gpu": "", "cuda_error": "RuntimeError: No CUDA GPUs are available"},
            "torch cannot use it: RuntimeError: No CUDA GPUs",
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            {"libraries": {"CPU": Library(True), "CUDA": Library(False, "not built")}},
            "is not built",
            "DS_SPARSE_CUDA=1",
        ),
        (
            {"libraries": {"CPU": Library(True), "CUDA": Library(True, "OSError: undefined symbol: x")}},
            "no operation runs: OSError: undefined symbol: x.",
            "DS_SPARSE_CUDA=0",
        ),
        (
            {"libraries": {"CPU": Library(True, "", ["transpose"]), "CUDA": Library(True)}},
            "lacks transpose: it is of another version",
            "build ds_sparse again",
        ),
        ({"operators_error": "RuntimeError: no operator"}, "RuntimeError: no operator.", "build ds_sparse again"),
        (
            {"driver_cuda": 12080},
            "is of CUDA 13, and this machine's GPU driver serves CUDA 12.8 at most",
            "update the driver",
        ),
        ({"has_machine_code": False}, "compiled for other GPUs than NVIDIA H200", "TORCH_CUDA_ARCH_LIST='9.0' set"),
        ({"gpu_capability": "7.5"}, "has compute capability 7.5", "move model and data to the CPU"),
        ({"features": ["amx_bf16"], "instruction_set": "avx512"}, "Linux does not let this process", "arch_prctl"),
        ({"cpu_limits": {"DS_SPARSE_CPU": "sse9"}}, "is 'sse9', which is no instruction set that this", "unset it"),
        ({"torch_hip": "7.0", "gpus": [], "gpu": ""}, "AMD GPUs", "NVIDIA GPU"),
        ({"installed": "0.0.9"}, "pip has ds_sparse 0.0.9", "PYTHONPATH"),
        ({"packages": {"torch": "2.10.1+cu128"}}, "torch is 2.10.1+cu128, and ds_sparse takes 2.11", "torch>=2.11"),
        ({"packages": {"transformers": "4.57.0"}}, "ds_sparse takes 5 and later", "transformers>=5"),
    ],
)
def test_each_problem_has_a_remedy(changes, what, do):
    (found,) = problems(replace(RIGHT, **changes))
    assert what in found.what and do in found.do
    assert found.what.endswith(".")


def test_names_of_files_stay_and_folders_go():
    error = OSError("/home/me/venv/lib/python3.11/ds_sparse/lib/a.so: undefined symbol: _ZN3c10, see https://b.org/c")
    assert without_paths(error) == "OSError: a.so: undefined symbol: _ZN3c10, see https://b.org/c"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_gpu_is_named_with_what_serves_it():
    facts = gather()
    assert facts.gpu == torch.cuda.get_device_name() and facts.gpus and problems(facts) == []
    best = "hopper" if torch.cuda.get_device_capability()[0] == 9 else "portable"
    assert facts.operations["cuda"]["block_sparse_attention"]["bfloat16"][0] == best
