"""attn_implementation="ds_sparse" is registered when ds_sparse and Transformers are both imported."""

import subprocess
import sys

import pytest

LOAD = """
import sys, transformers
sizes = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
config = transformers.BertConfig(**sizes, sparse_attention={"mode": "fixed"})
model = transformers.AutoModel.from_config(config, attn_implementation="ds_sparse")
watching = [finder for finder in sys.meta_path if type(finder).__module__.startswith("ds_sparse")]
print(model.config._attn_implementation, watching)
"""


def output_of(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")


def test_the_name_is_known_where_ds_sparse_is_imported_first():
    """The tests of Transformers' models import in the other order."""
    assert output_of("import ds_sparse, importlib; importlib.reload(ds_sparse)" + LOAD)[0] == "ds_sparse []"


def test_importing_ds_sparse_imports_no_framework_and_watches_once():
    code = """
import importlib, sys
import ds_sparse
importlib.reload(ds_sparse)
importlib.util.find_spec("transformers")
print([name for name in ("torch", "transformers", "deepspeed", "matplotlib", "datasets") if name in sys.modules])
print(sum(type(finder).__module__ == "ds_sparse.tools.on_import" for finder in sys.meta_path))
"""
    assert output_of(code)[:2] == ["[]", "1"]


@pytest.mark.slow("a process")
def test_an_older_transformers_is_imported_without_us(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.57.6'")
    (package / "modeling_utils.py").write_text("class PreTrainedModel: pass")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ds_sparse, transformers.modeling_utils as m\n"
    code += "print(m.PreTrainedModel.__name__, 'ds_sparse.integrations.transformers' in sys.modules)"
    assert output_of(code)[0] == "PreTrainedModel False"


def test_each_action_for_a_module_runs_once(tmp_path):
    (tmp_path / "watched.py").write_text("there = 1")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from ds_sparse.tools.on_import import after_import
done = []
def first(): done.append("first")
def second(): done.append("second")
for action in (first, second, first):
    after_import("watched", "there", action)
import watched
print(done)
"""
    assert output_of(code)[0] == "['first', 'second']"
