"""The floors of the package: which of its modules may import which. The contracts stand in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
CHECK = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], no_cache=True))"


def test_imports_keep_the_contracts():
    command = [sys.executable, "-c", CHECK, str(PYPROJECT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PYPROJECT.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
