"""BlockIndex against lists built by hand, what it keeps and what it costs, and its errors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, CountedOperators, Layout, as_on_hopper, is_hopper, layouts, seeded
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_sparse import BSLongformerSparsityConfig, FixedSparsityConfig
from ds_sparse.index import build
from ds_sparse.index.block import MAX_BLOCK, BlockIndex
from ds_sparse.index.tiles import Tiles

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")

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
    sizes = index.block, index.num_heads, index.layout_heads, index.rows, index.columns
    assert sizes == (block, layout.heads, len(stored), layout.rows, layout.columns)
    for name, expected in lists_by_hand(stored).items():
        assert getattr(index, name).dtype == torch.int32
        assert getattr(index, name).tolist() == expected, name


def assert_equal_tiles(found: Tiles, expected: Tiles) -> None:
    assert found.tile == expected.tile
    for name in ("lines", "entries", "units", "cuts"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name).cpu()), name


@EXAMPLES
@given(layout=layouts(max_side=9), block=st.sampled_from((16, 32, 64, 128)))
def test_slots_of_tiles_are_where_values_are_stored(layout: Layout, block: int):
    with as_on_hopper():
        index = BlockIndex.build(layout.given, block).with_lists()
    number = index.layout().flatten().cumsum(0).sub(1).view(index.layout_heads, index.rows, index.columns)
    assert set(index.lists.slots) == {("rows", 64 if block < 64 else 128), ("rows", 128), ("columns", 128)}
    for (side, tile), slots in index.lists.slots.items():
        tiles, height = index.tiles(side, tile), tile // block
        lines = tiles.lines.view(-1, height).tolist()
        assert slots.shape == (len(tiles.entries), height)
        seen = []
        for tile, first, count, _ in tiles.units.tolist():
            head = tile // (len(lines) // index.layout_heads)
            for entry in range(first, first + count):
                word = int(tiles.entries[entry])
                for k, own in enumerate(lines[tile]):
                    place = (head, own, word & 0xFFFFFF) if side == "rows" else (head, word & 0xFFFFFF, own)
                    assert slots[entry, k] == (number[place] if word >> 24 + k & 1 else -1)
                seen += slots[entry].tolist()
        assert sorted(slot for slot in seen if slot >= 0) == list(range(index.live_blocks))


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, 256])
def test_only_products_that_walk_tiles_have_slots(block: int):
    layout = torch.rand(2, 8, 8, generator=seeded()) < 0.5
    assert not BlockIndex.build(layout, block).lists.slots
    with as_on_hopper():
        assert bool(BlockIndex.build(layout, block).lists.slots) == (block not in (8, 256))


@pytest.mark.parametrize("block", [16, 64, 128])
def test_building_takes_few_operations(block: int):
    # On a GPU each takes 10 us or more of the host's time, and one call of attention a millisecond.
    layout = BSLongformerSparsityConfig(num_heads=1, block=block, num_sliding_window_blocks=9).make_bool_layout(4096)
    with CountedOperators() as counted, as_on_hopper():
        index = BlockIndex.build(layout, block)
    assert {("rows", 128), ("columns", 128)} <= index._made.keys()
    assert counted.number <= 6


def assert_index_of(index: BlockIndex, live: torch.Tensor, heads: int) -> None:
    expected = BlockIndex.build(live, 16)
    assert (index.num_heads, index.layout_heads) == (heads, expected.layout_heads)
    assert torch.equal(index.layout(), expected.layout())
    assert_equal_tiles(index.row_tiles, expected.row_tiles)
    assert_equal_tiles(index.column_tiles, expected.column_tiles)


@EXAMPLES
@given(layout=layouts(max_side=8))
def test_causal_drops_the_blocks_above_the_diagonal(layout: Layout):
    index = BlockIndex.build(layout.given, 16)
    causal = index.causal()
    assert (causal is index) == (not layout.live.triu(1).any())
    assert causal is index.causal() and causal is causal.causal()
    assert_index_of(causal, layout.live.tril(), layout.heads)


@EXAMPLES
@given(layout=layouts(max_side=8))
def test_row_lengths_count_the_live_blocks_of_each_row(layout: Layout):
    index = BlockIndex.build(layout.given, 16)
    assert index.row_lengths == index.layout().sum(-1).flatten().tolist()


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


def test_its_fields_are_not_given_by_hand():
    layout = torch.ones(4, 4)
    for wrong in (lambda: BlockIndex(layout, 16), lambda: BlockIndex(layout=layout, block=16)):
        with pytest.raises(TypeError, match=r"built from a layout: BlockIndex\.build\(layout, block\)"):
            wrong()


def test_a_copy_elsewhere_holds_what_has_been_made():
    index = BlockIndex.build(torch.rand(2, 9, 9, generator=seeded()) < 0.4, 16).with_lists().with_strips()
    index.causal().tiles("rows", 128)
    other = index.to("meta")
    assert {x.device.type for x in tensors_of(other)} == {"meta"}
    assert sum(x.nbytes for x in tensors_of(other)) == sum(x.nbytes for x in tensors_of(index))


def tensors_of(made: object) -> Iterator[torch.Tensor]:
    """Every tensor that an index holds, without asking it for any."""
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, dict) or hasattr(made, "__dict__"):
        for value in (made if isinstance(made, dict) else vars(made)).values():
            yield from tensors_of(value)


def test_the_index_of_a_long_sequence_is_small():
    layout = FixedSparsityConfig(num_heads=12, block=16).make_bool_layout(131072)
    index = BlockIndex.build(layout, 16)
    assert layout.shape == (1, 8192, 8192) and index.live_blocks == 16_801_792
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(index)}
    assert sum(storages.values()) < 48 * 2**20


def test_reading_it_compiles_into_one_graph():
    index = BlockIndex.build(torch.rand(2, 9, 9, generator=seeded()) < 0.4, 16).with_lists()
    index.tiles("rows", 128)
    index.causal()

    def read(x: torch.Tensor, given: BlockIndex) -> torch.Tensor:
        for tiles in (index.row_tiles, given.column_tiles, given.causal().row_tiles, index.tiles("rows", 128)):
            x = x * tiles.tile + tiles.entries.sum() * tiles.units.shape[0]
        return x + given.num_values(2) + index.row_columns.sum() * index.column_slots.shape[0]

    x = torch.ones(3, dtype=torch.float64)
    assert torch.equal(torch.compile(read, fullgraph=True, backend="aot_eager")(x, index), read(x, index))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_built_on_the_gpu_it_equals_the_one_built_on_the_cpu(dtype: torch.dtype):
    layout = (torch.rand(3, 37, 50, generator=seeded()) < 0.4).to(dtype)
    here, there = BlockIndex.build(layout, 16), BlockIndex.build(layout.cuda(), 16)
    for ours, theirs in ((here, there), (here.causal(), there.causal())):
        assert theirs.device.type == "cuda" and ours.reaches_ahead == theirs.reaches_ahead
        assert torch.equal(ours.bits, theirs.bits.cpu())
        assert_equal_tiles(theirs.row_tiles, ours.row_tiles)
        assert_equal_tiles(theirs.column_tiles, ours.column_tiles)
        for name in LISTS:
            assert torch.equal(getattr(ours, name), getattr(theirs, name).cpu()), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("chance", [0.01, 0.9], ids=["sparse", "dense"])
def test_moved_to_the_gpu_it_equals_the_one_built_there(block: int, chance: float):
    layout = torch.rand(3, 64, 64, generator=seeded()) < chance
    here = BlockIndex.build(layout, block).with_lists()
    here.causal()
    moved, built = here.to("cuda"), BlockIndex.build(layout.cuda(), block)
    assert moved is not here and moved.to("cuda") is moved and moved.to(built.device) is moved
    for found, expected in ((moved, built), (moved.causal(), built.causal())):
        assert found.device == expected.device and torch.equal(found.bits, expected.bits)
        for side in ("rows", "columns"):
            assert ((side, 128) in found._made) == ((side, 128) in expected._made) == is_hopper(found.device)
        for tile in (64, 128):
            for side in ("rows", "columns"):
                assert_equal_tiles(found.tiles(side, tile), expected.tiles(side, tile))
    for name in LISTS:
        assert torch.equal(getattr(moved, name), getattr(built, name)), name
    slots = moved.lists.slots
    assert bool(slots) == is_hopper(built.device) and slots.keys() == built.lists.slots.keys()
    assert all(torch.equal(slots[key], built.lists.slots[key]) for key in slots)
    assert waits(lambda: (moved.lists, moved.causal())) == 0
    back = moved.to("cpu")
    assert back.device.type == "cpu" and torch.equal(back.row_columns, here.row_columns)
    assert not back.lists.slots
    assert_equal_tiles(back.row_tiles, here.row_tiles)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("heads", ["shared", "equal", "different"])
def test_it_waits_for_the_gpu_once(dtype: torch.dtype, block: int, heads: str):
    layout = torch.rand(1 if heads == "shared" else 3, 40, 40, generator=seeded()) < 0.3
    layout = (layout[:1].repeat(3, 1, 1) if heads == "equal" else layout).to(dtype).cuda()
    made: list[BlockIndex] = []
    steps = {
        "build": (lambda: made.append(BlockIndex.build(layout, block)), 1),
        "lists": (lambda: made[-1].lists, 0),
        "strips": (lambda: made[-1].strips, 1),
        "causal": (lambda: made[-1].causal(), 1),
        "causal again": (lambda: made[-1].causal().row_tiles, 0),
        "another height": (lambda: made[-1].tiles("rows", 32), 1),
    }
    for step, (run, expected) in steps.items():
        assert waits(run) == expected, step


PARTS = {
    "tiles": lambda index: index.row_tiles.entries,
    "units": lambda index: index.column_tiles.units,
    "other tiles": lambda index: index.tiles("rows", 32).entries,
    "lists": lambda index: index.column_slots,
    "causal": lambda index: index.causal().row_tiles.entries,
    "layout": lambda index: index.layout(),
    "copy": lambda index: copy.deepcopy(index).row_tiles.entries,
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("part", PARTS)
def test_another_stream_waits_for_the_one_that_made_it(part: str, monkeypatch: pytest.MonkeyPatch):
    layout, fetch = torch.rand(2, 200, 200, generator=seeded()) < 0.1, build._on_host

    def fetch_and_sleep(*tensors: torch.Tensor) -> list[int]:
        numbers = fetch(*tensors)
        torch.cuda._sleep(10**8)
        return numbers

    expected, given = PARTS[part](BlockIndex.build(layout, 16)), layout.cuda()
    PARTS[part](BlockIndex.build(given, 16))  # a kernel's first launch loads it, which may wait for the device
    torch.cuda.synchronize()
    monkeypatch.setattr(build, "_on_host", fetch_and_sleep)
    maker, user = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(maker):
        index = BlockIndex.build(given, 16)
        if part != "copy":
            PARTS[part](index)
        assert not maker.query(), "the work is over before it is used"
    with torch.cuda.stream(user):
        found = [PARTS[part](index).clone() for _ in range(2)]
    user.synchronize()
    assert all(torch.equal(x.cpu(), expected) for x in found)


@pytest.mark.gpu
@needs_gpu
def test_in_a_capture_no_stream_waits():
    index = BlockIndex.build(torch.ones(3, 3, dtype=torch.bool, device="cuda"), 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entries = index.row_tiles.entries + index.column_tiles.entries
    graph.replay()
    assert torch.equal(entries, index.row_tiles.entries + index.column_tiles.entries)


def waits(run) -> int:
    """How often a function waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in given)


