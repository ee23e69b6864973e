import base64
import json
import random
import sys
import warnings
from pathlib import Path

import pytest

from ds_sparse.config import (
    SparseAttentionConfigError,
    example_block,
    json_schema,
    load_config,
    parse_sparse_attention,
    sparse_attention_block,
)
from ds_sparse.sparsity import (
    BigBirdSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
    declarations,
    register_sparsity,
    sparsity_class,
    sparsity_modes,
)
from ds_sparse.sparsity._fields import json_fields

# The block as DeepSpeed's documentation shows it: the keys of all modes at once.
DOCUMENTED = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "global_block_end_indices": None,
    "num_sliding_window_blocks": 3,
}

MODES = (
    '"bigbird", "bslongformer", "dense", "fixed", "indexer", "local_sliding_window", "moba", "nsa", '
    '"transformers_bigbird" or "variable"'
)


def wrong(block, *sentences, seq_len=None):
    """A block, and what is said of it after "ds.json: sparse_attention."."""
    return pytest.param(block, seq_len, sentences, id=json.dumps(block)[:60])


WRONG = [
    wrong({"num_local_block": 4}, 'num_local_block: unknown key (given 4). Did you mean "num_local_blocks"?'),
    wrong(
        {"mode": "bigbird", "zzz": [1]},
        'zzz: unknown key (given [1]). Mode "bigbird" knows mode, block, different_layout_per_head, seed, causal, '
        "strict_causal, num_random_blocks, num_sliding_window_blocks, num_global_blocks, attention.",
    ),
    wrong({"block": "16"}, 'block: got "16"; wanted 8, 16, 32, 64 or 128.'),
    wrong({"num_local_blocks": 4.5}, "num_local_blocks: got 4.5; wanted an integer of at least 1."),
    wrong({"num_local_blocks": 0}, "num_local_blocks: got 0; wanted an integer of at least 1."),
    wrong({"different_layout_per_head": "yes"}, 'different_layout_per_head: got "yes"; wanted true or false.'),
    wrong({"horizontal_global_attention": 1}, "horizontal_global_attention: got 1; wanted true or false."),
    wrong({"attention": "causal"}, 'attention: got "causal"; wanted "bidirectional" or "unidirectional".'),
    wrong(
        {"mode": "variable", "local_window_blocks": [4, "8"]},
        'local_window_blocks: got [4, "8"]; wanted a list of at least one, each an integer of at least 1.',
    ),
    wrong(
        {"mode": "bslongformer", "global_block_end_indices": 3},
        "global_block_end_indices: got 3; wanted a list, each an integer or null.",
    ),
    wrong({"seed": -1}, "seed: got -1; wanted an integer of at least 0 or null."),
    wrong({"mode": "bigbrid"}, f'mode: got "bigbrid"; wanted {MODES}. Did you mean "bigbird"?'),
    wrong({"mode": None}, f"mode: got null; wanted {MODES}."),
    wrong(
        {"mode": "local", "blok": 16, "block": 5},
        f'mode: got "local"; wanted {MODES}. Did you mean "local_sliding_window"?',
        'blok: unknown key (given 16). Did you mean "block"?',
        "block: got 5; wanted 8, 16, 32, 64 or 128.",
    ),
    wrong(
        {"mode": "fixed", "num_random_blocks": 2},
        'num_random_blocks: got 2, but mode "fixed" has no such key; it belongs to modes "bigbird", '
        '"transformers_bigbird" and "variable". Remove it or change the mode.',
    ),
    wrong({"num_heads": 12}, "num_heads: got 12; the model says how many heads. Remove it."),
    wrong(
        {"num_local_blocks": 5, "num_global_blocks": 2},
        "num_local_blocks: got 5 with num_global_blocks 2. num_local_blocks, 5, is not a "
        "multiple of num_global_blocks, 2; use 6.",
    ),
    wrong(
        {"num_different_global_patterns": 4},
        "num_different_global_patterns: got 4 with different_layout_per_head false. Number of different layouts "
        "cannot be more than one when you have set a single layout for all heads! Set different_layout_per_head to "
        "True.",
    ),
    wrong(
        {"attention": "unidirectional", "horizontal_global_attention": True, "blok": 16},
        'blok: unknown key (given 16). Did you mean "block"?',
        'horizontal_global_attention: got true with attention "unidirectional". only "bi-directional" attentions '
        "can support horizontal global attention!",
    ),
    wrong(
        {"mode": "variable", "global_block_indices": [0, 5], "global_block_end_indices": [1], "num_random_blocks": "2"},
        'num_random_blocks: got "2"; wanted an integer of at least 0.',
        "global_block_end_indices: got [1] with global_block_indices [0, 5]. Global block start indices length, 2, "
        "must be same as global block end indices length, 1!",
    ),
    wrong(
        {"mode": "bigbird", "attention": "unidirectional", "num_random_blocks": 2},
        'num_random_blocks: got 2 with attention "unidirectional", strict_causal false. The first row of a '
        "unidirectional layout has one block to draw from. Set strict_causal to true, which draws as many as a row "
        "has, or ask for at most 1 random block.",
    ),
    wrong(
        {"mode": "bigbird", "block": 64, "num_sliding_window_blocks": 5},
        "num_sliding_window_blocks: got 5 at a sequence length of 193. Number of sliding window blocks, 5, must be "
        "smaller than overall number of blocks in a row, 4!",
        seq_len=193,
    ),
    wrong(
        {"mode": "bigbird", "num_random_blocks": 10**30, "num_global_blocks": 5, "num_sliding_window_blocks": "3"},
        'num_sliding_window_blocks: got "3"; wanted an integer of at least 0.',
        f"num_random_blocks: got {10**30} at a sequence length of 64. Number of random blocks, {10**30}, must be "
        "smaller than overall number of blocks in a row, 4!",
        "num_global_blocks: got 5 at a sequence length of 64. Number of global blocks, 5, must be smaller than "
        "overall number of blocks in a row, 4!",
        seq_len=64,
    ),
    wrong(
        {"mode": "variable", "global_block_indices": [-9], "local_windows": 3},
        'local_windows: unknown key (given 3). Did you mean "local_window_blocks"?',
        "global_block_indices: got [-9] with global_block_end_indices null at a sequence length of 64. Global "
        "block index -9 counts from the end, but a row has only 4 blocks!",
        seq_len=64,
    ),
]


