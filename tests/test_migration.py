"""The code on the migration page runs, in its order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migration.md"


@pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
def test_the_code_on_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    exec("".join(blocks), {})
