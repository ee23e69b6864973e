import copy
import inspect
import json
import pickle
import random
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ds_sparse.sparsity as sparsity
from ds_sparse.sparsity import SparsityConfig, SparsityWarning, declarations, register_sparsity
from ds_sparse.sparsity._registry import sparsity_class, sparsity_modes
from ds_sparse.sparsity._steps import row_step

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_layouts.json").read_text())
BUILT_IN = [
    sparsity.DenseSparsityConfig,
    sparsity.FixedSparsityConfig,
    sparsity.VariableSparsityConfig,
    sparsity.BigBirdSparsityConfig,
    sparsity.BSLongformerSparsityConfig,
    sparsity.LocalSlidingWindowSparsityConfig,
]
modest = settings(deadline=None, derandomize=True, max_examples=60)


def made(name: str, num_heads: int = 2, **fields) -> st.SearchStrategy[SparsityConfig]:
    """Structures of a class, with fields of some values, or drawn ones."""
    drawn = {key: value if isinstance(value, st.SearchStrategy) else st.just(value) for key, value in fields.items()}
    return st.builds(getattr(sparsity, f"{name}SparsityConfig"), num_heads=st.just(num_heads), **drawn)


either, few, places = st.booleans(), st.integers(0, 5), st.lists(st.integers(-3, 12), max_size=3)
attention = st.sampled_from(["bidirectional", "unidirectional"])
globals_ = {"num_local_blocks": st.sampled_from([4, 6, 8]), "num_global_blocks": st.integers(1, 2)}
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
randomly = {"different_layout_per_head": either, "num_random_blocks": st.integers(0, 2), "attention": attention}
ranges = {"global_block_indices": [1, 4], "global_block_end_indices": [3, 6], "horizontal_global_attention": either}
structures = st.one_of(
    made("Dense", different_layout_per_head=either),
    made("Fixed", 3, different_layout_per_head=True, num_different_global_patterns=2, attention=attention, **globals_),
    made("Fixed", horizontal_global_attention=True),
    made("Variable", local_window_blocks=sizes, global_block_indices=places, **randomly),
    made("Variable", 3, **randomly | ranges | {"attention": "bidirectional"}),
    made("TransformersBigBird", num_random_blocks=st.integers(0, 1)),
    made("BigBird", num_sliding_window_blocks=few, num_global_blocks=few, **randomly | {"num_random_blocks": 1}),
    made("BSLongformer", num_sliding_window_blocks=few, global_block_indices=places, attention=attention),
    made("LocalSlidingWindow", num_sliding_window_blocks=few, attention=attention),
)


@pytest.fixture
def no_caution_given(monkeypatch):
    monkeypatch.setattr(declarations, "_given", set())


class Strided(SparsityConfig):
    """As users wrote them for DeepSpeed: a plain __init__, attributes before super(), make_layout with a loop."""

    def __init__(self, num_heads, block=16, stride=2):
        self.stride = stride
        super().__init__(num_heads, block)

    def make_layout(self, seq_len):
        layout = self.setup_layout(seq_len)
        for h in range(self.num_layout_heads):
            for row in range(layout.shape[1]):
                layout[h, row, row % self.stride :: self.stride] = 1
        return self.check_and_propagate_first_head_layout(layout)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['cls']}-{case['seq_len']}-{case['kwargs']}")
@pytest.mark.parametrize("method", ["make_layout", "make_bool_layout"])
def test_layouts_are_deepspeeds_bit_for_bit(case, method):
    make = getattr(getattr(sparsity, case["cls"])(**case["kwargs"]), method)
    if case["seed"] is not None:
        random.seed(case["seed"])
    if "error" in case:
        with pytest.raises(ValueError) as caught:
            make(case["seq_len"])
        assert [type(caught.value).__name__, str(caught.value)] == case["error"]
        return
    layout = make(case["seq_len"])
    expected = torch.tensor([[[int(cell) for cell in row] for row in head] for head in case["layout"]])
    if method == "make_layout":
        expected = expected.expand(case["kwargs"]["num_heads"], -1, -1)
    assert layout.dtype is (torch.int64 if method == "make_layout" else torch.bool)
    assert layout.device.type == "cpu"
    assert torch.equal(layout.long(), expected)


@modest
@given(structures, st.integers(8, 20), st.integers(0, 9))
def test_both_layouts_are_the_same_and_draw_alike(structure, blocks, seed):
    random.seed(seed)
    layout = structure.make_layout(blocks * structure.block)
    after = random.random()
    random.seed(seed)
    shared = structure.make_bool_layout(blocks * structure.block)
    assert torch.equal(shared.expand(structure.num_heads, -1, -1), layout.bool())
    assert shared.shape[0] == 1 or not torch.equal(layout[0], layout[1]) or not torch.equal(layout[0], layout[-1])
    assert random.random() == after


