"""Structures by layer: `layers` in the block."""

import json

import pytest

import ds_sparse
from ds_sparse.config import SparseAttentionConfigError, load_config, read_block
from ds_sparse.sparsity import SparsityConfig, register_sparsity

BLOCK = {
    "mode": "fixed",
    "block": 32,
    "num_local_blocks": 8,
    "layers": {"0-3, 6": {"num_local_blocks": 2}, "8": None, "3": {"mode": "bigbird", "num_random_blocks": 1}},
}


def mistakes(block, **arguments):
    with pytest.raises(SparseAttentionConfigError) as caught:
        read_block(block, 4, **arguments)
    return [sentence.removeprefix("the config: sparse_attention.") for sentence in caught.value.mistakes]


def test_layers_have_what_differs_from_the_block_and_later_entries_win():
    structures = ds_sparse.parse_sparse_attention_layers(BLOCK, 4, 10)
    assert [getattr(structure, "num_local_blocks", None) for structure in structures] == [
        2, 2, 2, None, 8, 8, 2, 8, None, 8,
    ]  # fmt: skip
    assert isinstance(structures[3], ds_sparse.BigBirdSparsityConfig) and structures[8] is None
    assert {structure.block for structure in structures if structure} == {32}
    assert structures[0] is structures[6] and structures[4] is structures[9]


def test_a_block_without_layers_is_for_all():
    first, second = ds_sparse.parse_sparse_attention_layers({"mode": "dense"}, 4, 2)
    assert first is second and ds_sparse.parse_sparse_attention({"layers": {}}, 4).block == 16


def test_an_entry_of_another_mode_takes_the_keys_that_it_has_from_the_block():
    block = {"mode": "fixed", "num_local_blocks": 8, "block": 64, "seed": 3, "layers": {"0": {"mode": "bigbird"}}}
    structures = read_block(block, 4)
    entry, others = structures.block_of(0), structures.block_of(1)
    assert (entry["mode"], entry["block"], entry["seed"]) == ("bigbird", 64, 3) and "num_local_blocks" not in entry
    assert (others["mode"], others["block"], others["seed"], others["num_local_blocks"]) == ("fixed", 64, 3, 8)
    assert read_block(BLOCK, 4).block_of(8) is None


def test_what_is_read_once_is_made_for_any_number_of_heads():
    read = read_block({**BLOCK, "different_layout_per_head": True}, 4)
    for layer, structure in enumerate(read.for_heads(6).of_all(10)):
        assert structure is None if layer == 8 else (structure.num_heads, structure.block) == (6, 32)
    assert read.for_heads(6).block() == read.block() and read.of(0).num_heads == 4


def test_all_mistakes_of_all_entries_come_at_once():
    entries = {
        "5-2": {},
        "first": {},
        3: {},
        "\u0661": {},
        "1": 4,
        "2": {"layers": {}},
        "0-12": {"num_local_blcks": 4},
        "4": {"mode": "bigbrid"},
        "6": {"block": "16", "mode": "dense"},
    }
    assert mistakes({"blok": 16, "num_local_blocks": 0, "layers": entries}, num_layers=12) == [
        'blok: unknown key (given 16). Did you mean "block"?',
        "num_local_blocks: got 0; wanted an integer of at least 1.",
        'layers."5-2": a range that ends before it begins; write the smaller number first.',
        'layers."first": a key names layers in the digits 0 to 9, counted from 0, such as "0-5,7".',
        'layers.3: a key names layers in the digits 0 to 9, counted from 0, such as "0-5,7".',
        'layers."\u0661": a key names layers in the digits 0 to 9, counted from 0, such as "0-5,7".',
        'layers."1": got 4; wanted an object with the keys that differ from the block, or null for dense.',
        'layers."2": layers inside layers; an entry has the keys of a mode.',
        'layers."0-12".num_local_blcks: unknown key (given 4). Did you mean "num_local_blocks"?',
        'layers."4".mode: got "bigbrid"; wanted "bigbird", "bslongformer", "dense", "fixed", "indexer", '
        '"local_sliding_window", "moba", "nsa", "transformers_bigbird" or "variable". Did you mean "bigbird"?',
        'layers."6".block: got "16"; wanted 8, 16, 32, 64 or 128.',
        'layers."0-12": names layer 12, and the model has 12 attention layers, 0 to 11.',
    ]


@pytest.mark.parametrize("layers", [3, None, "0-5", []])
def test_layers_that_are_no_object_are_a_mistake(layers):
    assert mistakes({"layers": layers})[0].endswith(
        'wanted an object of layers, such as {"0-5,7": {"mode": "dense"}, "8": null}.'
    )


def test_a_rule_between_a_key_of_the_block_and_one_of_an_entry_is_held():
    (sentence,) = mistakes({"num_local_blocks": 4, "layers": {"0": {"num_global_blocks": 3}}})
    assert sentence.startswith('layers."0".num_local_blocks: got 4 with num_global_blocks 3. ')


def test_a_layout_has_to_exist_in_every_layer():
    windows = {"mode": "bigbird", "num_sliding_window_blocks": 3, "num_random_blocks": 0}
    (sentence,) = mistakes({**windows, "layers": {"1": {"block": 128}}}, seq_len=64)
    assert sentence.startswith('layers."1".num_sliding_window_blocks: got 3')


def test_one_structure_for_all_is_not_made_of_a_block_with_layers():
    with pytest.raises(SparseAttentionConfigError, match="use ds_sparse.parse_sparse_attention_layers or"):
        ds_sparse.parse_sparse_attention(BLOCK, 4)


def test_a_misspelt_key_is_found():
    assert mistakes({"layer": {"0": None}}) == ['layer: unknown key (given {"0": null}). Did you mean "layers"?']


def test_pythons_none_in_a_file_is_dense(write):
    path = write('{"sparse_attention": {"layers": {"0": None\n}}}')
    assert read_block(load_config(path).block, 4).of_all(2)[0] is None


def test_what_is_written_is_read_as_the_same():
    structures = read_block(BLOCK, 4)
    written = json.loads(json.dumps(structures.block()))
    assert written["layers"]["0-3, 6"] == {"num_local_blocks": 2} and written["layers"]["8"] is None
    again = read_block(written, 4)
    for layer in range(10):
        ours, theirs = structures.of(layer), again.of(layer)
        assert type(ours) is type(theirs) and (ours is None or vars(ours) == vars(theirs))
    assert again.block() == written


@pytest.mark.usefixtures("registry")
def test_a_structure_with_a_field_of_this_name_keeps_it():
    @register_sparsity("layered")
    class Layered(SparsityConfig):
        def __init__(self, num_heads, block=16, layers: int = 2):
            super().__init__(num_heads, block)
            self.layers = layers

        def make_layout(self, seq_len):
            return self.setup_layout(seq_len)

    assert ds_sparse.parse_sparse_attention({"mode": "layered", "layers": 5}, 4).layers == 5
    assert read_block({"mode": "layered", "layers": 5}, 4).block_of(0)["layers"] == 5
