"""Plans which keys a rank's queries see on other ranks (their halo), and which rows all ranks compute together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import causal_cut, count_live
from .deal import TOLERANCE, HeadDeal, received_of_heads

PAYS_BELOW = 0.5
"""The share of what a rank receives of heads below which keys are exchanged in their place."""

WIDER_PAYS_BELOW = 0.7
"""The share of what is received with fewer wide rows below which more of them pay: to merge them takes some
operations."""


class HaloPlan(NamedTuple):
    """The exchange of ranks where each computes the block rows of its own tokens.

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
        """Block rows that a rank owns."""
        return range(self.bounds[rank], self.bounds[rank + 1])


def part_lengths(tokens: int, ranks: int, block: int = 1, whole_blocks: bool = False) -> tuple[int, ...]:
    """How many tokens of a sequence each rank has. Parts end at blocks where that makes none longer than the mean by
    more than `TOLERANCE`, or with `whole_blocks` where there are as many blocks as ranks; else they are even.

    >>> part_lengths(4096, 3, 16), part_lengths(165, 2, 16), part_lengths(165, 2, 16, whole_blocks=True)
    ((1376, 1360, 1360), (83, 82), (96, 69))
    """
    blocks = -(-tokens // block)
    is_even = -(-blocks // ranks) * block * ranks <= (1 + TOLERANCE) * tokens
    if not (is_even or whole_blocks) or blocks < ranks:
        block, blocks = 1, tokens
    each, more = divmod(blocks, ranks)
    ends = accumulate((each + (rank < more)) * block for rank in range(ranks))
    return tuple(b - a for a, b in pairwise([0, *(min(end, tokens) for end in ends)]))


def parts_of(lengths: Sequence[int]) -> list[range]:
    """The tokens of each rank."""
    return [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]


def within(places: Tensor, part: range) -> Tensor:
    """Places, of some, that are in a part."""
    return places[(places >= part.start) & (places < part.stop)]


def tokens_seen(part: range, window: int, tokens: int, causal: bool) -> range:
    """Tokens that a part sees by a window on each side, or before them, of so many."""
    return range(max(0, part.start - window), min(tokens, part.stop + (0 if causal else window)))


def received_of_window(lengths: Sequence[int], window: int, causal: bool, key_heads: int) -> int:
    """Numbers of a token and head that the rank that receives most does: keys and values around its part."""
    tokens = sum(lengths)
    return 2 * key_heads * max(len(tokens_seen(part, window, tokens, causal)) - len(part) for part in parts_of(lengths))


def keys_pay(received: float, tokens: int, ranks: int, heads: int, key_heads: int) -> bool:
    """True where ranks exchange keys in the place of heads, as so much is received of keys."""
    return heads < ranks or received <= PAYS_BELOW * received_of_heads(tokens, ranks, heads, key_heads)


def halo_that_pays(
    layout: Tensor,
    block: int,
    lengths: Sequence[int],
    heads: int,
    key_heads: int,
    deal: Callable[[], HeadDeal],
    *,
    causal: bool = False,
    may_be_wide: bool = True,
) -> HaloPlan | None:
    """`plan_halo`, where ranks exchange keys by it; None where they exchange heads.

    Args:
        deal: makes the deal of heads, which keys must not leave much less even.
    """
    ranks = len(lengths)
    plan = plan_halo(layout, block, lengths, heads, key_heads, causal=causal, may_be_wide=may_be_wide)
    if plan is None or not keys_pay(plan.received, sum(lengths), ranks, heads, key_heads):
        return None
    if heads >= ranks and max(plan.loads) > (1 + TOLERANCE) * max(deal().loads):
        return None
    return plan


def live_blocks(layout: Tensor, heads: int, causal: bool = False) -> list[int]:
    """Live blocks of each head of (1 or heads, R, R); with `causal` without those above the diagonal."""
    live = [int(count_live(causal_cut(head) if causal else head).sum()) for head in layout]
    return live * heads if len(live) == 1 else live


def plan_halo(
    layout: Tensor,
    block: int,
    lengths: Sequence[int],
    heads: int,
    key_heads: int,
    *,
    causal: bool = False,
    may_be_wide: bool = True,
) -> HaloPlan | None:
    """The plan by which ranks receive least. None where a border of ranks lies inside a block.

    Args:
        layout: bool (1 or heads, R, R), R blocks for all tokens.
        may_be_wide: whether rows may be wide. Ranks compute these after their own, where causality would not cut them
            on the diagonal, and each would count sinks.
    """
    ends = list(accumulate(lengths))
    if any(end % block for end in ends[:-1]):
        return None
    bounds = (0, *(-(-end // block) for end in ends))
    parts = [range(a, b) for a, b in pairwise(bounds)]
    live = causal_cut(layout) if causal else layout
    seen = [_of_others(live.any(0), own) for own in parts]
    # Rows by how many blocks of other ranks they see: 0, 1, 2 and 3, 4 to 7, ... Those above a class are wide.
    limits = 2 ** torch.arange(bounds[-1].bit_length() + 1) - 1
    classes = [torch.bucketize(count_live(x), limits) for x in seen]
    of_all = torch.cat(classes)
    largest, best = int(of_all.max()), None
    needed = [_needed(x, classes_of, largest) for x, classes_of in zip(seen, classes, strict=True)]
    for most in range(largest, -1, -1) if may_be_wide else [largest]:
        wide = (of_all > most).nonzero()[:, 0]
        fetched = tuple(of_rank[most].nonzero()[:, 0] for of_rank in needed)
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


def _needed(seen: Tensor, classes: Tensor, largest: int) -> list[Tensor]:
    """The columns that rows up to each class see, bool (R,)."""
    needed = [seen[classes == 0].any(0)]
    for each in range(1, largest + 1):
        needed.append(needed[-1] | seen[classes == each].any(0))
    return needed


def _of_others(seen: Tensor, own: range) -> Tensor:
    """Columns of other ranks that own rows see, bool (own, R)."""
    found = seen[own.start : own.stop].clone()
    found[:, own.start : own.stop] = False
    return found


def _load(live: Tensor, own: range, wide: Tensor) -> int:
    """Live blocks that a rank computes: of its own rows, and of wide rows in its own columns."""
    narrow = torch.ones(len(own), dtype=torch.bool)
    narrow[within(wide, own) - own.start] = False
    of_wide = live[:, wide, own.start : own.stop].count_nonzero()
    return int(count_live(live[:, own.start : own.stop][:, narrow]).sum() + of_wide)
