"""The core without the packages that extras bring, and the sentence where one of them is needed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ds_sparse.tools.extras import EXTRAS, optional_imports

ROOT = Path(__file__).parents[1]
ABSENT = (*EXTRAS, "accelerate", "pandas", "tqdm")
# Python that finds none of these packages, as where they are not installed.
BLOCK = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
CORE = """
import torch, ds_sparse
import ds_sparse.cli.bench, ds_sparse.cli.check, ds_sparse.cli.draw
assert "torch._dynamo" not in sys.modules, "torch.compile takes seconds to import"
of_core = [name for name, module in ds_sparse._PUBLIC.items() if not module.startswith("integrations.")]
for name in of_core:
    getattr(ds_sparse, name)
query, key, value = torch.randn(3, 1, 2, 64, 16, requires_grad=True)
structure = ds_sparse.parse_sparse_attention({"mode": "fixed", "block": 16, "num_local_blocks": 2}, 2)
ds_sparse.block_sparse_attention(query, key, value, structure.make_layout(64)).sum().backward()
ds_sparse.SparseSelfAttention(structure, max_seq_length=64)(query, key, value).sum().backward()
ds_sparse.window_attention(query, key, value, 8).sum().backward()
ds_sparse.sparse_attn(query, key, value, ds_sparse.TokenIndex.from_mask(torch.eye(64) > 0)).sum().backward()
print("works")
"""
NEEDS = {
    "deepspeed": "ds_sparse.initialize",
    "transformers": "import ds_sparse.integrations.transformers",
    "matplotlib": "from ds_sparse.drawing import save_drawing; save_drawing(torch.eye(2), 16, 'a.png')",
    "psutil": "from ds_sparse.tools.extras import optional_imports\nwith optional_imports(): import psutil",
}
TRY = f"""
for program in {list(NEEDS.values())}:
    try:
        exec(program)
    except ImportError as error:
        print(error)
from ds_sparse.cli import main
print(main(["run", "train.py"]))
"""


def sentence_of(package: str) -> str:
    extra = EXTRAS[package]
    return f"This part of ds_sparse needs {package}, which is not installed: pip install 'ds_sparse[{extra}]'."


def test_the_core_works_without_what_extras_bring():
    """The core, what needs more, and `ds_sparse run`, in one Python without the packages."""
    command = [sys.executable, "-c", BLOCK + CORE + TRY]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sentences = [sentence_of(package) for package in NEEDS]
    assert ended.stdout.splitlines() == ["works", *sentences, f"ds_sparse run: {sentence_of('deepspeed')}", "2"]


def test_an_import_that_fails_otherwise_stays_what_it_is():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), optional_imports():
        import no_such_package  # noqa: F401


def test_each_extra_brings_its_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in [re.match(r"[\w-]+", requirement)[0] for requirement in extras[extra]]
