import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_pages import layout_of

from ds_sparse.drawing.changes import Changes
from ds_sparse.layout import LayoutRows
from ds_sparse.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    VariableSparsityConfig,
)

modest = settings(deadline=None, derandomize=True, max_examples=60)


def changes_of(layout):
    return Changes.of(LayoutRows.of(layout).pieces(0))


@modest
@given(st.integers(1, 300), st.integers(1, 70), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 99))
def test_rows_made_again_from_their_changes_are_the_layout(rows, columns, share, seed):
    layout = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    changes = changes_of(layout)
    assert (layout_of(changes.packed(), rows, columns) == layout.numpy()).all()
    assert changes.live == layout.sum()
    assert (changes.counts % 2 == 0).all() and changes.counts.sum() == len(changes.places)


def test_what_repeats_from_row_to_row_is_not_written_again():
    stripes = torch.zeros(64, 64, dtype=torch.bool)
    stripes[:, ::2] = True
    assert changes_of(stripes).counts.tolist() == [64] + [0] * 63
    band = torch.ones(64, 64, dtype=torch.bool).tril(2).triu(-2)
    assert changes_of(band).counts[3:61].tolist() == [4] * 58, "a block begins, and one ends"


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(
            BigBirdSparsityConfig(1, 64, num_random_blocks=3, seed=1),
            marks=pytest.mark.slow("draws a million tokens' random blocks"),
        ),
        BSLongformerSparsityConfig(1, 64, num_sliding_window_blocks=17, global_block_indices=[0, 9000]),
        FixedSparsityConfig(1, 64),
        VariableSparsityConfig(1, 64, local_window_blocks=[16, 512]),
    ],
    ids=lambda structure: type(structure).__name__,
)
def test_a_million_tokens_are_small(structure):
    changes = Changes.of(structure.make_rows(1 << 20).pieces(0))
    assert len(zlib.compress(changes.packed(), 9)) < 400_000