def mistakes_of(block, seq_len=None):
    with pytest.raises(SparseAttentionConfigError) as caught:
        parse_sparse_attention(block, 4, source="ds.json", seq_len=seq_len)
    assert str(caught.value) == "\n".join(caught.value.mistakes)
    return caught.value.mistakes


def notices_of(block, seq_len=None):
    notices = []
    structure = parse_sparse_attention(block, 4, source="ds.json", seq_len=seq_len, notices=notices)
    return structure, notices


@pytest.mark.parametrize("block, seq_len, sentences", WRONG)
def test_every_mistake_gets_its_sentence(block, seq_len, sentences):
    assert mistakes_of(block, seq_len) == [f"ds.json: sparse_attention.{sentence}" for sentence in sentences]


@pytest.mark.parametrize("block", [None, [], "fixed", 16, True])
def test_a_block_that_is_no_object(block, write):
    sentence = (
        f"sparse_attention: got {json.dumps(block)}; wanted an object {{...}}. For dense training remove the key."
    )
    assert mistakes_of(block) == [f"ds.json: {sentence}"]
    path = write(json.dumps({"sparse_attention": block}))
    with pytest.raises(SparseAttentionConfigError) as caught:
        load_config(path)
    assert caught.value.mistakes == [f"{path}: {sentence}"]


def test_defaults_are_those_of_deepspeeds_json():
    assert isinstance(parse_sparse_attention({}, 6), FixedSparsityConfig)
    assert parse_sparse_attention({}, 6).num_heads == 6
    assert parse_sparse_attention({"mode": "bigbird"}, 4).num_random_blocks == 0
    assert parse_sparse_attention({"mode": "bigbird", "num_random_blocks": 2}, 4).num_random_blocks == 2
    local = parse_sparse_attention({"mode": "local_sliding_window"}, 4)
    assert isinstance(local, LocalSlidingWindowSparsityConfig) and local.attention == "unidirectional"
    assert vars(parse_sparse_attention({"mode": "variable"}, 4)) == vars(VariableSparsityConfig(4))