@modest
@given(structures, st.integers(8, 20), st.integers(0, 2**40))
def test_a_seed_gives_one_layout_and_leaves_pythons_random_alone(structure, blocks, seed):
    structure.seed = seed
    before = random.getstate()
    first = structure.make_bool_layout(blocks * structure.block)
    assert random.getstate() == before
    random.seed(1)
    assert torch.equal(structure.make_bool_layout(blocks * structure.block), first)
    layout = structure.make_layout(blocks * structure.block)
    assert torch.equal(layout.bool(), first.expand(structure.num_heads, -1, -1))


@modest
@given(structures, st.integers(8, 20))
def test_strict_causal_drops_exactly_the_blocks_above_the_diagonal(structure, blocks):
    structure.seed = 3
    plain = structure.make_bool_layout(blocks * structure.block)
    structure.strict_causal = True
    strict = structure.make_bool_layout(blocks * structure.block)
    assert torch.equal(strict.expand(structure.num_heads, -1, -1), plain.tril().expand(structure.num_heads, -1, -1))


@pytest.mark.parametrize("cls", BUILT_IN, ids=lambda cls: cls.__name__)
def test_a_layout_of_65536_tokens_is_quick_and_never_int64(cls, monkeypatch):
    structure = cls(12, seed=1)
    monkeypatch.setattr(cls, "setup_layout", None)
    start = time.perf_counter()
    layout = structure.make_bool_layout(65536)
    assert time.perf_counter() - start < 0.8
    assert layout.shape == (1, 4096, 4096)


OPTIONS = {
    sparsity.SparsityConfig: ("", ()),
    sparsity.DenseSparsityConfig: ("", ()),
    sparsity.FixedSparsityConfig: (
        "num_local_blocks num_global_blocks attention horizontal_global_attention num_different_global_patterns",
        (8, 2, "bidirectional", True, 3),
    ),
    sparsity.VariableSparsityConfig: (
        "num_random_blocks local_window_blocks global_block_indices global_block_end_indices attention "
        "horizontal_global_attention",
        (2, [1, 2], [3], [4], "bidirectional", True),
    ),
    sparsity.BigBirdSparsityConfig: (
        "num_random_blocks num_sliding_window_blocks num_global_blocks attention",
        (2, 5, 3, "unidirectional"),
    ),
    sparsity.BSLongformerSparsityConfig: (
        "num_sliding_window_blocks global_block_indices global_block_end_indices attention",
        (5, [3], [4], "unidirectional"),
    ),
    sparsity.LocalSlidingWindowSparsityConfig: ("num_sliding_window_blocks attention", (5, "bidirectional")),
}
"""Each structure's own options in DeepSpeed's order, and values."""


@pytest.mark.parametrize("cls", OPTIONS, ids=lambda cls: cls.__name__)
def test_positional_order_is_deepspeeds_and_ours_are_keyword_only(cls):
    names, own = OPTIONS[cls]
    values = {"num_heads": 4, "block": 32, "different_layout_per_head": True} | dict(zip(names.split(), own))
    if cls is sparsity.LocalSlidingWindowSparsityConfig:
        del values["different_layout_per_head"]
    parameters = inspect.signature(cls).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == list(values)
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == ["seed", "causal", "strict_causal"]
    structure = cls(*values.values())
    assert {name: getattr(structure, name) for name in values} == values
    assert vars(structure) == vars(cls(**values))


def test_wrong_arguments_are_value_errors():
    wrong = {"num_heads": [0, "4", True], "block": [24, 16.0, "16"], "different_layout_per_head": [1], "seed": [-1]}
    wrong |= {"causal": ["yes"], "num_local_blocks": [4]}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=name):
            SparsityConfig(**{"num_heads": 4} | {name: value})
    with pytest.raises(ValueError, match="num_heads"):
        SparsityConfig()


