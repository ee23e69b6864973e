"""The README's own code does what the README says."""

import textwrap
from pathlib import Path

import pytest

import ds_sparse

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


@pytest.mark.usefixtures("registry")
def test_a_structure_of_your_own_is_a_mode():
    start = README.index('    @ds_sparse.register_sparsity("stripes")')
    code = README[start : README.index("After that, ", start)]
    exec(textwrap.dedent(code), {"ds_sparse": ds_sparse})
    structure = ds_sparse.parse_sparse_attention({"mode": "stripes", "every": 8}, num_heads=2)
    layout = structure.make_layout(256)
    assert layout.shape == (2, 16, 16)
    assert (layout[:, :, ::8] == 1).all() and layout.sum() == 2 * 16 * 2