def test_every_key_reaches_the_structure():
    block = {"block": 32, "different_layout_per_head": True, "seed": 7, "causal": True, "strict_causal": True}
    block |= {"num_random_blocks": 2, "num_sliding_window_blocks": 5, "num_global_blocks": 0}
    block["attention"] = "unidirectional"
    structure, notices = notices_of({"mode": "bigbird", **block})
    assert vars(structure) == vars(BigBirdSparsityConfig(4, **block))
    assert notices == []


@pytest.mark.parametrize("mode", ["fixed", "bigbird", "bslongformer", "variable", "dense", "local_sliding_window"])
def test_the_documented_block_is_accepted_in_every_mode_with_a_notice_a_foreign_key(mode):
    block = DOCUMENTED | {"mode": mode}
    if mode != "fixed":
        block["num_different_global_patterns"] = 1
    if mode == "local_sliding_window":
        block["different_layout_per_head"] = False
    _, notices = notices_of(block)
    own = json_schema()["$defs"][mode]["properties"]
    foreign = [key for key in block if "Belongs to" in own[key].get("description", "")]
    assert [notice.split(":")[1].strip() for notice in notices] == [f"sparse_attention.{key}" for key in foreign]
    assert foreign


def test_a_notice_is_a_sentence():
    _, notices = notices_of({"num_random_blocks": 0})
    assert notices == [
        'ds.json: sparse_attention.num_random_blocks: belongs to modes "bigbird", "transformers_bigbird" and '
        '"variable"; at its default 0 it is ignored.'
    ]


@pytest.mark.parametrize("value", [False, 0.5, None, "0"])
def test_a_foreign_key_is_at_its_default_only_with_the_defaults_type(value):
    assert "belongs to" in mistakes_of({"num_random_blocks": value})[0]


