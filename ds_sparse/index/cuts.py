"""Cuts: lists of tiles as even pieces of work, the long ones in several."""

from __future__ import annotations

import numpy as np

STEP = 64
"""Tokens of the other side: a list is cut at multiples of them, so that the steps of kernels that take so many at once,
or fewer, are full but for the last."""

LEAST_CUT = 512
"""Tokens of a list below which it is not cut, and by which the longest unit of a head has to become shorter: less would
not pay for putting the parts' results together, which takes a kernel of its own."""


def cut_lists(lengths: list[list[int]], block: int) -> tuple[np.ndarray, np.ndarray]:
    """The units and cuts of a side's tiles, int32 as `Tiles` has them, whose lengths are given for each head.

    Where that makes the longest unit of a head shorter by more than LEAST_CUT tokens, a unit has at most one and a half
    times the mean of its head's, in whole steps, or LEAST_CUT tokens where that is more.
    """
    # By NumPy: operations of torch take ten times as long on so few numbers, and an index is made for each batch of
    # packed documents.
    of_heads = np.array(lengths, dtype=np.int64)
    step = max(1, STEP // block)
    above_the_mean = _ceil_div(3 * of_heads.sum(1), 2 * of_heads.shape[1] * step)
    longest = step * np.maximum(max(1, LEAST_CUT // (step * block)), above_the_mean)
    parts_of_tiles = np.maximum(1, _ceil_div(of_heads, longest[:, None]))
    shorter_by = of_heads.max(1) - _ceil_div(of_heads, parts_of_tiles).max(1)
    parts_of_tiles[shorter_by * block <= LEAST_CUT] = 1

    length, parts = of_heads.ravel(), parts_of_tiles.ravel()
    is_cut = parts > 1
    first, first_part, first_unit = (_before_each(x) for x in (length, np.where(is_cut, parts, 0), parts))
    tile = np.arange(len(length)).repeat(parts)
    number = np.arange(len(tile)) - first_unit[tile]  # of a unit among its tile's
    steps = _ceil_div(length, step)[tile]
    begin, end = (np.minimum(steps * i // parts[tile] * step, length[tile]) for i in (number, number + 1))
    part = np.where(is_cut[tile], first_part[tile] + number, -1)
    units = np.stack([tile, first[tile] + begin, end - begin, part], 1, dtype=np.int32, casting="same_kind")
    longest_first = np.lexsort((begin - end, tile // of_heads.shape[1]))
    cuts = np.stack([is_cut.nonzero()[0], first_part[is_cut], parts[is_cut]], 1, dtype=np.int32, casting="same_kind")
    return units[longest_first], cuts


def _before_each(counts: np.ndarray) -> np.ndarray:
    """The sum of those before each."""
    return counts.cumsum() - counts


def _ceil_div(x: np.ndarray, y: np.ndarray | int) -> np.ndarray:
    return -(-x // y)
