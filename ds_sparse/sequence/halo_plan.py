"""Which keys a rank's queries see on other ranks (their halo), and which rows all ranks compute together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import causal_cut, count_live

GRAINS = (128, 64, 32, 16, 8)
"""Multiples at which ranks' parts end, the largest that moves no border far: sides of blocks."""

FINEST = 16
"""Of how many grains a rank's part is at least made."""


WIDER_PAYS_BELOW = 0.7
"""What share of the rest is received with more wide rows, if these pay: to put them together takes some operations."""


class HaloPlan(NamedTuple):
    """What ranks exchange where each computes the block rows of its own tokens.

    A row that sees keys of many other ranks, as a global token's, is wide: each rank computes it over its own keys, and
    the rank that has the row puts the parts together.

    Attributes:
        bounds: the first block of each rank, and the number of blocks.
        fetched: by rank, the block columns of other ranks that its rows see, ascending.
        wide: the wide block rows, ascending.
        loads: live blocks of all heads, by rank.
        received: numbers of a token and head that a rank receives in forward, of the one that receives most.
    """

    bounds: tuple[int, ...]
    fetched: tuple[Tensor, ...]
    wide: Tensor
    loads: tuple[int, ...]
    received: int

    def blocks(self, rank: int) -> range:
        """Those of a rank."""
        return range(self.bounds[rank], self.bounds[rank + 1])


def part_lengths(tokens: int, ranks: int) -> tuple[int, ...]:
    """How many tokens of a sequence each rank has: as even as they can be at multiples of a block's side.

    >>> part_lengths(4096, 3), part_lengths(165, 2)
    ((1408, 1408, 1280), (83, 82))
    """
    grain = next((x for x in GRAINS if tokens >= x * FINEST * ranks), 1)
    each, more = divmod(-(-tokens // grain), ranks)
    ends = accumulate((each + (rank < more)) * grain for rank in range(ranks))
    return tuple(b - a for a, b in pairwise([0, *(min(end, tokens) for end in ends)]))


def parts_of(lengths: Sequence[int]) -> list[range]:
    """The tokens of each rank."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def within(places: Tensor, part: range) -> Tensor:
    """Those of some places that are in a part."""
    return places[(places >= part.start) & (places < part.stop)]


def tokens_seen(part: range, window: int, tokens: int, causal: bool) -> range:
    """What tokens of a part see by a window on each side, or before them, of so many."""
    return range(max(0, part.start - window), min(tokens, part.stop + (0 if causal else window)))


def received_of_window(lengths: Sequence[int], window: int, causal: bool, key_heads: int) -> int:
    """Numbers of a token and head that the rank that receives most does: keys and values around its part."""
    tokens = sum(lengths)
    return 2 * key_heads * max(len(tokens_seen(part, window, tokens, causal)) - len(part) for part in parts_of(lengths))


def plan_halo(
    layout: Tensor, block: int, lengths: Sequence[int], causal: bool, heads: int, key_heads: int
) -> HaloPlan | None:
    """The plan by which ranks receive least. None where a border of ranks lies inside a block.

    Args:
        layout: bool (1 or heads, R, R), R blocks for all tokens.
        lengths: tokens of each rank.
        causal: whether tokens see none behind them; no row is wide then, and blocks above the diagonal are dead.
    """
    ends = list(accumulate(lengths))
    if any(end % block for end in ends[:-1]):
        return None
    bounds = (0, *(-(-end // block) for end in ends))
    parts = [range(a, b) for a, b in pairwise(bounds)]
    live = causal_cut(layout) if causal else layout
    seen = [_of_others(live.any(0), own) for own in parts]
    # Rows by how many blocks of other ranks they see, in powers of two. Those above one of them are wide.
    sizes = [torch.log2(count_live(x) + 1.0).ceil().int() for x in seen]
    largest, best = int(torch.cat(sizes).max()), None
    for most in [largest] if causal else range(largest, -1, -1):
        wide = (torch.cat(sizes) > most).nonzero()[:, 0]
        fetched = tuple(
            (x & (size <= most)[:, None]).any(0).nonzero()[:, 0] for x, size in zip(seen, sizes, strict=True)
        )
        own_wide = [len(within(wide, own)) for own in parts]
        received = max(
            # Keys and values; queries of wide rows, and their outputs, which come in fp32.
            2 * len(columns) * key_heads + (len(wide) - own + 2 * own * (len(parts) - 1)) * heads
            for columns, own in zip(fetched, own_wide, strict=True)
        )
        if best is None or received < WIDER_PAYS_BELOW * best[0]:
            best = received, wide, fetched
    assert best is not None
    received, wide, fetched = best
    loads = tuple(_load(live, own, wide) * heads // len(layout) for own in parts)
    return HaloPlan(bounds, fetched, wide, loads, received * block)


def _of_others(seen: Tensor, own: range) -> Tensor:
    """What own rows see of other ranks, bool (own, R)."""
    found = seen[own.start : own.stop].clone()
    found[:, own.start : own.stop] = False
    return found


def _load(live: Tensor, own: range, wide: Tensor) -> int:
    """Live blocks that a rank computes: of its own rows, and of wide rows in its own columns."""
    narrow = torch.ones(len(own), dtype=torch.bool)
    narrow[within(wide, own) - own.start] = False
    of_wide = live[:, wide, own.start : own.stop].count_nonzero()
    return int(count_live(live[:, own.start : own.stop][:, narrow]).sum() + of_wide)