LENGTHS, ORDER = "start indices length, 2, must be same as", "must be smaller than global block end index, "
BELOW = "greater than or equal to "
ATTENTION = 'only "uni/bi-directional" attentions are supported for now!'
HORIZONTAL = 'only "bi-directional" attentions can support horizontal global attention!'
WRONG = [
    ("BigBird", {"attention": "both"}, ATTENTION),
    *(("BigBird", {f"num_{what}_blocks": -1}, BELOW + "0") for what in ("random", "sliding_window", "global")),
    ("BSLongformer", {"global_block_indices": [0, 5], "global_block_end_indices": []}, LENGTHS),
    ("BSLongformer", {"global_block_indices": [4], "global_block_end_indices": [2]}, ORDER),
    ("BSLongformer", {"attention": "both"}, ATTENTION),
    ("BSLongformer", {"num_sliding_window_blocks": -1}, BELOW + "0"),
    (
        "Fixed",
        {"num_local_blocks": 5, "num_global_blocks": 2},
        "num_local_blocks, 5, is not a multiple of num_global_blocks, 2; use 6.",
    ),
    ("Fixed", {"attention": "sideways"}, ATTENTION),
    ("Fixed", {"attention": "unidirectional", "horizontal_global_attention": True}, HORIZONTAL),
    ("Fixed", {"num_different_global_patterns": 2}, "a single layout for all heads! Set different_layout_per"),
    (
        "Fixed",
        {"different_layout_per_head": True, "num_different_global_patterns": 5},
        "Number of layout versions (num_different_global_patterns), 5, cannot be larger than number of local window "
        "blocks divided by number of global blocks, 4 / 1 = 4!",
    ),
    ("Fixed", {"num_global_blocks": 0}, BELOW + "1"),
    ("Fixed", {"num_local_blocks": True}, "valid integer"),
    ("LocalSlidingWindow", {"attention": "both"}, ATTENTION),
    ("LocalSlidingWindow", {"num_sliding_window_blocks": -1}, BELOW + "0"),
    ("LocalSlidingWindow", {"different_layout_per_head": True}, "different_layout_per_head"),
    ("Variable", {"global_block_indices": [0, 5], "global_block_end_indices": [1]}, LENGTHS),
    ("Variable", {"global_block_indices": [3], "global_block_end_indices": [3]}, ORDER),
    ("Variable", {"attention": "unidirectional", "horizontal_global_attention": True}, HORIZONTAL),
    ("Variable", {"attention": None}, ATTENTION),
    ("Variable", {"local_window_blocks": []}, "at least 1 item"),
    ("Variable", {"local_window_blocks": [4, 0]}, BELOW + "1"),
    ("Variable", {"global_block_indices": [1.0]}, "valid integer"),
    ("Variable", {"num_random_blocks": -1}, BELOW + "0"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), WRONG)
def test_wrong_options_are_value_errors(name, options, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        getattr(sparsity, f"{name}SparsityConfig")(4, **options)


SHORT = [
    ("BigBird", {"num_random_blocks": 3}, "Number of random blocks, 3, must be"),
    ("BigBird", {"num_sliding_window_blocks": 4}, "Number of sliding window blocks, 4, must be"),
    ("BigBird", {"num_sliding_window_blocks": 1, "num_global_blocks": 5}, "Number of global blocks, 5, must be"),
    ("BSLongformer", {}, "Number of sliding window blocks, 3, must be"),
    ("Variable", {"num_random_blocks": 3}, "Number of random blocks, 3, must be"),
    ("Variable", {"global_block_indices": [-3]}, "Global block index -3 counts from .* has only 2 blocks!"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), SHORT)
def test_rows_too_short_are_value_errors(name, options, sentence):
    end = " smaller than overall number of blocks in a row, 2!" if sentence.endswith("must be") else ""
    with pytest.raises(ValueError, match=f"^{sentence}{end}$"):
        getattr(sparsity, f"{name}SparsityConfig")(1, **options).make_layout(32)


def test_an_error_names_the_field_also_when_it_came_by_position():
    with pytest.raises(ValueError, match=r"num_local_blocks\n  Input should be a valid integer"):
        sparsity.FixedSparsityConfig(4, 16, False, "4")
    with pytest.raises(ValueError):
        sparsity.DenseSparsityConfig(4, 16, False, 4)
    with pytest.raises(ValueError):
        sparsity.DenseSparsityConfig(4, 16, block=16)


def test_numpys_integers_are_integers_and_its_bools_are_not():
    structure = sparsity.VariableSparsityConfig(
        np.int64(4), np.int32(32), local_window_blocks=[np.uint8(2), 4], global_block_indices=(np.int64(1),)
    )
    assert vars(structure) == vars(
        sparsity.VariableSparsityConfig(4, 32, local_window_blocks=[2, 4], global_block_indices=[1])
    )
    assert type(structure.num_heads) is type(structure.global_block_indices[0]) is int
    for wrong in (np.bool_(True), np.float64(4)):
        with pytest.raises(ValueError, match="num_heads"):
            SparsityConfig(wrong)


@pytest.mark.parametrize("given", [(1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2])], ids=repr)
def test_lists_of_blocks_may_be_other_sequences_of_integers(given):
    structure = sparsity.VariableSparsityConfig(4, local_window_blocks=given, global_block_indices=given)
    assert structure.local_window_blocks == structure.global_block_indices == [1, 2]
    with pytest.raises(ValueError, match="global_block_indices"):
        sparsity.BSLongformerSparsityConfig(4, global_block_indices=torch.tensor([1.0]))


