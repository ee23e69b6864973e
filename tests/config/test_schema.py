"""The JSON schema, and the configurations of the repository, which it holds for."""

import json
from pathlib import Path

import jsonschema
import pytest

from ds_sparse.config import SparseAttentionConfigError, json_schema, load_config, parse_sparse_attention
from ds_sparse.sparsity import SparsityConfig, register_sparsity

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path for path in CONFIGS.glob("*.json") if "schema" not in path.name)


@pytest.mark.usefixtures("registry")
def test_the_schema_has_registered_modes():
    @register_sparsity("strided")
    class Strided(SparsityConfig):
        def __init__(self, num_heads, block=16, stride: int = 2):
            super().__init__(num_heads, block)

        def make_layout(self, seq_len):
            return self.setup_layout(seq_len)

    stride = json_schema()["$defs"]["strided"]["properties"]["stride"]
    assert stride == {"type": "integer", "default": 2}


def test_the_committed_schema_is_current():
    committed = json.loads((CONFIGS / "sparse_attention.schema.json").read_text())
    assert committed == json_schema(), "run: ds_sparse schema > configs/sparse_attention.schema.json"


def test_the_schema_is_a_schema_with_descriptions_and_defaults():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for mode, definition in schema["$defs"].items():
        for key, entry in definition["properties"].items():
            assert key == "mode" or entry["description"], (mode, key)
    assert schema["$defs"]["bigbird"]["properties"]["num_random_blocks"]["default"] == 0
    assert schema["$defs"]["variable"]["properties"]["local_window_blocks"]["default"] == [4]
    assert schema["$defs"]["fixed"]["properties"]["attention"]["enum"] == ["bidirectional", "unidirectional"]


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"num_random_blocks": 0, "local_window_blocks": [4], "global_block_end_indices": None},
        {"mode": "dense"},
        {"mode": "variable", "global_block_end_indices": [3]},
        {"mode": "bigbird", "seed": 1},
    ],
    ids=str,
)
def test_the_schema_takes_what_the_reader_takes(block):
    parse_sparse_attention(block, 4)
    jsonschema.validate({"train_batch_size": 8, "sparse_attention": block}, json_schema())


@pytest.mark.parametrize(
    "block",
    [
        None,
        {"blok": 16},
        {"block": "16"},
        {"block": 24},
        {"mode": "fixd"},
        {"num_random_blocks": 2},
        {"mode": "dense", "attention": "unidirectional"},
        {"mode": "variable", "local_window_blocks": []},
        {"mode": "bigbird", "num_global_blocks": -1},
        {"attention": "both"},
        {"num_heads": 4},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_reader_refuses(block):
    with pytest.raises(SparseAttentionConfigError):
        parse_sparse_attention(block, 4)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sparse_attention": block}, json_schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_configs_of_the_repository_are_right(path):
    deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
    rest, block = load_config(path)
    notices = []
    parse_sparse_attention(block, 12, source=path, seq_len=2048, notices=notices)
    assert notices == []
    jsonschema.validate({"sparse_attention": block}, json_schema())
    read = deepspeed_config.DeepSpeedConfig(rest)
    assert read.train_batch_size == rest["train_batch_size"]
    assert read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps == read.train_batch_size


def test_there_is_a_config_for_every_mode():
    assert {load_config(path).block["mode"] for path in EXAMPLES} == set(json_schema()["$defs"])
