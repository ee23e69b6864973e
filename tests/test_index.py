"""BlockIndex against lists built by hand, and its errors."""

from __future__ import annotations

import pytest
import torch
from helpers import EXAMPLES, Layout, layouts
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse.index import BlockIndex

LISTS = ("row_offsets", "row_columns", "column_offsets", "column_rows", "column_slots")


def lists_by_hand(live: list[list[list[bool]]]) -> dict[str, list[int]]:
    rows, columns = len(live[0]), len(live[0][0])
    made: dict[str, list[int]] = {name: [] for name in LISTS}
    made["row_offsets"], made["column_offsets"] = [0], [0]
    entry = {}
    for stored, head in enumerate(live):
        for i in range(rows):
            for j in range(columns):
                if head[i][j]:
                    entry[stored, i, j] = len(made["row_columns"])
                    made["row_columns"].append(j)
            made["row_offsets"].append(len(made["row_columns"]))
    for stored, head in enumerate(live):
        for j in range(columns):
            for i in range(rows):
                if head[i][j]:
                    made["column_rows"].append(i)
                    made["column_slots"].append(entry[stored, i, j])
            made["column_offsets"].append(len(made["column_rows"]))
    return made


@EXAMPLES
@given(layout=layouts(max_side=6), block=st.sampled_from((8, 16, 128)))
def test_lists_are_those_built_by_hand(layout: Layout, block: int):
    index = BlockIndex.build(layout.given, block)
    stored = layout.live.tolist()
    stored = stored[:1] if all(head == stored[0] for head in stored) else stored
    assert (index.block, index.num_heads, index.rows, index.columns) == (
        block,
        layout.heads,
        layout.rows,
        layout.columns,
    )
    assert index.layout_heads == len(stored)
    for name, expected in lists_by_hand(stored).items():
        assert getattr(index, name).dtype == torch.int32
        assert getattr(index, name).tolist() == expected, name


@EXAMPLES
@given(layout=layouts(), heads=st.integers(1, 5))
def test_number_of_values_and_heads(layout: Layout, heads: int):
    index = BlockIndex.build(layout.given, 16)
    heads = heads if layout.heads == 1 else layout.heads
    values = layout.num_values(heads)
    assert index.num_values(heads) == values
    assert index.heads_of(values) == (heads if values else layout.heads)
    if values:
        assert index.heads_of(values + 1) in ({None} if layout.live.sum() > 1 or layout.heads > 1 else {heads + 1})


def test_heads_of_a_layout_with_heads_are_its_own():
    index = BlockIndex.build(torch.ones(4, 2, 2, dtype=torch.bool), 16)
    assert index.layout_heads == 1 and index.num_heads == 4
    assert index.heads_of(16) == 4
    assert index.heads_of(8) is None


def test_to_the_same_device_is_the_index_itself():
    index = BlockIndex.build(torch.ones(2, 2, dtype=torch.bool), 8)
    assert index.to("cpu") is index
    assert index.device == torch.device("cpu")


def test_to_another_device_moves_every_list():
    index = BlockIndex.build(torch.eye(3, dtype=torch.bool), 8)
    moved = index.to("meta")
    assert {getattr(moved, name).device.type for name in LISTS} == {"meta"}
    assert (moved.block, moved.num_heads, moved.layout_heads, moved.rows, moved.columns) == (8, 1, 1, 3, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_built_on_the_gpu_it_equals_the_one_built_on_the_cpu():
    layout = torch.rand(3, 7, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    here, there = BlockIndex.build(layout, 16), BlockIndex.build(layout.cuda(), 16)
    assert there.device.type == "cuda"
    for name in LISTS:
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name


@pytest.mark.parametrize("block", [0, 4, 7, 12, 48, -16, 16.0, True, "16"])
def test_block_is_a_power_of_two_from_8(block: object):
    with pytest.raises(ValueError, match="power of two and at least 8"):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.bool), block)


@pytest.mark.parametrize(
    ("layout", "error", "sentence"),
    [
        (torch.full((2, 2), 2), ValueError, "only 0 and 1"),
        (torch.full((2, 2), -1), ValueError, "only 0 and 1"),
        (torch.ones(2, dtype=torch.bool), ValueError, "shape"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), ValueError, "shape"),
        (torch.ones(2, 0, 2, dtype=torch.bool), ValueError, "at least one"),
        (torch.ones(2, 2), TypeError, "bool or integer"),
        ([[1, 0], [0, 1]], TypeError, "torch tensor"),
    ],
)
def test_layouts_that_cannot_be(layout: object, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        BlockIndex.build(layout, 16)