def test_the_base_says_that_it_lays_nothing_out():
    with pytest.raises(NotImplementedError, match="override make_layout"):
        SparsityConfig(4).make_layout(64)


@pytest.mark.parametrize("method", ["setup_layout", "make_bool_layout"])
def test_lengths_are_positive_multiples_of_the_block(method):
    make = getattr(sparsity.DenseSparsityConfig(2), method)
    with pytest.raises(ValueError, match="The sequence length, 40, is not a multiple of the block, 16; use 48."):
        make(40)
    for length in ([3], 64.0, True, "64"):
        with pytest.raises(TypeError, match="needs a sequence length that is an integer, got "):
            make(length)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make(0)


@pytest.mark.parametrize("method", ["setup_layout", "make_layout", "make_bool_layout"])
@pytest.mark.parametrize("cls", [sparsity.FixedSparsityConfig, Strided], ids=lambda cls: cls.__name__)
def test_a_layout_beyond_this_machines_memory_is_refused_before_it_is_allocated(cls, method):
    structure = cls(12)
    with pytest.raises(MemoryError, match=r"62500000 x 62500000 blocks takes about [\d,]+ GiB .* larger block"):
        getattr(structure, method)(10**9)


def test_instances_share_no_list_with_each_other_or_the_caller():
    first, second = sparsity.VariableSparsityConfig(2), sparsity.VariableSparsityConfig(2)
    first.local_window_blocks.append(9)
    assert second.local_window_blocks == [4]
    mine = [1, 2]
    structure = sparsity.VariableSparsityConfig(2, global_block_indices=mine)
    mine.append(3)
    assert structure.global_block_indices == [1, 2]
    assert sparsity.VariableSparsityConfig(2, global_block_indices=(1, 2)).global_block_indices == [1, 2]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("structure", [Strided(2, stride=3), sparsity.FixedSparsityConfig(2, 32, num_local_blocks=8)])
def test_copies_keep_every_attribute(structure, duplicate):
    structure.note = "later"
    other = duplicate(structure)
    assert vars(other) == vars(structure)
    assert torch.equal(other.make_bool_layout(256), structure.make_bool_layout(256))


def test_a_users_plain_subclass_works_as_it_did():
    structure = Strided(2, 16, stride=3)
    assert (structure.stride, structure.num_heads, structure.block, structure.num_layout_heads) == (3, 2, 16, 1)
    assert structure.seed is None and structure.causal is False
    expected = torch.tensor([[column % 3 == row % 3 and column >= row % 3 for column in range(6)] for row in range(6)])
    assert torch.equal(structure.make_layout(96), expected.long().expand(2, -1, -1))
    assert torch.equal(structure.make_bool_layout(96), expected[None])


@pytest.mark.parametrize(
    "step", ["set_local_layout", "set_global_layout", "setup_layout", "check_and_propagate_first_head_layout"]
)
def test_overridden_steps_are_called_for_both_layouts(step):
    calls = []

    def override(self, *arguments):
        calls.append(arguments)
        return getattr(super(Mine, self), step)(*arguments)

    Mine = type("Mine", (sparsity.FixedSparsityConfig,), {step: override})
    structure = Mine(2, num_local_blocks=2)
    plain = sparsity.FixedSparsityConfig(2, num_local_blocks=2)
    assert torch.equal(structure.make_layout(96), plain.make_layout(96))
    assert torch.equal(structure.make_bool_layout(96), plain.make_bool_layout(96))
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
def test_steps_work_in_place_on_any_dtype(dtype):
    structure = sparsity.BSLongformerSparsityConfig(2, attention="unidirectional")
    layout = torch.zeros(2, 8, 8, dtype=dtype)
    for h in range(2):
        structure.set_sliding_window_layout(h, layout)
        structure.set_global_layout(h, layout)
    assert torch.equal(layout.long(), structure.make_layout(128))


def test_a_users_make_layout_is_checked():
    class Wrong(SparsityConfig):
        def make_layout(self, seq_len):
            return self.setup_layout(seq_len) + 2

    with pytest.raises(ValueError, match="only 0 and 1"):
        Wrong(2).make_bool_layout(64)


