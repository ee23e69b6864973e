"""The style of the Python sources. The rules stand in pyproject.toml, the versions of the tools in its extra `test`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from snippets import ROOT


@pytest.mark.parametrize(
    "command",
    ["ruff check .", "ruff format --check .", pytest.param("mypy", marks=pytest.mark.slow("mypy reads all sources"))],
)
def test_sources_keep_the_rules(command: str):
    tool, *arguments = command.split()
    pytest.importorskip(tool, reason=f"{tool} is not installed")
    command_line = [sys.executable, "-m", tool, *arguments]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}`.venv/bin/{command}` says this again."
