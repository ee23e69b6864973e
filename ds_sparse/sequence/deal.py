"""Deals heads to ranks, so that ranks have nearly as many live blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE = 0.03
"""By how much of the most the live blocks of ranks may differ before one key head is copied to several of them, and
how much more of them a rank may have where ranks exchange keys."""


class HeadDeal(NamedTuple):
    """The heads of each rank.

    Attributes:
        queries: query heads, by rank, ascending where they need not be grouped otherwise.
        keys: key heads, by rank: the i-th query head of a rank reads the key head i // (its query heads / these).
        loads: live blocks, by rank.
    """

    queries: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...]
    loads: tuple[int, ...]

    @property
    def spread(self) -> float:
        """By how much of the most live blocks ranks differ."""
        most = max(self.loads)
        return (most - min(self.loads)) / most if most else 0.0


def check_ranks(heads: int, ranks: int) -> None:
    """Raises ValueError where there are fewer heads than ranks."""
    if ranks > heads:
        raise ValueError(
            f"Attention has {heads} heads, and {ranks} ranks are to share them; each rank needs one, so at most "
            f"{heads} ranks can hold a sequence: set sequence_parallel_size to {heads} or less, and use the other "
            "ranks for data parallelism. More ranks can hold one where each computes its own tokens: in layers with a "
            "structure or a window, where every rank has whole blocks, without attention dropout and without packed "
            "documents."
        )


def received_of_heads(tokens: int, ranks: int, heads: int, key_heads: int) -> float:
    """Numbers of a token and head that a rank receives in forward: query, key, value and output of its share."""
    return tokens * (ranks - 1) / ranks**2 * 2 * (heads + max(key_heads, ranks))


def deal_heads(live_blocks: Sequence[int], key_heads: int, ranks: int, whole: bool = False) -> HeadDeal:
    """Deals heads to ranks.

    Heads that cost the same are dealt in order. Where they differ, first each rank gets as many heads as the others;
    where ranks then differ by more than `TOLERANCE`, their numbers of heads differ, too. Query heads that share a key
    head stay together as long as that is no worse; otherwise several ranks get a copy of the key head. Several
    exchanges of heads are tried and the best deal is taken; to find the best of all takes exponential time.

    Args:
        live_blocks: of each query head.
        key_heads: their number divides that of query heads.
        ranks: at most as many as query heads.
        whole: query heads that share a key head stay together in any case, as they choose blocks together.

    Raises:
        ValueError: there are more ranks than query heads, or, where these stay together, than key heads.

    Examples:
        >>> from ds_sparse.sequence.deal import deal_heads
        >>> deal_heads([4, 4, 1, 1], key_heads=4, ranks=2).queries
        ((0, 2), (1, 3))
    """
    check_ranks(len(live_blocks), ranks)
    group, best = len(live_blocks) // key_heads, None
    if whole:
        if ranks > key_heads:
            raise ValueError(
                f"Heads that share a key head choose their blocks together, and {ranks} ranks are to share {key_heads} "
                f"key head{'s' * (key_heads > 1)}; set sequence_parallel_size to {key_heads} or less, or "
                "chosen_by_group to false."
            )
        return _deal(live_blocks, group, group, ranks)
    for together in range(group, 0, -1):
        if group % together or len(live_blocks) // together < ranks:
            continue
        deal = _deal(live_blocks, group, together, ranks)
        if best is None or deal.spread < best.spread:
            best = deal
        if best.spread <= TOLERANCE:
            break
    assert best is not None  # with one query head a key head there are enough
    return best


def _deal(live_blocks: Sequence[int], group: int, together: int, ranks: int) -> HeadDeal:
    """The deal of units of so many query heads, which share a key head."""
    units = [range(first, first + together) for first in range(0, len(live_blocks), together)]
    costs = [sum(live_blocks[head] for head in unit) for unit in units]
    parts = _parts(costs, ranks)
    return HeadDeal(
        queries=tuple(tuple(head for unit in part for head in units[unit]) for part in parts),
        keys=tuple(tuple(units[unit][0] // group for unit in part) for part in parts),
        loads=tuple(sum(costs[unit] for unit in part) for part in parts),
    )


def _parts(costs: Sequence[int], ranks: int) -> list[list[int]]:
    even, rest = divmod(len(costs), ranks)
    if not rest:
        in_order = [list(range(even * rank, even * (rank + 1))) for rank in range(ranks)]
        if _spread(costs, in_order) <= TOLERANCE:
            return in_order
        dealt = _improved(costs, _greedy(costs, ranks, even), moves=False)
        if _spread(costs, dealt) <= TOLERANCE:
            return dealt
    return _improved(costs, _greedy(costs, ranks, len(costs)), moves=True)


def _spread(costs: Sequence[int], parts: list[list[int]]) -> float:
    loads = [sum(costs[unit] for unit in part) for part in parts]
    return (max(loads) - min(loads)) / max(*loads, 1)


def _greedy(costs: Sequence[int], ranks: int, room: int) -> list[list[int]]:
    """The dearest unit first, each to the rank that has least and room for one more."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(range(len(costs)), key=lambda unit: -costs[unit]):
        rank = min((r for r in range(ranks) if len(parts[r]) < room), key=lambda r: (loads[r], len(parts[r])))
        parts[rank].append(unit)
        loads[rank] += costs[unit]
    return parts


def _improved(costs: Sequence[int], parts: list[list[int]], moves: bool) -> list[list[int]]:
    """Two ranks swap units, or with `moves` one gives another a unit, as long as that brings their loads nearer."""
    better = True
    while better:
        better = any(
            _bring_nearer(costs, first, second, moves) for first in parts for second in parts if first is not second
        )
    return [sorted(part) for part in parts]


def _bring_nearer(costs: Sequence[int], first: list[int], second: list[int], moves: bool) -> bool:
    """Swaps or moves the one unit by which the load of `first`, the larger, comes nearest to that of `second`."""
    ahead = sum(costs[unit] for unit in first) - sum(costs[unit] for unit in second)
    swaps = [(costs[a] - costs[b], a, b) for a in first for b in second]
    swaps += [(costs[a], a, -1) for a in first if moves and len(first) > 1]
    left = [(abs(ahead - 2 * step), a, b) for step, a, b in swaps if 0 < step < ahead]
    if not left:
        return False
    _, a, b = min(left)
    first.remove(a)
    second.append(a)
    if b >= 0:
        second.remove(b)
        first.append(b)
    return True