@pytest.mark.usefixtures("no_caution_given")
def test_cautions_are_given_once_a_process_where_the_structure_is_made():
    with pytest.warns(SparsityWarning, match='"unidirectional" masks whole blocks only') as caught:
        sparsity.LocalSlidingWindowSparsityConfig(4)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsity.LocalSlidingWindowSparsityConfig(4)
        sparsity.FixedSparsityConfig(4, attention="unidirectional")


UNI = {"attention": "unidirectional"}


@pytest.mark.usefixtures("no_caution_given")
@pytest.mark.parametrize(
    ("cls", "options", "said"),
    [
        (sparsity.FixedSparsityConfig, {"seed": 1}, "seed changes nothing"),
        (sparsity.FixedSparsityConfig, {"num_global_blocks": 2, **UNI}, "num_global_blocks .* strict_causal"),
        (sparsity.VariableSparsityConfig, {"num_random_blocks": 1, **UNI}, "num_random_blocks .* strict_causal"),
        (sparsity.VariableSparsityConfig, {"global_block_end_indices": [2], **UNI}, "end_indices .* strict_causal"),
        (sparsity.BigBirdSparsityConfig, {"num_sliding_window_blocks": 2}, "of 2 blocks counts as one of 3"),
        *((cls, {}, None) for cls in BUILT_IN[:-1]),
        (sparsity.FixedSparsityConfig, {"num_global_blocks": 2, "causal": True, **UNI}, None),
    ],
)
def test_what_may_surprise_is_said(cls, options, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls(4, **options)
    found = " ".join(str(warning.message) for warning in caught)
    assert re.search(said, found) if said else not found


@pytest.mark.usefixtures("registry")
def test_registering_refuses_what_is_no_structure_or_taken():
    with pytest.raises(TypeError, match="subclass of SparsityConfig"):
        register_sparsity("mine")(dict)
    with pytest.raises(TypeError, match="lays nothing out"):
        register_sparsity("mine")(type("Empty", (SparsityConfig,), {}))
    with pytest.raises(ValueError, match="already ds_sparse.sparsity.fixed.FixedSparsityConfig"):
        register_sparsity("fixed")(Strided)


@pytest.mark.usefixtures("registry")
def test_entry_points_are_modes(monkeypatch):
    from importlib.metadata import EntryPoint

    from ds_sparse.sparsity import _registry

    point = EntryPoint("banded", "ds_sparse.sparsity:LocalSlidingWindowSparsityConfig", _registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(_registry, "entry_points", lambda group: [point] * (group == _registry.ENTRY_POINT_GROUP))
    assert "banded" in sparsity_modes()
    assert sparsity_class("banded") is sparsity.LocalSlidingWindowSparsityConfig


@modest
@given(structures, st.integers(8, 33), st.booleans())
def test_rows_made_in_pieces_are_those_of_the_layout(structure, blocks, strict):
    structure.seed, structure.strict_causal = 5, strict
    rows = structure.make_rows(16 * blocks)
    pieces = [range(start, min(start + 4, blocks)) for start in range(0, blocks, 4)]
    made = torch.stack([torch.cat([make(piece) for piece in pieces]) for make in map(rows.maker, range(rows.heads))])
    assert made.dtype is torch.bool
    assert torch.equal(made, structure.make_bool_layout(16 * blocks).expand_as(made))


def test_a_structure_of_ones_own_gives_rows_of_its_layout():
    class Checkered(sparsity.SparsityConfig):
        def make_layout(self, seq_len):
            layout = self.setup_layout(seq_len)
            layout[:, ::2, ::2] = 1
            return layout

    structure = Checkered(2)
    assert torch.equal(structure.make_rows(160).maker(0)(range(3, 9)), structure.make_bool_layout(160)[0, 3:9])


def test_steps_are_laid_out_as_a_class_or_one_that_it_extends_names_them():
    class OneStepAnew(sparsity.BigBirdSparsityConfig):
        @row_step
        def set_random_layout(self, h, blocks):
            return lambda live, rows: None

    class OwnOrder(SparsityConfig):
        _steps = ("first", "second")

        @row_step
        def second(self, h, blocks):
            return lambda live, rows: live.fill_(0)

        @row_step
        def first(self, h, blocks):
            return lambda live, rows: live.fill_(1)

    without_draws = sparsity.BigBirdSparsityConfig(2, 16, num_random_blocks=0).make_bool_layout(256)
    assert torch.equal(OneStepAnew(2, 16).make_bool_layout(256), without_draws)
    assert not OwnOrder(1).make_bool_layout(64).any()
