"""The floors of the package: which of its modules may import which. The contracts stand in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from arrows import arrows

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CHECK = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"


def test_imports_keep_the_contracts():
    command = [sys.executable, "-c", CHECK, str(PYPROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PYPROJECT.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rooms_are_joined_by_no_more_arrows_than_they_were():
    """A room that begins to know another makes both harder to read alone; with one arrow less, lower the number."""
    assert len(arrows()) == 103
