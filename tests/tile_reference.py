"""The tiles of a layout in plain Python, line by line as csrc/index.h says: which lines share a tile, in which order
entries follow each other, where lists are cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

STEP, LEAST_CUT, TURN, TALL_TILE, MORE_PARTS = 64, 512, 256, 128, 256
KINDS = {"rows": ((True, True), (True, False), (False, True)), "columns": ((True, False), (True, True), (False, True))}
"""In tall tiles, by whether lines of the first and of the second half have a block."""


@dataclass
class TileSet:
    """The tiles of one height from one side, as `Tiles` has them; where lists lie that have no space, entries are None
    and units begin at -1."""

    lines: list[int]
    entries: list[int | None]
    units: list[list[int]]
    cuts: list[list[int]]


def tile_sets(
    live: torch.Tensor,
    block: int,
    heights: list[int],
    sides: list[str],
    bounded: bool,
    space: int | None = None,
    row_block: int | None = None,
) -> list[TileSet]:
    """The sets of a layout, bool (L, R, C), in the order of index_fill; `space` is that for the entries of each set."""
    block_of = {"rows": row_block or block, "columns": block}
    other_of = {"rows": block, "columns": row_block or block}
    sets = [(side, tile, max(1, tile // block_of[side])) for side in sides for tile in heights]
    tiles, lines = [], []
    for side, _, height in sets:
        highest = max(height for of, _, height in sets if of == side)
        lists = [[line.nonzero().flatten().tolist() for line in head] for head in (live if side == "rows" else live.mT)]
        keeps = side == "rows" and row_block is not None
        lines.append([order_of(head, height, highest, keeps) for head in lists])
        tiles.append([in_tiles(head, order, height) for head, order in zip(lists, lines[-1])])
    found = []
    for (side, tile, height), of_heads, order in zip(sets, tiles, lines):
        in_turns = tile == TALL_TILE and height > (1 if side == "rows" or row_block else 2)
        of_mean = all_of(tiles if block_of[side] == other_of[side] else [of_heads])
        stretches = stretches_of(other_of[side] * sum(map(len, of_mean)) // len(of_mean))
        others = live.shape[2 if side == "rows" else 1]
        span = -(-others // (stretches if in_turns else 1))
        entries = [
            in_order(one, height, side, span) if in_turns else sorted_entries(one) for head in of_heads for one in head
        ]
        lengths = [[len(one) for one in head] for head in of_heads]
        of_chosen = side == "columns" and other_of[side] < block
        units, cuts = cut_heads(lengths, other_of[side], bounded, of_chosen)
        ends = list(accumulate(map(len, entries)))
        fits = [space is None or end <= space for end in ends]
        units = [[t, first, count, part] if fits[t] else [t, -1, 0, part] for t, first, count, part in units]
        of_all = [entry if fit else None for of_tile, fit in zip(entries, fits) for entry in of_tile]
        found.append(TileSet([line for head in order for line in head], of_all, units, cuts))
    return found


def stretches_of(mean: int) -> int:
    """Into how many stretches lists are ordered that have so many tokens in the mean."""
    stretches = 1
    while 2 * stretches <= mean // (2 * TURN):
        stretches *= 2
    return stretches


def all_of(tiles: list[list[list[dict[int, int]]]]) -> list[dict[int, int]]:
    return [tile for of_set in tiles for head in of_set for tile in head]


def order_of(lists: list[list[int]], height: int, highest: int, keeps: bool) -> list[int]:
    """The lines of a head tile by tile: long lists first, then as they are, those alike behind the first of them; or,
    where they keep their order, as they are."""
    number = len(lists)
    if keeps:
        return list(range(number)) + [-1] * (-number % height)
    if height == 1:
        return list(range(number))
    median = sorted(map(len, lists))[(number - 1) // 2]
    order = sorted(range(number), key=lambda i: lists.index(lists[i]) + number * (len(lists[i]) <= 2 * median))
    return (order + [-1] * highest)[: -(-number // height) * height]


def in_tiles(lists: list[list[int]], order: list[int], height: int) -> list[dict[int, int]]:
    """For each tile the blocks that its lines are live at, with their owner bits."""
    tiles: list[dict[int, int]] = []
    for begin in range(0, len(order), height):
        owners: dict[int, int] = {}
        for k, line in enumerate(order[begin : begin + height]):
            for other in lists[line] if line >= 0 else []:
                owners[other] = owners.get(other, 0) | 1 << k
        tiles.append(owners)
    return tiles


def sorted_entries(tile: dict[int, int]) -> list[int]:
    return [block | owners << 24 for block, owners in sorted(tile.items())]


def in_order(tile: dict[int, int], height: int, side: str, span: int) -> list[int]:
    """Stretch by stretch, kind by kind, ascending."""
    half = (1 << height // 2) - 1

    def place(entry: int) -> tuple[int, int, int]:
        block, owners = entry & 0xFFFFFF, entry >> 24
        return block // span, KINDS[side].index((owners & half > 0, owners & ~half > 0)), block

    return sorted(sorted_entries(tile), key=place)


def cut_heads(
    lengths: list[list[int]], block: int, bounded: bool, of_chosen: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Units and cuts of the tiles of all heads."""
    units, cuts, tile, first, part = [], [], 0, 0, 0
    step = max(1, STEP // block)
    for head in lengths:
        of_head: list[list[int]] = []
        bounds = most_of(len(head), len(lengths), of_chosen) if bounded else None
        for length, parts in zip(head, parts_of_lists(head, block, step, 3 if of_chosen else 6, bounds)):
            steps = -(-length // step)
            edges = [min(steps * i // parts * step, length) for i in range(parts + 1)]
            for i in range(parts):
                unit = [tile, first + edges[i], edges[i + 1] - edges[i], part + i if parts > 1 else -1]
                of_head.append(unit)
            if parts > 1:
                cuts.append([tile, part, parts])
                part += parts
            tile, first = tile + 1, first + length
        units += sorted(of_head, key=lambda unit: -unit[2])
    return units, cuts


def most_of(tiles: int, heads: int, of_chosen: bool) -> tuple[int, int]:
    """Work tiles and cuts of a head that there is space for, if bounded."""
    more = MORE_PARTS // heads if of_chosen else 0
    parts = min(-(-4 * tiles // (3 if of_chosen else 6)) + 1, tiles // 4 + 1 + more)
    return tiles + parts, min(tiles, tiles // 8 + 1 + more)


def parts_of_lists(
    lengths: list[int], block: int, step: int, quarters: int, bounds: tuple[int, int] | None
) -> list[int]:
    """Into how many parts each list of a head is cut: at most so many quarters of the mean are in one, or LEAST_CUT
    tokens; a quarter more, and so on, where there are more work tiles or cuts than bounds. Where little is won, none is
    cut."""
    number = len(lengths)
    longest = step * max(-(-quarters * sum(lengths) // (4 * number * step)), LEAST_CUT // (step * block), 1)
    while True:
        parts = [max(1, -(-length // longest)) for length in lengths]
        shorter_by = max(lengths) - max(-(-length // count) for length, count in zip(lengths, parts))
        if shorter_by * block <= LEAST_CUT:
            return [1] * number
        cut = sum(count > 1 for count in parts)
        if bounds is None or (sum(parts) <= bounds[0] and cut <= bounds[1]):
            return parts
        longest = step * -(-5 * longest // (4 * step))
