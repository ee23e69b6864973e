from __future__ import annotations

import pytest
import torch

from ds_sparse import BlockIndex, BSLongformerSparsityConfig, FixedSparsityConfig
from ds_sparse.index.packing import owner_bit
from ds_sparse.plan.walk import Walk


@pytest.mark.parametrize("block", [16, 32, 64])
def test_entries_are_those_of_the_index_and_halves_compute_what_their_owner_bits_say(block):
    layout = BSLongformerSparsityConfig(num_heads=2, block=block).make_bool_layout(2048)
    walk, index = Walk.of(layout, block), BlockIndex.build(layout, block)
    lines = 128 // block
    for side, name in ((walk.rows, "rows"), (walk.columns, "columns")):
        entries = index.tiles(name, 128).entries
        assert side.entries == len(entries)
        assert side.loaded == len(entries) * block * 128
        halves = [
            torch.stack([owner_bit(entries, line) for line in those]).any(0).sum().item()
            for those in (range(lines // 2), range(lines // 2, lines))
        ]
        assert side.computed == sum(halves) * block * 64


def test_a_dense_layout_wastes_nothing():
    for block in (8, 16, 64, 128):
        walk = Walk.of(torch.ones(1, 2048 // block, 2048 // block, dtype=torch.bool), block)
        assert (walk.density, walk.computed, walk.loaded, walk.waste) == (1, 1, 1, 0)


def test_what_single_blocks_waste():
    """A diagonal of blocks of 16: each half of a tile multiplies its four blocks with all of its 64 rows."""
    walk = Walk.of(torch.eye(128, dtype=torch.bool)[None], 16)
    assert walk.waste == pytest.approx(3 / 4)
    assert walk.loaded == pytest.approx(8 * walk.density)


def test_heads_count_by_their_mean():
    structure = FixedSparsityConfig(
        num_heads=4, block=16, different_layout_per_head=True, num_different_global_patterns=4
    )
    layout = structure.make_bool_layout(1024)
    assert len(layout) == 4
    alone = [Walk.of(layout[head : head + 1], 16) for head in range(4)]
    assert Walk.of(layout, 16).rows.computed == sum(walk.rows.computed for walk in alone) / 4


def test_a_layout_without_a_block_costs_nothing():
    walk = Walk.of(torch.zeros(1, 8, 8, dtype=torch.bool), 64)
    assert (walk.computed, walk.waste) == (0, 0)