@pytest.mark.gpu
@needs_gpu
def test_building_takes_a_few_times_the_memory_of_the_layout():
    layout = FixedSparsityConfig(num_heads=12, block=16).make_bool_layout(131072).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    BlockIndex.build(layout, 16)
    assert torch.cuda.max_memory_allocated() - before < 5 * layout.nbytes


@pytest.mark.parametrize("block", [0, 4, 7, 12, 48, -16, 16.0, True, "16", 2**16, 2**62, 2**100])
def test_block_is_a_power_of_two_from_8(block: object):
    with pytest.raises(ValueError, match="power of two and at least 8"):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.bool), block)


def test_a_block_may_be_a_number_of_numpy():
    layout = torch.ones(2, 2, dtype=torch.bool)
    assert type(BlockIndex.build(layout, np.int64(16)).block) is int
    assert BlockIndex.from_mask(torch.ones(32, 32, dtype=torch.bool), np.int32(16)).rows == 2
    assert BlockIndex.build(layout, MAX_BLOCK).with_strips().block == MAX_BLOCK


@pytest.mark.parametrize(
    ("layout", "error", "sentence"),
    [
        *((torch.full((2, 2), number), ValueError, "only 0 and 1") for number in (2, -1, 0.5)),
        (torch.ones(2, dtype=torch.bool), ValueError, "shape"),
        ([[1, 0], [0, 1]], TypeError, "torch tensor"),
        (torch.eye(2).to_sparse_csr(), TypeError, r"layout torch\.sparse_csr; give layout\.to_dense\(\) != 0"),
        (torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)]), TypeError, r"nested; give layout"),
    ],
)
def test_layouts_that_cannot_be(layout: object, error: type[Exception], sentence: str):
    with pytest.raises(error, match=sentence):
        BlockIndex.build(layout, 16)


def test_a_layout_without_values_is_refused():
    with pytest.raises(ValueError, match="layout is on the meta device, where it has no values; make it on the CPU"):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.bool, device="meta"), 16)
    with FakeTensorMode(), pytest.raises(ValueError, match="layout is a fake tensor, which has no values; make it"):
        BlockIndex.build(torch.ones(2, 2), 16)
