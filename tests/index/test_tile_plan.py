"""Tiles against the layout they were made of, decoded by hand, and how well lines are put together."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from helpers import EXAMPLES, generator, seeded
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse import BigBirdSparsityConfig, BSLongformerSparsityConfig, FixedSparsityConfig
from ds_sparse.index.tile_plan import BOTH, FIRST, SECOND, TilePlan
from ds_sparse.index.tiles import Tiles

TENSORS = ("lines", "entries", "units", "cuts")


def make_tiles(live: torch.Tensor, block: int, tile: int = 64) -> Tiles:
    return plan_and_pack({"rows": live}, block, tile)["rows", tile]


def plan_and_pack(sides: dict[str, torch.Tensor], block: int, *tiles: int) -> dict[tuple[str, int], Tiles]:
    plan = TilePlan.make(sides, block, *tiles)
    return plan.pack(plan.split(plan.lengths.flatten().tolist(), len(next(iter(sides.values())))))


def decoded(tiles: Tiles, live: torch.Tensor, block: int) -> torch.Tensor:
    """The layout that the tiles hold; asserts all that the format says of them on the way. `live` gives its shape."""
    heads, lines, _ = live.shape
    height = max(1, tiles.tile // block)
    per_head = math.ceil(lines / height)
    for name in TENSORS:
        assert getattr(tiles, name).dtype == torch.int32 and getattr(tiles, name).is_contiguous(), name

    line = tiles.lines.view(heads, per_head * height).tolist()
    for of_head in line:
        assert sorted(number for number in of_head if number != -1) == list(range(lines))

    entries = [entry % 2**32 for entry in tiles.entries.tolist()]
    units: dict[int, list[list[int]]] = {tile: [] for tile in range(heads * per_head)}
    for tile, *unit in tiles.units.tolist():
        units[tile].append(unit)
    order = [(tile // per_head, -length) for tile, _, length, _ in tiles.units.tolist()]
    assert order == sorted(order), "units of a head are together, the longest first"
    cuts = {tile: (first, count) for tile, first, count in tiles.cuts.tolist()}
    assert list(cuts) == [tile for tile in units if len(units[tile]) > 1]

    found, at, parts = torch.zeros_like(live), 0, 0
    for tile, of_tile in units.items():
        if tile in cuts:
            assert cuts[tile] == (parts, len(of_tile))
            of_tile = sorted(of_tile, key=lambda unit: unit[2])
            assert [part for _, _, part in of_tile] == list(range(parts, parts + len(of_tile)))
            parts += len(of_tile)
        else:
            assert [part for _, _, part in of_tile] == [-1]
        begin = at
        for first, length, _ in of_tile:
            assert first == at, "units walk the entries in order and leave none out"
            at += length
        head, lines_of_tile = tile // per_head, line[tile // per_head][tile % per_head * height :][:height]
        for entry in entries[begin:at]:
            assert entry >> 24 and not entry >> 24 >> height
            for k, number in enumerate(lines_of_tile):
                if entry >> 24 >> k & 1:
                    assert number != -1
                    found[head, number, entry % 2**24] = True
        columns = [entry % 2**24 for entry in entries[begin:at]]
        assert len(columns) == len(set(columns)), "a block is there once"
        for of_kind in (columns,) if tiles.tile < 128 else columns_of_kinds(entries[begin:at], height).values():
            assert of_kind == sorted(of_kind)
    assert at == len(entries)
    return found


@st.composite
def lives(draw: st.DrawFn) -> torch.Tensor:
    """Bool (heads, lines, blocks): lines alike and different, long and empty, empty heads."""
    heads, lines, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = generator(draw)
    kinds = torch.rand(heads, draw(st.integers(1, lines)), blocks, generator=rng) < draw(
        st.sampled_from((0.0, 0.05, 0.3, 0.9, 1.0))
    )
    live = kinds[:, torch.randint(kinds.shape[1], (lines,), generator=rng)]
    if draw(st.booleans()):
        live[:, draw(st.integers(0, lines - 1))] = draw(st.booleans())
    if draw(st.booleans()):
        live[draw(st.integers(0, heads - 1))] = False
    return live


@EXAMPLES
@given(live=lives(), block=st.sampled_from((8, 16, 32, 64, 128)), tile=st.sampled_from((64, 128)))
def test_tiles_hold_the_layout(live: torch.Tensor, block: int, tile: int):
    if tile > 8 * block:
        with pytest.raises(ValueError, match="at most 8 blocks of 8 tokens"):
            make_tiles(live, block, tile)
        return
    tiles = make_tiles(live, block, tile)
    assert tiles.tile == tile
    assert torch.equal(decoded(tiles, live, block), live)
    assert torch.equal(decoded(make_tiles(live.transpose(1, 2), block, tile), live.transpose(1, 2), block).mT, live)


@EXAMPLES
@given(
    lines=st.integers(1, 9),
    blocks=st.integers(100, 700),
    block=st.sampled_from((8, 16, 32, 64, 128)),
    chance=st.sampled_from((0.0, 0.02, 0.3)),
    seed=st.integers(0, 2**20),
)
def test_long_lists_are_cut_into_even_parts(lines: int, blocks: int, block: int, chance: float, seed: int):
    live = torch.rand(2, 8 * lines, blocks, generator=seeded(seed)) < chance
    live[0, lines] = True
    tiles = make_tiles(live, block)
    assert torch.equal(decoded(tiles, live, block), live)
    per_head = len(tiles.lines) // 2 // max(1, 64 // block)
    lengths = torch.zeros(2 * per_head, dtype=torch.long)
    lengths.index_add_(0, tiles.units[:, 0], tiles.units[:, 2].long())
    step = max(64, block)
    begins = lengths.cumsum(0) - lengths
    for head, of_head in enumerate(lengths.view(2, per_head)):
        mean = of_head.sum().item() * block / per_head
        bound = max(512, math.ceil(1.5 * mean / step) * step)
        longest_parts = [length / max(1, math.ceil(length * block / bound)) for length in of_head.tolist()]
        if (of_head.max().item() - math.ceil(max(longest_parts))) * block <= 512:
            bound = math.inf
        of_tile: dict[int, list[int]] = {}
        for tile, first, length, _ in tiles.units.tolist():
            if tile // per_head == head:
                assert length * block <= bound
                assert (first - begins[tile].item()) * block % step == 0
                of_tile.setdefault(tile, []).append(length * block)
        for tile, parts in of_tile.items():
            assert max(parts) - min(parts) < 2 * step
            assert len(parts) == max(1, math.ceil(math.ceil(lengths[tile].item() * block / step) * step / bound))


def test_lists_that_are_a_little_longer_are_not_cut():
    live = torch.zeros(1, 64, 64).bool()
    live[:, :, :6] = True
    live[:, 5, :17] = True
    assert len(make_tiles(live, 64).cuts) == 0  # half of it would be 512 tokens less
    live[:, 5, 17] = True
    assert make_tiles(live, 64).cuts.tolist() == [[5, 0, 2]]


def test_a_global_line_among_windows_is_cut():
    position = torch.arange(4096)
    live = ((position[:, None] - position).abs() <= 1)[None]
    live[0, 17] = True
    tiles = make_tiles(live, 16)
    assert tiles.cuts.tolist() == [[0, 0, 128]]
    assert tiles.units[:128, 2].tolist() == [32] * 128
    assert tiles.units[:128, 3].tolist() == list(range(128))
    assert (tiles.units[128:, 3] == -1).all()


def waste(tiles: Tiles, live: torch.Tensor, block: int) -> float:
    """Blocks that the tiles walk for each live one."""
    return len(tiles.entries) * max(1, tiles.tile // block) / live.sum().item()


def in_tiles(tiles: Tiles, block: int) -> list[list[int]]:
    return tiles.lines.view(-1, tiles.tile // block).tolist()


def test_the_example_of_the_format():
    live = torch.tensor([[1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 1, 0]]).bool()[None]
    tiles = make_tiles(live, 16)
    assert tiles.lines.tolist() == [0, 1, 3, 2]
    assert tiles.entries.tolist() == [0 | 0b0001 << 24, 1 | 0b1111 << 24, 2 | 0b1000 << 24]
    assert tiles.units.tolist() == [[0, 0, 3, -1]] and tiles.cuts.shape == (0, 3)
    # The bit of an eighth line is the sign.
    assert make_tiles(torch.eye(8, dtype=torch.bool)[None], 8).entries[-1].item() == 7 - 2**31


def test_the_rows_of_a_fixed_layout_waste_nothing_and_its_columns_little():
    live = FixedSparsityConfig(num_heads=1, block=16).make_bool_layout(4096)
    assert waste(make_tiles(live, 16), live, 16) == 1
    columns = live.transpose(1, 2)
    tiles = make_tiles(columns, 16)
    assert waste(tiles, live, 16) < 1.05
    # Every fourth column is global.
    assert in_tiles(tiles, 16)[:16] == [[3 + 16 * i + 4 * k for k in range(4)] for i in range(16)]
    assert in_tiles(tiles, 16)[16:18] == [[0, 1, 2, 4], [5, 6, 8, 9]]


def test_windows_stay_together_and_global_lines_with_each_other():
    layout = BSLongformerSparsityConfig(num_heads=1, block=16, global_block_indices=[0, 9, 77, 140])
    live = layout.make_bool_layout(4096)
    for side in (live, live.transpose(1, 2)):
        first, *others = in_tiles(make_tiles(side, 16), 16)
        assert first == [0, 9, 77, 140]
        assert [line for tile in others for line in tile] == [line for line in range(256) if line not in first]


def test_random_blocks_do_not_scatter_windows():
    live = BigBirdSparsityConfig(num_heads=2, block=16, seed=0, different_layout_per_head=True).make_bool_layout(4096)
    for side in (live, live.transpose(1, 2)):
        moved = (make_tiles(side, 16).lines.view(2, -1) - torch.arange(256)).abs()
        assert moved.max() <= 4


@pytest.mark.parametrize("width", [1, 3, 8, 64])
def test_different_windows_are_told_apart(width: int):
    position = torch.arange(2048)
    live = ((position - position[:, None]) % 2048 < width)[None]
    assert make_tiles(live, 16).lines.tolist() == position.tolist()


def test_lines_with_the_same_list_share_a_tile_wherever_they_are():
    position = torch.arange(64)
    strided = ((position[:, None] - position) % 16 == 0)[None]
    assert in_tiles(make_tiles(strided, 16), 16)[:2] == [[0, 16, 32, 48], [1, 17, 33, 49]]
    # Lists that differ in one block, far from each other, are told apart.
    alike = torch.zeros(1, 8, 1024, dtype=torch.bool)
    alike[0, 0::2, 63] = alike[0, 1::2, 575] = True
    assert in_tiles(make_tiles(alike, 16), 16) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_heads_do_not_depend_on_each_other():
    live = torch.rand(3, 50, 70, generator=seeded()) < 0.1
    live[1, 5] = True
    together = TilePlan.make({"rows": live}, 16, 64)
    for head in range(3):
        alone = TilePlan.make({"rows": live[head : head + 1]}, 16, 64)
        assert torch.equal(together.lines[0][head], alone.lines[0][0])
        for name in ("owners", "lengths", "bits", "live_blocks"):
            assert torch.equal(getattr(together, name)[head], getattr(alone, name)[0]), name


@EXAMPLES
@given(live=lives(), block=st.sampled_from((16, 32, 64)))
def test_sides_and_heights_do_not_depend_on_each_other(live: torch.Tensor, block: int):
    side = min(live.shape[1:])
    live = live[:, :side, :side]
    sides = {"rows": live, "columns": live.mT}
    together = plan_and_pack(sides, block, 64, 128)
    assert list(together) == [("rows", 64), ("rows", 128), ("columns", 64), ("columns", 128)]
    for (side, tile), tiles in together.items():
        alone = plan_and_pack({side: sides[side]}, block, tile)[side, tile]
        assert tiles.tile == alone.tile == tile
        assert all(getattr(tiles, name).is_contiguous() for name in TENSORS)
        for name in ("lines", "units", "cuts"):
            assert torch.equal(getattr(tiles, name), getattr(alone, name)), name
        # In what order follows from all.
        assert list(map(sorted, lists_of(tiles))) == list(map(sorted, lists_of(alone)))


@pytest.mark.parametrize("block, side", [(16, "rows"), (16, "columns"), (32, "columns"), (64, "rows")])
def test_blocks_of_one_half_are_together(block: int, side: str):
    live = torch.rand(2, 64, 100, generator=seeded()) < 0.05
    order = (BOTH, FIRST, SECOND) if side == "rows" else (FIRST, BOTH, SECOND)
    for of_tile in lists_of(plan_and_pack({side: live}, block, 128)[side, 128]):
        kinds = [kind_of(entry >> 24, 128 // block) for entry in of_tile]
        assert kinds == sorted(kinds, key=order.index)
        for columns in columns_of_kinds(of_tile, 128 // block).values():
            assert columns == sorted(columns)


def test_in_long_lists_halves_take_turns():
    live = torch.rand(1, 64, 4099, generator=seeded()) < 0.25
    tiles = plan_and_pack({"rows": live}, 64, 128)["rows", 128]
    assert torch.equal(decoded(tiles, live, 64), live)
    for of_tile in lists_of(tiles):
        kinds = [kind_of(entry >> 24, 2) for entry in of_tile]
        turns = [len(list(run)) for kind, run in groupby(kinds) if kind != BOTH]
        assert 4 < sum(turns) / len(turns) < 8, "256 to 512 tokens a turn, about"


@pytest.mark.parametrize(
    "block, side, tile", [(16, "rows", 64), (32, "columns", 64), (64, "columns", 128), (128, "rows", 128)]
)
def test_other_lists_are_ascending(block: int, side: str, tile: int):
    live = torch.rand(2, 64, 100, generator=seeded()) < 0.3
    for of_tile in lists_of(plan_and_pack({side: live}, block, tile)[side, tile]):
        column = [entry % 2**24 for entry in of_tile]
        assert column == sorted(column)


def lists_of(tiles: Tiles) -> list[list[int]]:
    """The entries of each tile, as uint32."""
    entries = [entry % 2**32 for entry in tiles.entries.tolist()]
    lists: dict[int, list[int]] = {}
    for tile, first, count, _ in sorted(tiles.units.tolist(), key=lambda unit: unit[1]):
        lists.setdefault(tile, []).extend(entries[first : first + count])
    return list(lists.values())


def columns_of_kinds(entries: list[int], height: int) -> dict[int, list[int]]:
    """The numbers of blocks by their kind, in the order of entries."""
    columns: dict[int, list[int]] = {BOTH: [], FIRST: [], SECOND: []}
    for entry in entries:
        columns[kind_of(entry >> 24, height)].append(entry % 2**24)
    return columns


def kind_of(owners: int, height: int) -> int:
    first, second = owners % (1 << height // 2), owners >> height // 2
    return BOTH if first and second else FIRST if first else SECOND


def test_heights_together_double():
    with pytest.raises(ValueError, match=r"tiles are \(32, 128\); each has to be twice"):
        TilePlan.make({"rows": torch.ones(1, 2, 2, dtype=torch.bool)}, 16, 32, 128)


@pytest.mark.parametrize("tile", [0, 48, -64, 256, 32.0, "3"])
def test_heights_that_cannot_be(tile: object):
    with pytest.raises(ValueError, match="power of two and at most 8 blocks of 16 tokens"):
        make_tiles(torch.ones(1, 2, 2, dtype=torch.bool), 16, tile)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_made_on_the_gpu_they_equal_those_made_on_the_cpu(block: int):
    live = torch.rand(3, 300, 1000, generator=seeded()) < 0.02
    live[:, ::7] = live[:, :1]
    live[1, 5], live[2] = True, False
    for side in (live, live.transpose(1, 2)):
        here, there = make_tiles(side, block), make_tiles(side.cuda(), block)
        for name in TENSORS:
            assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name
