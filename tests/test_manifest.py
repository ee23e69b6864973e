"""The source distribution: all that a build from it needs, on whichever machine it was made. The wheel: all of the
package."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import ds_sparse

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://example.org/ds_sparse"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this one, with an address: setuptools writes beside its setup.py."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked("."):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    (copy / "setup.py").unlink()
    text = (ROOT / "setup.py").read_text()
    text = re.sub(r'^REPOSITORY = ".*"$', f'REPOSITORY = "{REPOSITORY}"', text, flags=re.MULTILINE)
    (copy / "setup.py").write_text(text)
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


@pytest.fixture(scope="module")
def metadata(checkout: Path) -> Message:
    """The metadata of the package."""
    run_setup(checkout, "egg_info")
    return message_from_string((checkout / "ds_sparse.egg-info" / "PKG-INFO").read_text())


@pytest.fixture
def release() -> Callable:
    """A function of .ci/release."""
    return runpy.run_path(str(ROOT / ".ci" / "release")).__getitem__


def tracked(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def test_the_source_distribution_has_every_file_and_nothing_built(packed: set[str]):
    for folder in ("benchmarks", "csrc", "ds_sparse", "launcher", "examples", "configs", "tests", "docs", ".ci"):
        assert tracked(folder)
        assert not set(tracked(folder)) - packed
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".o", ".pyc"))]


def test_a_wheel_has_every_file_of_the_package_and_its_marker_of_types(installed: set[str]):
    assert "ds_sparse/py.typed" in installed
    assert not [name for name in installed if name.startswith("benchmarks")]
    assert set(tracked("ds_sparse")) | {f"ds_sparse/{name}" for name in tracked("launcher")} <= installed


def test_the_version_has_one_place_and_classifiers_are_versions_that_ran(metadata: Message):
    assert metadata["Version"] == ds_sparse.__version__
    classified = [
        name for name in metadata.get_all("Classifier") if name.startswith("Programming Language :: Python ::")
    ]
    (ran,) = [line for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line.startswith("| Python |")]
    for version in (name.rpartition(" ")[2] for name in classified if "Only" not in name):
        assert f"{version}: " in ran and f"{version}: nothing" not in ran


def test_what_an_index_shows_links_to_this_version_in_the_repository(metadata: Message):
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"Source, {REPOSITORY}" in metadata.get_all("Project-URL")
    links = re.findall(r'(?:\]\(|<img src=")([^)"]+)', metadata.get_payload())
    assert len(links) > 20
    for link in links:
        start = f"{REPOSITORY}/{'raw' if link.endswith('.png') else 'blob'}/v{ds_sparse.__version__}/"
        assert link.startswith(start) and (ROOT / link.removeprefix(start).partition("#")[0]).exists()


def test_a_release_is_tagged_pushed_and_its_wheel_and_sources_uploaded(release: Callable):
    name, tag = f"dist/ds_sparse-{ds_sparse.__version__}", f"v{ds_sparse.__version__}"
    assert [shlex.split(line) for line in release("COMMANDS").splitlines()[1:]] == [
        ["git", "tag", tag],
        ["git", "push", "origin", "main", tag],
        ["twine", "upload", f"{name}-py3-none-manylinux_2_28_x86_64.whl", f"{name}.tar.gz"],
    ]


def test_a_wheel_that_cannot_be_released_is_told_why(release: Callable, tmp_path: Path):
    wheel = tmp_path / f"ds_sparse-{ds_sparse.__version__}-py3-none-any.whl"
    assert list(release("of_wheel")(wheel)) == [f"{wheel.name}: missing; run .ci/wheel."]
    info = f"ds_sparse-{ds_sparse.__version__}.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: ds_sparse\nVersion: {ds_sparse.__version__}\n"
        )
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", "")
        files.writestr("large", os.urandom(16 * 10**6))
    problems = "\n".join(release("of_wheel")(wheel))
    assert "16.0 MB; make it smaller than 15 MB" in problems
    assert "ds_sparse/lib/libds_sparse_cuda.so is missing" in problems and "does not load" in problems


def test_a_source_distribution_that_lacks_files_is_told_which(release: Callable, tmp_path: Path):
    archive = tmp_path / "ds_sparse.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(ROOT / "setup.py", "ds_sparse/setup.py")
    problems = list(release("of_sources")(archive))
    assert f"{archive.name}: README.md is missing; name it in MANIFEST.in." in problems
    assert not any(": setup.py is" in problem for problem in problems)
