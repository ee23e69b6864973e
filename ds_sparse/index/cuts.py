"""Cuts: lists of tiles as even pieces of work, the long ones in several."""

from __future__ import annotations

from itertools import pairwise
from operator import itemgetter

STEP = 64
"""Tokens of the other side: a list is cut at multiples of them, so that the steps of kernels that take so many at once,
or fewer, are full but for the last."""

LEAST_CUT = 512
"""Tokens of a list below which it is not cut, and by which the longest unit of a head has to become shorter: less would
not pay for putting the parts' results together, which takes a kernel of its own."""


def cut_lists(lengths: list[list[int]], block: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The units and cuts of a side's tiles, whose lengths are given for each head. Where that makes the longest unit of
    a head shorter by more than LEAST_CUT tokens, a unit has at most one and a half times the mean of its head's, in
    whole steps, or LEAST_CUT tokens where that is more."""
    step = max(1, STEP // block)
    units: list[tuple[int, ...]] = []
    cuts: list[tuple[int, ...]] = []
    tile = first = part = 0
    for of_head in lengths:
        above_the_mean = _ceil_div(3 * sum(of_head), 2 * len(of_head) * step)
        longest = step * max(1, LEAST_CUT // (step * block), above_the_mean)
        parts_of_tiles = [max(1, _ceil_div(length, longest)) for length in of_head]
        shorter_by = max(of_head) - max(map(_ceil_div, of_head, parts_of_tiles))
        if shorter_by * block <= LEAST_CUT:
            parts_of_tiles = [1] * len(of_head)
        of_tiles = []
        for length, parts in zip(of_head, parts_of_tiles):
            if parts == 1:
                of_tiles.append((tile, first, length, -1))
            else:
                steps = _ceil_div(length, step)
                edges = [min(steps * i // parts * step, length) for i in range(parts + 1)]
                of_tiles += [(tile, first + a, b - a, part + i) for i, (a, b) in enumerate(pairwise(edges))]
                cuts.append((tile, part, parts))
                part += parts
            tile, first = tile + 1, first + length
        units += sorted(of_tiles, key=itemgetter(2), reverse=True)
    return units, cuts


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)
