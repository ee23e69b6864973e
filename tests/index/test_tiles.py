"""Tiles of an index against its layout, decoded by hand: what they hold, how well lines are put together, and where
long lists are cut."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from helpers import EXAMPLES, as_on_hopper, layouts_of_lines, seeded
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse import BigBirdSparsityConfig, BlockIndex, BSLongformerSparsityConfig, FixedSparsityConfig
from ds_sparse.index.tiles import Tiles

TENSORS = ("lines", "entries", "units", "cuts")
KINDS = {"rows": ("both", "first", "second"), "columns": ("first", "both", "second")}
"""The order of blocks in tall tiles: those that both halves of the lines have, or one alone."""


def rows_of(live: torch.Tensor, block: int, tile: int = 64) -> Tiles:
    return BlockIndex.build(live, block).tiles("rows", tile)


def lists_of(tiles: Tiles) -> list[list[int]]:
    """The entries of each tile, as uint32."""
    entries = [entry % 2**32 for entry in tiles.entries.tolist()]
    lists: dict[int, list[int]] = {tile: [] for tile, *_ in sorted(tiles.units.tolist())}
    for tile, first, count, _ in sorted(tiles.units.tolist(), key=lambda unit: unit[1]):
        lists[tile] += entries[first : first + count]
    return list(lists.values())


def kinds_of(entries: list[int], height: int) -> list[str]:
    halves = [(bool(entry >> 24 & (1 << height // 2) - 1), bool(entry >> 24 + height // 2)) for entry in entries]
    return ["both" if first and second else "first" if first else "second" for first, second in halves]


def check_work(tiles: Tiles, per_head: int, block: int) -> None:
    """Asserts all that the format says of units and cuts."""
    units: dict[int, list[list[int]]] = {}
    for tile, *unit in tiles.units.tolist():
        units.setdefault(tile, []).append(unit)
    assert sorted(units) == list(range(len(units)))
    order = [(tile // per_head, -length) for tile, _, length, _ in tiles.units.tolist()]
    assert order == sorted(order), "units of a head are together, the longest first"
    cuts = {tile: (first, count) for tile, first, count in tiles.cuts.tolist()}
    at, parts, step = 0, 0, max(1, 64 // block)
    for tile, of_tile in sorted(units.items()):
        of_tile, begin = sorted(of_tile, key=lambda unit: unit[2]), at
        numbers = list(range(parts, parts + len(of_tile))) if tile in cuts else [-1]
        assert [part for _, _, part in of_tile] == numbers
        if tile in cuts:
            assert cuts.pop(tile) == (parts, len(of_tile)) and len(of_tile) > 1
            parts += len(of_tile)
        for first, length, _ in of_tile:
            assert first == at and (first - begin) % step == 0, "units walk the entries in order and leave none out"
            at += length
        lengths = [length for _, length, _ in of_tile]
        assert max(lengths) - min(lengths) < 2 * step, "parts are even"
    assert at == len(tiles.entries) and not cuts


def check_holds(tiles: Tiles, live: torch.Tensor, block: int, side: str) -> None:
    """Asserts that tiles hold a layout, (L, lines, other side), and all that their format says on the way."""
    heads, lines, _ = live.shape
    height = max(1, tiles.tile // block)
    per_head = math.ceil(lines / height)
    for name in TENSORS:
        assert getattr(tiles, name).dtype == torch.int32 and getattr(tiles, name).is_contiguous(), name
    line = tiles.lines.view(heads, per_head, height).tolist()
    for of_head in line:
        assert sorted(number for of_tile in of_head for number in of_tile if number != -1) == list(range(lines))
    check_work(tiles, per_head, block)
    in_kinds = tiles.tile == 128 and block < 128 and (side == "rows" or height > 2)
    found = torch.zeros_like(live)
    for tile, entries in enumerate(lists_of(tiles)):
        columns = [entry % 2**24 for entry in entries]
        assert len(columns) == len(set(columns)), "a block is there once"
        kinds = kinds_of(entries, height) if in_kinds else ["any"] * len(entries)
        for kind in set(kinds):
            of_kind = [column for column, own in zip(columns, kinds) if own == kind]
            assert of_kind == sorted(of_kind)
        if max(live.shape[1:]) * block < 1024:
            assert kinds == sorted(kinds, key=[*KINDS[side], "any"].index)
        for entry, column in zip(entries, columns):
            assert entry >> 24 and not entry >> 24 >> height
            for k, number in enumerate(line[tile // per_head][tile % per_head]):
                if entry >> 24 >> k & 1:
                    assert number != -1
                    found[tile // per_head, number, column] = True
    assert torch.equal(found, live)


@EXAMPLES
@given(live=layouts_of_lines(40, 40), block=st.sampled_from((8, 16, 32, 64, 128)), hopper=st.booleans())
def test_tiles_hold_the_layout(live: torch.Tensor, block: int, hopper: bool):
    if hopper:
        with as_on_hopper():
            index = BlockIndex.build(live, block)
    else:
        index = BlockIndex.build(live, block)
    stored = live[: index.layout_heads]
    for tile in (64, 128) if block > 8 else (64,):
        check_holds(index.tiles("rows", tile), stored, block, "rows")
        check_holds(index.tiles("columns", tile), stored.mT, block, "columns")
        assert index.tiles("rows", tile) is index.tiles("rows", tile) and index.tiles("rows", tile).tile == tile
    assert index.tiles("rows") is index.row_tiles and index.tiles("columns") is index.column_tiles


@pytest.mark.parametrize("block", [8, 16, 64, 128])
def test_long_lists_are_cut_into_even_parts(block: int):
    live = torch.rand(2, 40, 700, generator=seeded()) < 0.02
    live[0, 5] = True
    tiles = rows_of(live, block)
    check_holds(tiles, live, block, "rows")
    per_head, step = len(tiles.lines) // 2 // max(1, 64 // block), max(64, block)
    lengths = tiles.units[tiles.units[:, 0] < per_head, 2] * block
    assert lengths.max() <= max(512, math.ceil(1.5 * int(lengths.sum()) / per_head / step) * step)
    assert len(tiles.cuts) == 1


def test_lists_that_are_a_little_longer_are_not_cut():
    live = torch.zeros(1, 64, 64).bool()
    live[:, :, :6] = True
    live[:, 5, :17] = True
    assert len(rows_of(live, 64).cuts) == 0  # half of it would be 512 tokens less
    live[:, 5, 17] = True
    assert rows_of(live, 64).cuts.tolist() == [[5, 0, 2]]
    live[:, :, :16] = live[:, 5] = True  # at most one and a half times the mean, in steps
    assert rows_of(live, 64).cuts.tolist() == [[5, 0, 3]]


def test_a_global_line_among_windows_is_cut():
    position = torch.arange(4096)
    live = ((position[:, None] - position).abs() <= 1)[None]
    live[0, 17] = True
    tiles = rows_of(live, 16)
    assert tiles.cuts.tolist() == [[0, 0, 128]]
    assert tiles.units[:128, 2:].tolist() == [[32, part] for part in range(128)]
    assert (tiles.units[128:, 3] == -1).all()


def test_the_example_of_the_format():
    tiles = rows_of(torch.tensor([[1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 0]]).bool(), 16)
    assert tiles.lines.tolist() == [0, 1, 3, 2]
    assert tiles.entries.tolist() == [0 | 0b0001 << 24, 1 | 0b1111 << 24, 2 | 0b1000 << 24]
    assert tiles.units.tolist() == [[0, 0, 3, -1]] and tiles.cuts.shape == (0, 3)
    # The bit of an eighth line is the sign.
    assert rows_of(torch.eye(8, dtype=torch.bool), 8).entries[-1].item() == 7 - 2**31


POSITION = torch.arange(2048)


def in_tiles(tiles: Tiles) -> list[list[int]]:
    """The lines of each tile, of blocks of 16."""
    return tiles.lines.view(-1, 4).tolist()


def test_the_rows_of_a_fixed_layout_waste_nothing_and_its_columns_little():
    index = BlockIndex.build(FixedSparsityConfig(num_heads=1, block=16).make_bool_layout(4096), 16)
    assert 4 * len(index.row_tiles.entries) == index.live_blocks
    assert 4 * len(index.column_tiles.entries) < 1.05 * index.live_blocks
    tiles = in_tiles(index.column_tiles)  # every fourth column is global
    assert tiles[:16] == [[3 + 16 * i + 4 * k for k in range(4)] for i in range(16)]
    assert tiles[16:18] == [[0, 1, 2, 4], [5, 6, 8, 9]]


def test_windows_stay_together_and_global_lines_with_each_other():
    layout = BSLongformerSparsityConfig(num_heads=1, block=16, global_block_indices=[0, 9, 77, 140])
    index = BlockIndex.build(layout.make_bool_layout(4096), 16)
    for tiles in (index.row_tiles, index.column_tiles):
        first, *others = in_tiles(tiles)
        assert first == [0, 9, 77, 140]
        assert [line for tile in others for line in tile] == [line for line in range(256) if line not in first]


def test_random_blocks_do_not_scatter_windows():
    structure = BigBirdSparsityConfig(num_heads=2, block=16, seed=0, different_layout_per_head=True)
    index = BlockIndex.build(structure.make_bool_layout(4096), 16)
    for tiles in (index.row_tiles, index.column_tiles):
        assert (tiles.lines.view(2, -1) - torch.arange(256)).abs().max() <= 4


@pytest.mark.parametrize("width", [1, 3, 8, 64])
def test_different_windows_are_told_apart(width: int):
    live = (POSITION - POSITION[:, None]) % 2048 < width
    assert rows_of(live, 16).lines.tolist() == POSITION.tolist()


def test_lines_with_the_same_list_share_a_tile_wherever_they_are():
    strided = (POSITION[:64, None] - POSITION[:64]) % 16 == 0
    assert in_tiles(rows_of(strided, 16))[:2] == [[0, 16, 32, 48], [1, 17, 33, 49]]
    # Lists that differ in one block, far from each other, are told apart.
    alike = torch.zeros(8, 1024, dtype=torch.bool)
    alike[0::2, 63] = alike[1::2, 575] = True
    assert in_tiles(rows_of(alike, 16)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_blocks_of_one_half_are_together(block: int):
    live = torch.rand(2, 960 // block, 960 // block, generator=seeded()) < 0.2
    index = BlockIndex.build(live, block)
    check_holds(index.tiles("rows", 128), live, block, "rows")
    check_holds(index.tiles("columns", 128), live.mT, block, "columns")


def test_in_long_lists_halves_take_turns():
    live = torch.rand(1, 64, 4099, generator=seeded()) < 0.25
    tiles = rows_of(live, 64, 128)
    check_holds(tiles, live, 64, "rows")
    for of_tile in lists_of(tiles):
        turns = [len(list(run)) for kind, run in groupby(kinds_of(of_tile, 2)) if kind != "both"]
        assert 4 < sum(turns) / len(turns) < 8, "256 to 512 tokens a turn, about"


@pytest.mark.parametrize("side, tile", [*(("rows", tile) for tile in (0, 48, -64, 256, 32.0, "3")), ("heads", 64)])
def test_tiles_that_cannot_be(side: str, tile: object):
    sentence = "'rows' or 'columns'" if side == "heads" else "power of two and at most 8 blocks of 16 tokens"
    with pytest.raises(ValueError, match=sentence):
        BlockIndex.build(torch.ones(2, 2, dtype=torch.bool), 16).tiles(side, tile)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_made_on_the_gpu_they_equal_those_made_on_the_cpu(block: int):
    live = torch.rand(3, 300, 1000, generator=seeded()) < 0.02
    live[:, ::7] = live[:, :1]
    live[1, 5], live[2] = True, False
    here, there = BlockIndex.build(live, block), BlockIndex.build(live.cuda(), block)
    for side in ("rows", "columns"):
        for name in TENSORS:
            assert torch.equal(getattr(there.tiles(side), name).cpu(), getattr(here.tiles(side), name)), name


@pytest.mark.parametrize("block", [16, 32, 64])
def test_lines_that_have_little_in_common_are_told(block: int):
    """As kernels walk their halves apart, but for blocks that are too small to gain."""
    random, alike = torch.rand(48, 48, generator=seeded()) < 0.1, torch.eye(6, dtype=torch.bool)
    alike = alike.repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert rows_of(random, block, 128).lines_differ == (block > 16)
    assert not rows_of(alike, block, 128).lines_differ
    bounded = BlockIndex.build(alike, block, capacity=int(alike.sum())).tiles("rows", 128)
    assert bounded.lines_differ == (block > 16), "nobody knows, and what models choose differs"
