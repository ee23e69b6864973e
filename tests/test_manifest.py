"""The source distribution: all that a build from it needs, on whichever machine it was made. The wheel: all of the
package."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one: setuptools writes beside its setup.py."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked("."):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    return copy


def run_setup(checkout: Path, *command: str) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", *command],
        cwd=checkout, env=os.environ | {"DS_SPARSE_CUDA": "0"}, check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def packed(checkout: Path) -> set[str]:
    """The paths in a source distribution made without nvcc."""
    run_setup(checkout, "sdist")
    (archive,) = (checkout / "dist").iterdir()
    with tarfile.open(archive) as files:
        return {name.partition("/")[2] for name in files.getnames()}


@pytest.fixture(scope="module")
def installed(checkout: Path) -> set[str]:
    """The paths that a wheel installs, but for the libraries."""
    run_setup(checkout, "build_py", "--build-lib", "built")
    built = checkout / "built"
    return {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}


def tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_the_source_distribution_has_every_file_and_nothing_built(packed: set[str]):
    for folder in ("benchmarks", "csrc", "ds_sparse", "launcher", "examples", "configs", "tests", "docs"):
        assert tracked(folder)
        assert not set(tracked(folder)) - packed
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".o", ".pyc"))]


def test_a_wheel_has_every_file_of_the_package_and_its_marker_of_types(installed: set[str]):
    assert "ds_sparse/py.typed" in installed
    assert not [name for name in installed if name.startswith("benchmarks")]
    assert set(tracked("ds_sparse")) | {f"ds_sparse/{name}" for name in tracked("launcher")} <= installed
