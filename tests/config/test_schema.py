"""The JSON schema, and the configurations of the repository, which it holds for."""

import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse.config import (
    BLOCK_KEY,
    SparseAttentionConfigError,
    json_schema,
    load_config,
    parse_sparse_attention,
    read_block,
)
from ds_sparse.sparsity import SparsityConfig, register_sparsity, sparsity_class
from ds_sparse.sparsity._fields import json_fields
from ds_sparse.sparsity.declarations import rule_fields

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(path for path in CONFIGS.glob("*.json") if "schema" not in path.name)


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """Of the schema, which a test checks once; jsonschema.validate would each time."""
    return jsonschema.Draft202012Validator(json_schema())


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
        {"mode": "bigbird", "block": 16.0, "local_window_blocks": [4.0], "seed": 1e30},
        {"mode": "variable", "global_block_end_indices": "None"},
        {"global_block_end_indices": "None,", "seed": "None"},
        {"layers": {}},
        {"layers": {"0-5,7": {"num_local_blocks": 8}, "8": None, " 9 - 10 , 3": "None"}},
        {"mode": "dense", "layers": {"0": {"mode": "fixed", "num_local_blocks": 8}, "1": {"block": 32}}},
    ],
    ids=str,
)
def test_the_schema_takes_what_the_reader_takes(block, validator):
    """Besides what is drawn below."""
    read_block(block, 4)
    validator.validate({"train_batch_size": 8, "sparse_attention": block})


@pytest.mark.parametrize(
    "block",
    [
        None,
        {"mode": "fixd"},
        {"num_random_blocks": False},
        {"layers": None},
        {"layers": {"-1": None}},
        {"layers": {"first": None}},
        {"layers": {"0": 4}},
        {"layers": {"0": {"blok": 16}}},
        {"layers": {"0": {"layers": {}}}},
        {"mode": "dense", "layers": {"0": {"num_local_blocks": 8}}},
        {"layers": {"0": {"mode": "dense", "num_local_blocks": 8}}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_reader_refuses(block, validator):
    with pytest.raises(SparseAttentionConfigError):
        read_block(block, 4)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({"sparse_attention": block})


class Painted(SparsityConfig):
    """A structure of a user's own, with fields of the kinds that ours have not."""

    def __init__(
        self, num_heads, block=16, name: str = "plain", scale: float = 1.0, label: str | None = None, anything=None
    ):
        super().__init__(num_heads, block)

    def make_layout(self, seq_len):
        return self.setup_layout(seq_len)


NUMBERS = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([8, 16, 24, 32, 64, 128, 2**31, 2**63, 10**30]),
    st.sampled_from([-1.0, -0.0, 0.0, 1.0, 1.5, 4.0, 16.0, 1e-9, 1e10, 1e30]),
)
WORDS = st.sampled_from(
    ["None", "None,", "None ,", "none", "null", "", "1", "16", "true", "bidirectional", "unidirectional", "plain", "é"]
)
SIMPLE = st.one_of(NUMBERS, WORDS, st.booleans(), st.none())
VALUES = st.one_of(
    SIMPLE, st.lists(SIMPLE, max_size=3), st.lists(NUMBERS, max_size=3), st.just({}), st.just({"a": 1.0})
)


def right(entry: dict) -> st.SearchStrategy:
    """Values that the schema takes for a key, but for the largest."""
    if "anyOf" in entry:
        return st.one_of(*map(right, entry["anyOf"]))
    named = [entry["const"]] if "const" in entry else entry.get("enum")
    if named is not None:
        return st.sampled_from(named)
    if "type" not in entry:
        return VALUES
    least = entry.get("minimum", 0)
    kinds = {
        "integer": st.one_of(st.integers(least, least + 4), st.sampled_from([least + 0.0, least + 3.0])),
        "array": st.lists(right(entry.get("items", {})), min_size=entry.get("minItems", 0), max_size=3),
        "boolean": st.booleans(),
        "null": st.none(),
        "string": st.sampled_from(["None", "None ,"]) if "pattern" in entry else WORDS,
        "number": NUMBERS,
        "object": st.dictionaries(st.sampled_from(["0", "1 - 2,5"]), st.sampled_from([None, {}, {"block": 32.0}])),
    }
    return kinds[entry["type"]]


@st.composite
def blocks(draw: st.DrawFn, modes: dict) -> dict:
    """Keys of a mode at values that are right; and in every other block one key more, at any value."""
    block = {"mode": draw(st.sampled_from(sorted(modes)))} if draw(st.integers(0, 7)) else {}
    own = modes[block.get("mode", "fixed")]["properties"]
    for key in draw(st.lists(st.sampled_from(sorted(own)), max_size=4)):
        if key != "mode":
            block[key] = draw(right(own[key]))
    if draw(st.booleans()):
        other = st.sampled_from([*modes["variable"]["properties"], *modes["painted"]["properties"], "x", ""])
        block[draw(st.one_of(st.sampled_from(sorted(own)), other))] = draw(VALUES)
    return block


def as_read(value):
    if isinstance(value, list):
        return [as_read(part) for part in value]
    if isinstance(value, float) and value == int(value):
        return int(value)
    return None if isinstance(value, str) and value.startswith("None") else value


def between_fields(block: dict) -> list[str]:
    """What the rules between fields of its mode say about a block, of which each value is right."""
    cls = sparsity_class(block.get("mode", "fixed"))
    values = {key: field.get_default() for key, field in json_fields(cls).items()}
    values |= {key: as_read(value) for key, value in block.items()}
    rules = [rule for rule in (*cls.rules, *cls.json_rules) if len(rule_fields(rule)) > 1]
    return [said for rule in rules if (said := rule(**{name: values[name] for name in rule_fields(rule)}))]


@pytest.mark.usefixtures("registry")
def test_the_schema_takes_a_block_if_and_only_if_the_reader_does():
    """But for rules between fields, which are the reader's alone."""
    register_sparsity("painted")(Painted)
    schema = json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    outcomes = set()

    @settings(max_examples=500, derandomize=True, deadline=None, database=None)
    @given(blocks(schema["$defs"]))
    def agree(block: dict) -> None:
        said, mistakes = [error.message for error in validator.iter_errors({BLOCK_KEY: block})], []
        try:
            read_block(block, 12)
        except SparseAttentionConfigError as error:
            mistakes = error.mistakes
        if said:
            assert mistakes, (block, said)
        else:
            rules = tuple(between_fields(block)) if mistakes else ()
            assert [mistake for mistake in mistakes if not mistake.endswith(rules)] == [], block
        outcomes.add((bool(said), bool(mistakes)))

    agree()
    assert outcomes == {(True, True), (False, False), (False, True)}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_configs_of_the_repository_are_right(path, validator):
    deepspeed_config = pytest.importorskip("deepspeed.runtime.config")
    rest, block = load_config(path)
    notices = []
    parse_sparse_attention(block, 12, source=path, seq_len=2048, notices=notices)
    assert notices == []
    validator.validate({"sparse_attention": block})
    read = deepspeed_config.DeepSpeedConfig(rest)
    assert read.train_batch_size == rest["train_batch_size"]
    assert read.train_micro_batch_size_per_gpu * read.gradient_accumulation_steps == read.train_batch_size


def test_there_is_a_config_for_every_mode():
    assert {load_config(path).block["mode"] for path in EXAMPLES} == set(json_schema()["$defs"])