def test_pythons_none_as_the_documentation_shows_it_is_null(write):
    documented = DOCUMENTED | {"mode": "bslongformer", "num_different_global_patterns": 1}
    text = json.dumps({"sparse_attention": documented}, indent=1)
    structure, notices = notices_of(load_config(write(text.replace("null", "None"))).block)
    assert structure.global_block_end_indices is None
    said = "global_block_end_indices: None is read as null, which is how JSON spells it."
    assert f"ds.json: sparse_attention.{said}" in notices


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"attention": "unidirectional"}, "attention"),
        ({"attention": "unidirectional", "num_global_blocks": 2}, "num_global_blocks"),
        ({"mode": "variable", "attention": "unidirectional", "num_random_blocks": 1}, "num_random_blocks"),
        ({"seed": 3}, "seed"),
        ({"mode": "bigbird", "num_sliding_window_blocks": 4}, "num_sliding_window_blocks"),
        ({"mode": "bslongformer", "num_sliding_window_blocks": 2}, "num_sliding_window_blocks"),
        ({"mode": "local_sliding_window", "num_sliding_window_blocks": 0}, "num_sliding_window_blocks"),
    ],
)
def test_cautions_are_notices_each_time_and_no_warnings(block, key, monkeypatch):
    monkeypatch.setattr(declarations, "_given", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert [notice for notice in notices_of(block)[1] if notice.startswith(f"ds.json: sparse_attention.{key}:")]


@pytest.mark.parametrize("mode", ["variable", "bslongformer"])
def test_global_blocks_beyond_the_sequence_are_said_when_its_length_is_known(mode):
    block = {"mode": mode, "global_block_indices": [0, 128, 9000]}
    assert notices_of(block)[1] == []
    assert notices_of(block, 2048)[1] == [
        "ds.json: sparse_attention.global_block_indices: no block 128, 9000 in this sequence, whose last is 127: "
        "ignored, as in DeepSpeed."
    ]
    assert notices_of(block, 9001 * 16)[1] == []


@pytest.mark.parametrize(
    ("block", "heads", "seq_len"), [({}, 1, 10**8), ({"different_layout_per_head": True}, 10**30, 2048)], ids=str
)
def test_a_layout_that_cannot_fit_is_refused_before_it_is_made(block, heads, seq_len):
    with pytest.raises(SparseAttentionConfigError) as caught:
        parse_sparse_attention(block, heads, source="ds.json", seq_len=seq_len)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(
        "ds.json: sparse_attention.block: got 16, but FixedSparsityConfig has no layout at a sequence length of "
        f"{seq_len}: A layout of {heads} x {seq_len // 16} x {seq_len // 16} blocks takes about "
    )
    assert mistake.endswith("Use a larger block or a shorter sequence.")


def test_trying_a_length_leaves_pythons_random_alone():
    random.seed(3)
    before = random.getstate()
    parse_sparse_attention({"mode": "bigbird", "num_random_blocks": 2}, 4, seq_len=1024)
    assert random.getstate() == before


def test_neither_the_dict_nor_the_block_is_changed():
    config = {"train_batch_size": 8, "sparse_attention": {"mode": "dense", "block": 16}}
    rest, block = load_config(config)
    parse_sparse_attention(block, 4)
    assert rest == {"train_batch_size": 8}
    assert block == {"mode": "dense", "block": 16}
    assert config == {"train_batch_size": 8, "sparse_attention": {"mode": "dense", "block": 16}}


@pytest.mark.parametrize(
    "block, sentence",
    [
        ({"": 16}, '"": an empty key (given 16); name it, or remove it.'),
        (
            {"sparse_attention": {"block": 16}},
            "sparse_attention: a block inside the block; put its keys into the outer",
        ),
        (
            {"bigbird": {"block": 16}},
            'bigbird: a mode, not a key; write "mode": "bigbird" and put its keys beside that.',
        ),
        ({"causal": "True,"}, 'causal: got "True,"; wanted true or false. JSON spells it true, without quotes.'),
        ({"block": "NaN,"}, 'block: got "NaN,"; wanted 8, 16, 32, 64 or 128. JSON has no NaN: write a number.'),
        (
            {"attention": "unidirectional,"},
            'attention: got "unidirectional,"; wanted "bidirectional" or "unidirectional". It stands there without '
            "quotes, so it was read as text up to the end of its line.",
        ),
        ({"mode": "fi\x00\x1b\x9b\u202e"}, r'mode: got "fi\u0000\u001b\u009b\u202e"; wanted "bigbird"'),
        ({"blo\nck": 3}, r'"blo\nck": unknown key (given 3). Did you mean "block"?'),
        ({"block": "y" * 300}, f'block: got "{"y" * 59}... (302 characters); wanted 8'),
    ],
)
def test_what_people_write_by_mistake_gets_a_sentence_of_its_own(block, sentence):
    with pytest.raises(SparseAttentionConfigError) as caught:
        parse_sparse_attention(block, 12, source="ds.json")
    assert len(caught.value.mistakes) == 1
    assert caught.value.mistakes[0].startswith(f"ds.json: sparse_attention.{sentence}")


@pytest.mark.parametrize("heads", ["4", 4.0, 0, None])
def test_a_number_of_heads_that_no_model_has_is_not_taken_for_a_mistake_of_the_block(heads):
    with pytest.raises(ValueError, match=f"num_heads is {heads!r}; it has to be the number of attention heads"):
        parse_sparse_attention({"mode": "fixed"}, heads)


def test_messages_name_where_the_block_came_from():
    config = {"sparse_attention": {"blok": 1}}
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    for source, name in ((config, "the config dict"), (encoded, "the base64 config"), (Path("a/b.json"), "a/b.json")):
        with pytest.raises(SparseAttentionConfigError, match=f"^{name}: sparse_attention.blok: "):
            parse_sparse_attention(config["sparse_attention"], 4, source=source)


class Strided(SparsityConfig):
    def __init__(self, num_heads, block=16, stride: int = 2, name="x", *, scale: float):
        self.stride, self.name, self.scale = stride, name, scale
        if stride > 8:
            raise ValueError(f"a stride of {stride} skips too much")
        super().__init__(num_heads, block)

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        layout[:, :, :: self.stride] = 1
        return layout


class WiderBigBird(BigBirdSparsityConfig):
    def __init__(self, *args, extra: int = 0, **kwargs):
        self.extra = extra
        super().__init__(*args, **kwargs)


@pytest.mark.usefixtures("registry")
def test_a_users_plain_class_is_a_strict_mode():
    register_sparsity("strided")(Strided)
    structure = parse_sparse_attention(
        {"mode": "strided", "stride": 3, "scale": 0.5, "causal": True, "strict_causal": True}, 4, seq_len=96
    )
    assert (structure.stride, structure.name, structure.scale, structure.causal) == (3, "x", 0.5, True)
    assert not structure.make_bool_layout(96).triu(1).any()
    assert mistakes_of(
        {"mode": "strided", "stride": "3", "name": 4, "block": 20, "strid": 2, "num_local_blocks": 8}
    ) == [
        'ds.json: sparse_attention.strid: unknown key (given 2). Did you mean "stride"?',
        'ds.json: sparse_attention.num_local_blocks: got 8, but mode "strided" has no such key; it belongs to mode '
        '"fixed". '
        "Remove it or change the mode.",
        "ds.json: sparse_attention.block: got 20; wanted 8, 16, 32, 64 or 128.",
        'ds.json: sparse_attention.stride: got "3"; wanted an integer.',
        "ds.json: sparse_attention.name: got 4; wanted a string.",
        "ds.json: sparse_attention.scale: missing; wanted a number.",
    ]
    assert mistakes_of({"mode": "strided", "stride": 9, "scale": 1.0}) == [
        'ds.json: sparse_attention.mode: got "strided", whose class Strided cannot be made from this block: a stride '
        "of 9 skips too much"
    ]
    assert "stride" in mistakes_of({"stride": 3})[0]


@pytest.mark.usefixtures("registry")
def test_a_users_class_that_hands_on_keyword_arguments_takes_its_parents_keys():
    register_sparsity("wide")(WiderBigBird)
    structure = parse_sparse_attention({"mode": "wide", "extra": 2, "num_global_blocks": 3, "seed": 1}, 4)
    assert (structure.extra, structure.num_global_blocks, structure.num_random_blocks) == (2, 3, 0)
    assert mistakes_of({"mode": "wide", "num_global_blocks": "3"}) == [
        'ds.json: sparse_attention.num_global_blocks: got "3"; wanted an integer of at least 0.'
    ]


@pytest.mark.usefixtures("registry")
def test_a_users_class_may_have_no_key_at_all():
    class Diagonal(SparsityConfig):
        def __init__(self, num_heads):
            super().__init__(num_heads, 64)

        def lay_out(self, h, layout):
            layout[h].fill_diagonal_(1)
            return layout

    register_sparsity("diagonal")(Diagonal)
    assert parse_sparse_attention({"mode": "diagonal"}, 4, seq_len=128).make_bool_layout(128).tolist() == [
        [[True, False], [False, True]]
    ]
    parse_sparse_attention({"mode": "diagonal"}, 4, seq_len=100)


class Failing(SparsityConfig):
    """Fails as code of users does: in the constructor, or in the layout of its length."""

    error: type[Exception] = IndexError

    def __init__(self, num_heads, block=16, early: bool = False):
        if early:
            raise self.error("no such\nstride")
        super().__init__(num_heads, block)

    def make_layout(self, seq_len):
        raise self.error("no such\nstride")


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "error",
    [AssertionError, IndexError, NameError, OSError, RecursionError, RuntimeError, TypeError, ZeroDivisionError],
)
def test_whatever_a_users_class_raises_is_a_sentence_with_its_cause(error, monkeypatch):
    monkeypatch.setattr(Failing, "error", error)
    register_sparsity("failing")(Failing)
    assert mistakes_of({"mode": "failing", "early": True}) == [
        'ds.json: sparse_attention.mode: got "failing", whose class Failing cannot be made from this block: '
        f"{error.__name__}: no such stride"
    ]
    assert mistakes_of({"mode": "failing"}, 64) == [
        'ds.json: sparse_attention.mode: got "failing", but Failing has no layout at a sequence length of 64: '
        f"{error.__name__}: no such stride"
    ]
    with pytest.raises(SparseAttentionConfigError) as caught:
        parse_sparse_attention({"mode": "failing"}, 4, seq_len=64)
    assert type(caught.value.__cause__) is error


