"""What tokens can find under a layout: keys near them in one layer, and the rest through blocks in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .layers import Kind, is_causal, layout_of
from .model import Model

SEEN = 0.9
"""Least share of the blocks at a distance that rows see."""


class Reach(NamedTuple):
    """Attributes:
    near: tokens before a query that it sees all of; 0: those of its own block.
    between: blocks that both see and are seen on the way of two layers from a far block to another, the mean.
    """

    near: int
    between: float


@dataclass(frozen=True)
class Recall:
    """What tokens find, by the layers that see most.

    Attributes:
        everywhere: numbers of the layers in which heads together see every key.
        near, between: as of `Reach`, the most in any other layer.
    """

    everywhere: tuple[int, ...]
    near: int
    between: float


def recall_of(kinds: Sequence[Kind], model: Model, seq_len: int) -> Recall:
    """What tokens find in a model whose layers are of these kinds."""
    found = [_reach(kind, model, seq_len) for kind in kinds]
    everywhere = sorted(number for kind, reach in zip(kinds, found) if reach is None for number in kind.layers)
    bounded = [reach for reach in found if reach is not None]
    near = max((reach.near for reach in bounded), default=0)
    return Recall(tuple(everywhere), near, max((reach.between for reach in bounded), default=0.0))


def _reach(kind: Kind, model: Model, seq_len: int) -> Reach | None:
    """What tokens find in one layer; None: everything."""
    layout = layout_of(kind, model, seq_len)
    if layout is None:
        return None
    unseen = ~layout.any(0)
    if is_causal(kind, model):
        unseen = unseen.tril()
    return reach_of(layout, kind.block) if unseen.any() else None


def reach_of(layout: Tensor, block: int) -> Reach:
    """What the heads of a layout, bool (H, R, R), see together."""
    seen = layout.any(0)
    blocks = len(seen)
    near = 0
    while near + 1 < blocks and seen.diagonal(-near - 1).float().mean() >= SEEN:
        near += 1
    # Leading and last blocks may be global themselves.
    rows, columns = seen[blocks * 3 // 4 : blocks * 7 // 8 + 1], seen[:, blocks // 8 : blocks // 4 + 1]
    return Reach(near * block, (rows.double().mean(0) @ columns.double().mean(1)).item())
