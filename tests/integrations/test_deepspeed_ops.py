"""`deepspeed.ops.sparse_attention` and DeepSpeed's configuration as programs written for 0.3 to 0.19.6 use them."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import pkgutil
import random
import sys
import types

import deepspeed
import pytest
import torch
from deepspeed.runtime import config as runtime_config

import ds_sparse
from ds_sparse.integrations import deepspeed_ops

NAMES = {
    "matmul": ["MatMul"],
    "softmax": ["Softmax"],
    "sparsity_config": [
        "SparsityConfig", "DenseSparsityConfig", "FixedSparsityConfig", "VariableSparsityConfig",
        "BigBirdSparsityConfig", "BSLongformerSparsityConfig", "LocalSlidingWindowSparsityConfig",
    ],
    "sparse_self_attention": ["SparseSelfAttention"],
    "bert_sparse_self_attention": ["BertSparseSelfAttention"],
    "sparse_attention_utils": ["SparseAttentionUtils"],
}  # fmt: skip
TWELVE = [name for names in NAMES.values() for name in names]

FIXED = {
    "mode": "fixed", "block": 16, "different_layout_per_head": False, "num_local_blocks": 4, "num_global_blocks": 1,
    "attention": "bidirectional", "horizontal_global_attention": False, "num_different_global_patterns": 1,
}  # fmt: skip
# What DeepSpeed 0.19.6 returned for these blocks.
RETURNED = [
    ({}, FIXED),
    ({"mode": "fixed", "num_local_blocks": 8, "attention": "bidirectional"}, FIXED | {"num_local_blocks": 8}),
    ({"mode": "dense", "block": 32, "different_layout_per_head": True}, {"mode": "dense", "block": 32}),
    ({"mode": "dense", "attention": "bidirectional"}, {"mode": "dense", "block": 16}),
    (
        {"mode": "variable", "local_window_blocks": [1, 2], "horizontal_global_attention": True},
        {
            "mode": "variable", "block": 16, "different_layout_per_head": False, "num_random_blocks": 0,
            "local_window_blocks": [1, 2], "global_block_indices": [0], "global_block_end_indices": None,
            "attention": "bidirectional", "horizontal_global_attention": True,
        },
    ),
    (
        {"mode": "bigbird", "different_layout_per_head": True, "num_global_blocks": 2, "attention": "bidirectional"},
        {
            "mode": "bigbird", "block": 16, "different_layout_per_head": True, "num_random_blocks": 0,
            "num_sliding_window_blocks": 3, "num_global_blocks": 2,
        },
    ),
    (
        {"mode": "bslongformer", "global_block_indices": [0, 4], "global_block_end_indices": [2, 5]},
        {
            "mode": "bslongformer", "block": 16, "different_layout_per_head": False, "num_sliding_window_blocks": 3,
            "global_block_indices": [0, 4], "global_block_end_indices": [2, 5],
        },
    ),
]  # fmt: skip


def test_all_names_at_the_root_and_in_their_submodules():
    package = importlib.import_module("deepspeed.ops.sparse_attention")
    assert deepspeed.ops.sparse_attention is package and package.__name__ == "deepspeed.ops.sparse_attention"
    assert len(TWELVE) == 12
    for submodule, names in NAMES.items():
        module = importlib.import_module(f"deepspeed.ops.sparse_attention.{submodule}")
        assert isinstance(module, types.ModuleType) and module.__name__ == f"deepspeed.ops.sparse_attention.{submodule}"
        assert getattr(package, submodule) is module and module.__spec__.name == module.__name__
        for name in names:
            cls = getattr(ds_sparse, name)
            assert getattr(module, name) is getattr(package, name) is cls


def test_an_interactive_session_is_offered_the_public_names_alone():
    assert dir(deepspeed_ops) == deepspeed_ops.__all__
    at_the_root = {name for name in dir(deepspeed.ops.sparse_attention) if not name.startswith("__")}
    assert at_the_root == set(deepspeed.ops.sparse_attention.__all__)


def test_the_package_is_a_module_like_any_other():
    package = importlib.import_module("deepspeed.ops.sparse_attention")
    assert inspect.getsourcefile(package) == package.__file__
    assert "sparse_attention" in [module.name for module in pkgutil.iter_modules(deepspeed.ops.__path__)]
    found = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    assert {f"{package.__name__}.{name}" for name in (*NAMES, "sparse_attn_op", "trsrc")} == set(found)
    for module in (package, importlib.import_module("deepspeed.ops.sparse_attention.softmax")):
        assert importlib.reload(module) is module and module.Softmax is ds_sparse.Softmax


def test_names_of_deepspeeds_kernels_can_be_imported_and_say_what_to_use():
    from deepspeed.ops.sparse_attention import sparse_attn_op, trsrc
    from deepspeed.ops.sparse_attention.matmul import _sparse_matmul
    from deepspeed.ops.sparse_attention.softmax import _sparse_softmax

    with pytest.raises(AttributeError, match=r"_sparse_matmul was part of .* Use MatMul\(layout, block, mode\)"):
        _sparse_matmul.apply(None, None)
    with pytest.raises(AttributeError, match=r"Use Softmax\(layout, block\)"):
        _sparse_softmax.make_lut(None, 16, None)
    with pytest.raises(TypeError, match="sdd_segment was part of"):
        sparse_attn_op.sdd_segment(None, 4)
    with pytest.raises(AttributeError, match="softmax_fwd was part of"):
        trsrc.softmax_fwd.splitlines()


def test_deepspeed_says_that_sparse_attention_is_there():
    from deepspeed.ops.op_builder import SparseAttnBuilder
    from deepspeed.ops.op_builder.sparse_attn import SparseAttnBuilder as OfItsModule

    assert OfItsModule is SparseAttnBuilder
    assert SparseAttnBuilder().is_compatible(verbose=True) and deepspeed.ops.__compatible_ops__["sparse_attn"]
    assert SparseAttnBuilder().load() is importlib.import_module("deepspeed.ops.sparse_attention.sparse_attn_op")


def test_a_library_that_is_missing_is_not_compatible(monkeypatch):
    monkeypatch.delitem(sys.modules, "deepspeed.ops.sparse_attention.sparse_attn_op")
    monkeypatch.setitem(sys.modules, "ds_sparse.ops", None)
    assert not deepspeed.ops.op_builder.SparseAttnBuilder().is_compatible()


def test_the_constants_are_where_deepspeed_had_them():
    from deepspeed.runtime import constants

    for module in (constants, runtime_config):
        assert (module.SPARSE_ATTENTION, module.SPARSE_MODE, module.SPARSE_MODE_DEFAULT) == (
            "sparse_attention", "mode", "fixed",
        )  # fmt: skip
        assert (module.SPARSE_BSLONGFORMER_MODE, module.SPARSE_ATTENTION_TYPE) == ("bslongformer", "attention")
        assert module.SPARSE_NUM_RANDOM_BLOCKS_DEFAULT == 0 and module.SPARSE_GLOBAL_BLOCK_INDICES_DEFAULT == [0]
    assert len([name for name in vars(constants) if name.startswith("SPARSE_")]) == 32


@pytest.fixture
def real_package(tmp_path, monkeypatch):
    """A DeepSpeed that still has the package and the functions."""
    folder = tmp_path / "sparse_attention"
    folder.mkdir()
    (folder / "__init__.py").write_text("REAL = True\n")
    (folder / "matmul.py").write_text("class MatMul: pass\n")
    for name in [name for name in sys.modules if name.startswith("deepspeed.ops.sparse_attention")]:
        monkeypatch.delitem(sys.modules, name)
    for owner, name in (
        (deepspeed.ops, "sparse_attention"), (runtime_config, "get_sparse_attention"),
        (runtime_config.DeepSpeedConfig, "__init__"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    without_ours = [path for path in deepspeed.ops.__path__ if path != deepspeed_ops.OVERLAY]
    monkeypatch.setattr(deepspeed.ops, "__path__", [*without_ours, str(tmp_path)])
    monkeypatch.setattr(runtime_config, "get_sparse_attention", lambda param_dict: "theirs")
    yield
    for name in [name for name in sys.modules if name.startswith("deepspeed.ops.sparse_attention")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("real_package")
def test_a_deepspeed_that_has_the_package_keeps_it_unless_asked():
    deepspeed_ops.register()
    theirs = importlib.import_module("deepspeed.ops.sparse_attention")
    assert theirs.REAL and runtime_config.get_sparse_attention({}) == "theirs"
    deepspeed_ops.register(replace=True)
    ours = importlib.import_module("deepspeed.ops.sparse_attention.matmul")
    assert ours.MatMul is ds_sparse.MatMul and runtime_config.get_sparse_attention({}) is None
    assert not hasattr(importlib.import_module("deepspeed.ops.sparse_attention"), "REAL")


@pytest.mark.usefixtures("real_package")
def test_a_folder_that_an_older_deepspeed_left_is_not_the_package(tmp_path):
    for path in (tmp_path / "sparse_attention").iterdir():
        path.unlink()
    deepspeed_ops.register()
    assert importlib.import_module("deepspeed.ops.sparse_attention.matmul").MatMul is ds_sparse.MatMul


def test_registering_again_changes_nothing():
    before = runtime_config.DeepSpeedConfig.__init__, sys.modules["deepspeed.ops.sparse_attention"]
    deepspeed_ops.register()
    assert before == (runtime_config.DeepSpeedConfig.__init__, sys.modules["deepspeed.ops.sparse_attention"])


@pytest.mark.parametrize("name", NAMES["sparsity_config"][1:])
@pytest.mark.filterwarnings("ignore::ds_sparse.SparsityWarning")
def test_structures_can_be_pickled_and_old_pickles_load(name):
    structure = getattr(deepspeed.ops.sparse_attention, name)(num_heads=2)
    assert vars(pickle.loads(pickle.dumps(structure))) == vars(structure)
    # As DeepSpeed's class was pickled: under its old name, without the attributes that are ours.
    state = {key: value for key, value in vars(structure).items() if key not in ("seed", "causal", "strict_causal")}
    old = f"cdeepspeed.ops.sparse_attention.sparsity_config\n{name}\n".encode()
    old += b")\x81" + pickle.dumps(state, 0)[:-1] + b"b."
    loaded = pickle.loads(old)
    assert type(loaded) is type(structure)
    random.seed(0)
    layout = structure.make_layout(256)
    random.seed(0)
    assert torch.equal(loaded.make_layout(256), layout)


@pytest.mark.parametrize("block, returned", RETURNED, ids=lambda value: value.get("mode", "no mode"))
def test_the_configuration_shows_the_block_as_deepspeed_did(block, returned, tmp_path):
    content = {"train_batch_size": 1, "sparse_attention": block}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert deepspeed.DeepSpeedConfig(content).sparse_attention == returned
    assert deepspeed.DeepSpeedConfig(str(path)).sparse_attention == returned
    assert runtime_config.get_sparse_attention(content) == returned
    assert getattr(runtime_config, f"get_sparse_{returned['mode']}_config")(block) == returned
    assert runtime_config.get_sparse_attention_mode(block) == returned["mode"]
    assert runtime_config.get_sparse_attention_type(block) == block.get("attention", "bidirectional")
    assert content["sparse_attention"] == block


def test_what_is_returned_builds_the_structure_and_belongs_to_the_caller_and_is_none_without_a_block():
    assert deepspeed.DeepSpeedConfig({"train_batch_size": 1}).sparse_attention is None
    assert runtime_config.get_sparse_attention({}) is None
    content = {"train_batch_size": 1, "sparse_attention": {"mode": "variable"}}
    for _ in range(2):
        config = deepspeed.DeepSpeedConfig(content)
        assert config.sparse_attention.pop("mode") == "variable"
        config.sparse_attention["global_block_indices"].append(3)
        structure = ds_sparse.VariableSparsityConfig(num_heads=2, **config.sparse_attention)
        assert structure.global_block_indices == [0, 3]


def test_keys_that_deepspeed_dropped_are_kept_where_they_change_something():
    block = {"mode": "bigbird", "attention": "unidirectional", "seed": 3, "causal": False}
    kept = runtime_config.get_sparse_attention({"sparse_attention": block})
    assert {key: kept.get(key) for key in block} == block | {"causal": None}
    local = runtime_config.get_sparse_attention({"sparse_attention": {"mode": "local_sliding_window", "block": 32}})
    assert local == {"mode": "local_sliding_window", "block": 32}


@pytest.mark.parametrize(
    "block, sentence", [({"mode": "bigbrid"}, 'Did you mean "bigbird"'), (None, "wanted an object")]
)
def test_a_wrong_block_is_an_error_that_names_the_file_and_deepspeeds_own_stay(block, sentence, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 1, "sparse_attention": block}))
    with pytest.raises(ds_sparse.SparseAttentionConfigError, match=f"ds.json.*{sentence}"):
        deepspeed.DeepSpeedConfig(str(path))
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="Apex"):
        deepspeed.DeepSpeedConfig({"train_batch_size": 1, "amp": {}, "sparse_attention": {}})