@pytest.mark.usefixtures("registry")
def test_a_users_class_that_replaces_a_step_is_not_held_to_its_condition():
    class NoWindow(BigBirdSparsityConfig):
        def set_sliding_window_layout(self, h, layout):
            return layout

    register_sparsity("no_window")(NoWindow)
    structure = parse_sparse_attention({"mode": "no_window", "num_sliding_window_blocks": 9}, 4, seq_len=64)
    assert structure.make_bool_layout(64).sum() == 7


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module_of_ours", "ModuleNotFoundError: No module named 'no_such_module_of_ours'"),
        ("Thing = 3", "TypeError: Mode 'gone' needs a subclass of SparsityConfig, got 3."),
        ("def", "SyntaxError: invalid syntax (gone_structure.py, line 1)"),
        (
            "from ds_sparse.sparsity import DenseSparsityConfig\nclass Thing(DenseSparsityConfig):\n"
            "    def __init__(self, num_heads, stride: 'Stride' = 2): pass",
            "NameError: name 'Stride' is not defined",
        ),
    ],
    ids=["import", "type", "syntax", "annotation"],
)
def test_an_entry_point_that_does_not_load_is_a_mistake(monkeypatch, tmp_path, code, reason):
    from importlib.metadata import EntryPoint

    from ds_sparse.sparsity import _registry

    (tmp_path / "gone_structure.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gone_structure", raising=False)
    point = EntryPoint("gone", "gone_structure:Thing", _registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(_registry, "entry_points", lambda group: [point])
    assert mistakes_of({"mode": "gone"}) == [
        f'ds.json: sparse_attention.mode: got "gone", whose class does not load: {reason}'
    ]


@pytest.mark.parametrize(
    "structure",
    [
        FixedSparsityConfig(4, 32, attention="unidirectional", causal=True),
        VariableSparsityConfig(4, local_window_blocks=(2, 3), global_block_indices=(0,), global_block_end_indices=(7,)),
        BigBirdSparsityConfig(4, different_layout_per_head=True, seed=7),
        LocalSlidingWindowSparsityConfig(4, attention="bidirectional"),
    ],
    ids=lambda structure: type(structure).__name__,
)
def test_a_structure_is_written_as_the_block_that_it_is_read_from(structure):
    block = sparse_attention_block(structure)
    again = parse_sparse_attention(json.loads(json.dumps(block)), 4)
    assert type(again) is type(structure) and vars(again) == vars(structure)
    assert sparse_attention_block(again) == block
    for key, value in block.items():
        if isinstance(value, list):
            value.append(99)
            assert 99 not in getattr(structure, key)


@pytest.mark.usefixtures("registry")
def test_a_structure_that_no_block_stands_for_is_an_error():
    class Nameless(FixedSparsityConfig):
        pass

    with pytest.raises(ValueError, match="Nameless cannot be written as a sparse_attention block: it has no mode"):
        sparse_attention_block(Nameless(4))

    @register_sparsity("doubled")
    class Doubled(SparsityConfig):
        def __init__(self, num_heads: int, block: int = 16, every: int = 1):
            super().__init__(num_heads, block)
            self.every = 2 * every

        def make_layout(self, seq_len):
            return self.setup_layout(seq_len)

    with pytest.raises(ValueError, match="Doubled cannot .* another every. Keep each argument of its __init__ in an"):
        sparse_attention_block(Doubled(4))
    unwritable = FixedSparsityConfig(4)
    unwritable.num_local_blocks = object()
    with pytest.raises(ValueError, match="cannot be written .* not JSON serializable"):
        sparse_attention_block(unwritable)


@pytest.mark.parametrize("mode", sparsity_modes())
def test_an_example_has_every_key_and_one_layout(mode):
    block = example_block(mode)
    assert block.keys() == {"mode", *json_fields(sparsity_class(mode))}
    first, again = (parse_sparse_attention(block, 2).make_layout(1024) for _ in range(2))
    assert first.equal(again)


def test_it_draws_as_the_class_does_by_default_and_then_has_a_seed():
    state = random.getstate()
    drawn = {mode: example_block(mode) for mode in sparsity_modes()}
    assert random.getstate() == state
    found = {mode: (block.get("num_random_blocks", 0), block.get("seed")) for mode, block in drawn.items()}
    drawing = {mode: numbers for mode, numbers in found.items() if numbers != (0, None)}
    assert drawing == {"bigbird": (1, 0), "transformers_bigbird": (3, 0)}


def test_what_is_given_is_kept_and_mistakes_are_those_of_a_file():
    assert example_block("bigbird", {"seed": 5, "block": 64})["seed"] == 5
    with pytest.raises(SparseAttentionConfigError) as error:
        example_block("fixed", {"num_local_blocks": 0, "blok": 8}, source="mine")
    assert [sentence.partition(": ")[0] for sentence in error.value.mistakes] == ["mine", "mine"]
