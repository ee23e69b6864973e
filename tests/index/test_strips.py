"""Strips against the layout they were made of."""

from __future__ import annotations

import pytest
import torch
from helpers import EXAMPLES, Layout, layouts, make_layout
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse.index import BlockIndex
from ds_sparse.index.strips import CACHE_LINE, PARTS, SIZES, Strips


def decoded(strips: Strips, index: BlockIndex) -> list[list[int]]:
    """How often each token row of each block row is in a strip; asserts all that the format says on the way."""
    assert strips.units.dtype == torch.int32 and strips.units.is_contiguous() and strips.most in SIZES
    offsets, block = index.row_offsets.tolist(), index.block
    found = [[0] * block for _ in offsets[1:]]
    order = []
    for line, first_entry, count, rows in strips.units.tolist():
        first_row, number = rows >> 5, 1 << (rows & 31)
        assert (first_entry, count) == (offsets[line], offsets[line + 1] - offsets[line]) and count > 0
        assert first_row % number == 0 and number * block <= max(block, strips.most // PARTS)
        elements = number * count * block
        assert elements <= strips.most or number == 1
        if number < block and 2 * number * block <= strips.most // PARTS:
            assert 2 * elements > strips.most, "twice as many rows would have fitted"
        order.append((-max(0, elements - strips.most), line, first_row))
        for row in range(first_row, first_row + number):
            found[line][row] += 1
    assert order == sorted(order)
    return found


@EXAMPLES
@given(layout=layouts(max_side=6), block=st.sampled_from((8, 16, 32, 128, 1024)))
def test_every_token_row_with_a_live_block_is_in_one_strip(layout: Layout, block: int):
    index = BlockIndex.build(layout.given, block)
    lengths = index.row_offsets.diff().tolist()
    assert decoded(index.strips, index) == [[int(length > 0)] * block for length in lengths]


@pytest.mark.parametrize("block", [8, 16, 64, 128])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
def test_rows_of_mean_length_fill_cache_lines(tokens: int, block: int):
    index = BlockIndex.build(torch.ones(1, tokens // block, dtype=torch.bool), block)
    strips = index.strips
    rows = 1 << (strips.units[0, 3].item() & 31)
    wanted = max(1, CACHE_LINE // block)
    assert rows >= wanted or (strips.most == SIZES[-1] and wanted * tokens > SIZES[-1])
    smaller = [size for size in SIZES if size < strips.most]
    assert all(8 * wanted * tokens > 7 * size for size in smaller)


def test_rows_beyond_a_strip_come_first():
    layout = torch.eye(512, dtype=torch.bool)
    layout[7], layout[300, :400] = True, True
    index = BlockIndex.build(layout, 16)
    strips = index.strips
    assert strips.most == SIZES[0] and strips.units[:32, 0].tolist() == [7] * 16 + [300] * 16
    assert strips.units[32:, 0].tolist() == [line for line in range(512) if line not in (7, 300)]
    assert decoded(strips, index) == [[1] * 16] * 512


def test_a_layout_without_a_live_block_has_none():
    index = BlockIndex.build(make_layout(torch.zeros(2, 2, dtype=torch.bool)).given, 16)
    assert index.strips.units.shape == (0, 4)
