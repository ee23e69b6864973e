"""The style of the Python sources. The rules stand in pyproject.toml, the versions of the tools in its extra `test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK, FORMAT, TYPES = ("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)


def run(tool: tuple[str, ...], *arguments: str, source: str | None = None) -> subprocess.CompletedProcess[str]:
    """A tool's answer about the checkout, or about a source that it reads."""
    pytest.importorskip(tool[0], reason=f"{tool[0]} is not installed")
    command = [sys.executable, "-m", *tool, *arguments]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [(*CHECK, "."), (*FORMAT, "."), pytest.param(TYPES, marks=pytest.mark.slow("mypy reads all of the package"))],
)
def test_sources_keep_the_rules(command: tuple[str, ...]):
    done = run(command)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}`.venv/bin/{' '.join(command)}` says this again."


@pytest.mark.parametrize(
    "tool, source, found",
    [
        (CHECK, "import os\n", "F401"),
        (CHECK, f"NAME = '{'long ' * 30}'\n", "E501"),
        (CHECK, "import torch\nimport json\nprint(json, torch)\n", "I001"),
        (FORMAT, "NAME = 'name'\n", ""),
    ],
)
def test_a_fault_is_found(tool: tuple[str, ...], source: str, found: str):
    done = run(tool, "--stdin-filename", "ds_sparse/new.py", "-", source=source)
    assert done.returncode == 1 and found in done.stdout + done.stderr


def test_a_wrong_type_is_found(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import ds_sparse\n\nds_sparse.BlockIndex.build(layout=1, block=16)\n")
    done = run(TYPES, str(script))
    assert done.returncode == 1 and '"int"; expected "Tensor"' in done.stdout
