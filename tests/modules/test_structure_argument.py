"""What layers and models take for the structure of their attention."""

import pytest

import ds_sparse
from ds_sparse.modules.structure_argument import for_all_layers, read_structures


def test_a_dict_a_structure_or_nothing_say_structures():
    given = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=32)
    of_dict, of_structure = (read_structures(x, 4).others for x in ({"mode": "bslongformer", "block": 32}, given))
    assert type(of_dict) is type(of_structure) is type(given) and of_dict.block == of_structure.block == 32
    assert of_structure is not given
    assert type(read_structures(None, 4).others) is ds_sparse.FixedSparsityConfig


def test_one_structure_is_taken_only_of_a_block_without_layers():
    assert type(for_all_layers(read_structures({"mode": "dense"}, 2))) is ds_sparse.DenseSparsityConfig
    with pytest.raises(ValueError, match="the sparse_attention block has layers, and one structure is wanted here"):
        for_all_layers(read_structures({"layers": {"0": None}}, 2))


def test_a_structure_for_other_heads_is_refused():
    with pytest.raises(ValueError, match="The model has 2 attention heads and the sparsity config num_heads=4"):
        read_structures(ds_sparse.DenseSparsityConfig(num_heads=4), 2)
