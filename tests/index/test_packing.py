"""The packing of entries and strips, bit by bit as the kernels unpack it."""

from __future__ import annotations

import torch

from ds_sparse.index.packing import MAX_BLOCKS, MAX_LINES, block_of, owner_bit, pack_rows, place_of


def test_an_entry_has_the_block_in_24_bits_and_an_owner_in_each_of_the_others():
    blocks, owners = [0, 5, 2**24 - 1, 7], [0b1, 0b1000_0000, 0b1111_1111, 0b0101_0000]
    entries = torch.tensor([b | o << 24 for b, o in zip(blocks, owners)]).int()
    assert block_of(entries).tolist() == blocks
    assert [block_of(entry) for entry in entries.tolist()] == blocks
    for line in range(8):
        assert owner_bit(entries, line).tolist() == [o >> line & 1 for o in owners]
    lines = torch.arange(8, dtype=torch.int32)
    assert owner_bit(entries[:, None], lines)[3].tolist() == [0, 0, 0, 0, 1, 0, 1, 0]
    assert (MAX_BLOCKS, MAX_LINES) == (2**24, 8)


def test_places_ascend_by_tile_and_then_by_block():
    tile, block = torch.tensor([0, 0, 1, 2**31]), torch.tensor([3, 2**24 - 1, 0, 1])
    place = place_of(tile, block)
    assert place.dtype == torch.int64 and bool((place.diff() > 0).all())


def test_a_strip_has_its_first_row_above_five_bits():
    assert pack_rows(torch.tensor([0, 96]), torch.tensor([0, 5])).tolist() == [0, 96 * 32 + 5]
