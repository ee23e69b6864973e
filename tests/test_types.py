"""py.typed: what type checkers and editors learn of an installed ds_sparse."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import ds_sparse

ROOT = Path(__file__).parents[1]

SETTINGS = """\
[mypy]
strict = True
[mypy-deepspeed.*,numpy.*,pydantic.*,torch.*,transformers.*]
follow_imports = skip
"""
"""Of a client. The types of other packages are not ours to check, and take most of the time."""


def test_type_checkers_are_offered_each_public_name_and_no_other():
    """Under TYPE_CHECKING ds_sparse/__init__.py imports what it gives at run time."""
    tree = ast.parse((ROOT / "ds_sparse" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or "": node.module or "" for node in imports for alias in node.names}
    assert imported.keys() == ds_sparse._PUBLIC.keys()
    assert not [name for name, module in imported.items() if not f"{module}.".startswith(f"{ds_sparse._PUBLIC[name]}.")]


def test_an_interactive_session_is_offered_the_public_names_alone():
    assert [name for name in dir(ds_sparse) if not name.startswith("__")] == ds_sparse.__all__
    assert "__version__" in dir(ds_sparse)


@pytest.mark.slow("mypy reads all of the package")
def test_strict_mypy_takes_every_public_name_from_us_and_refuses_others(tmp_path: Path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    names = [f"ds_sparse.{name}" for name in (*ds_sparse.__all__, "nme")]
    (tmp_path / "program.py").write_text("\n".join(["import ds_sparse", "reveal_type(ds_sparse.sparsify)", *names]))
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    environment, command = os.environ | {"PYTHONPATH": str(ROOT)}, [sys.executable, "-m", "mypy", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert "ds_sparse.models.report.SparsifyReport" in lines[0]
    assert lines[1].endswith('Module has no attribute "nme"  [attr-defined]')
    assert lines[2].startswith("Found 1 error")


@pytest.mark.usefixtures("registry")
def test_a_program_with_types_runs():
    """test_style.py checks its types."""
    runpy.run_path(str(ROOT / "tests" / "typed_client.py"), run_name="__main__")
