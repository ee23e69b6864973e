import random

import pytest

from ds_sparse import SparseAttentionConfigError, parse_sparse_attention
from ds_sparse.config import example_block
from ds_sparse.sparsity import sparsity_class, sparsity_modes
from ds_sparse.sparsity._fields import json_fields


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
    found = {
        mode: (block["num_random_blocks"], block["seed"])
        for mode, block in drawn.items()
        if "num_random_blocks" in block
    }
    assert found == {"bigbird": (1, 0), "transformers_bigbird": (3, 0), "variable": (0, None)}


def test_what_is_given_is_kept_and_mistakes_are_those_of_a_file():
    assert example_block("bigbird", {"seed": 5, "block": 64})["seed"] == 5
    with pytest.raises(SparseAttentionConfigError) as error:
        example_block("fixed", {"num_local_blocks": 0, "blok": 8}, source="mine")
    assert [sentence.partition(": ")[0] for sentence in error.value.mistakes] == ["mine", "mine"]
