import pytest
import torch
from helpers import as_on_hopper

from ds_sparse import BlockIndex
from ds_sparse.dispatch import tile_heights
from ds_sparse.drawing.walk import walks
from ds_sparse.index.packing import block_of, owner_bit
from ds_sparse.sparsity import BigBirdSparsityConfig, FixedSparsityConfig

STRUCTURES = [
    structure
    for block in (8, 16, 32, 64, 128)
    for structure in (
        BigBirdSparsityConfig(1, block, num_random_blocks=2, seed=block),
        FixedSparsityConfig(1, block, num_local_blocks=3),
    )
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: f"{type(one).__name__}-{one.block}")
def test_tiles_are_those_of_the_index_and_every_block_of_their_lists_is_counted(structure):
    live = structure.make_bool_layout(structure.block * 37)[0]
    index = BlockIndex.build(live, structure.block)
    found = walks(live, structure.block)
    for walk in found:
        tiles = index.tiles(walk.side, walk.tile)
        assert walk.lines.tolist() == tiles.lines.tolist()
        assert walk.entries == len(tiles.entries)
        owners = torch.stack([owner_bit(tiles.entries, line) for line in range(walk.height)], 1)
        assert walk.live == owners.sum() == live.sum()
        parts = owners.unflatten(1, (walk.parts, -1)).any(2).sum()
        assert walk.walked == parts * walk.height // walk.parts
        assert block_of(tiles.entries).max() < 37


@pytest.mark.parametrize("block", [8, 16, 64, 128])
def test_they_are_the_tiles_that_some_device_walks(block):
    live = torch.ones(9, 9, dtype=torch.bool)
    found = {walk.tile: walk.by for walk in walks(live, block)}
    assert [tile for tile, by in found.items() if "cpu" in by] == tile_heights(
        "block_sparse_attention", torch.device("cpu"), block
    )
    with as_on_hopper():
        assert sorted(found) == tile_heights("block_sparse_attention", torch.device("cuda"), block)
    assert [walk.side for walk in walks(live, block)] == ["rows", "columns"] * len(found)


def test_a_half_of_a_tile_on_hopper_leaves_out_what_none_of_its_rows_has():
    live = torch.zeros(8, 8, dtype=torch.bool)
    live[:4, 0] = live[4:, 1] = live[2, 5] = True
    of_rows = {walk.tile: walk for walk in walks(live, 16) if walk.side == "rows"}
    assert (of_rows[128].entries, of_rows[128].walked, of_rows[128].live) == (3, 12, 9), "row 2 has three others"
    assert (of_rows[64].entries, of_rows[64].walked) == (3, 12)
