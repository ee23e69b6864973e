"""The layers of a model by what a `sparse_attention` block has them attend to, and the tiles that kernels walk."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..bench.machine import BACKWARD, FORWARD
from ..config import mode_of, read_block
from ..dispatch import HOPPER_TILE, TILE
from ..index.build import TilePlan, bits_of
from ..index.packing import MAX_LINES
from ..layout import causal_cut
from ..sequence.deal import deal_heads
from ..sequence.halo_plan import halo_that_pays, keys_pay, live_blocks, part_lengths, received_of_window
from ..sparsity import ChosenSparsityConfig, SparsityConfig
from ..sparsity.declarations import declared_value
from ..tools.block_sizes import rounded_up
from ..tools.random_numbers import random_numbers_kept
from ..tools.wording import counted, in_ranges, reason
from .model import Model
from .settings import Settings

WINDOW_BLOCK = 64
"""Tokens on the side of the blocks that a model's own windows are counted in."""

MOST_BLOCKS = 2**28
"""Blocks of a layout, all its heads together, that are laid out to be walked."""

DENSE = "dense"
"""Words for a layer without blocks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Side:
    """The tiles of a side, of one head, mean over heads.

    Attributes:
        computed: scores that are multiplied: each half of a tile leaves out the steps where it has nothing.
        loaded: scores of whole tiles: what they bring from L2 goes by these.
        entries: blocks in the lists of tiles.
    """

    computed: float
    loaded: float
    entries: float


class KeysSent(NamedTuple):
    """The exchange of ranks that each compute the queries of their own tokens.

    Attributes:
        share: of the scores of a layer, of the rank that computes most.
        received: numbers of a token and head that a rank receives of a sequence in forward.
    """

    share: float
    received: int


@dataclass(frozen=True)
class Walk:
    """A layout as attention computes it.

    Attributes:
        seq_len: tokens, whole blocks.
        live: scores of live blocks, mean over heads.
        forward: tiles of block rows.
        backward: tiles of block columns.
        keys: what ranks that share the sequence send each other; None where they exchange heads.
    """

    block: int
    seq_len: int
    live: float
    forward: Side
    backward: Side
    keys: KeysSent | None = None

    @classmethod
    def of(cls, layout: Tensor, block: int) -> Walk:
        """The tiles of an index of a layout, bool (H or 1, R, R), as on a Hopper GPU."""
        live = torch.count_nonzero(layout).item() / len(layout) * block**2
        # Blocks of a tile's height and more are lines of their own; of the smallest, a tile has as many as it may.
        heights = [height for height in (TILE, HOPPER_TILE) if block < HOPPER_TILE and height <= MAX_LINES * block]
        heights = heights or [HOPPER_TILE]
        counts, _ = TilePlan(bits_of(layout), layout.shape[2], block, heights).fetch()
        of_sets = [entries / counts.layout_heads for entries in counts.sizes[::3]]
        found = {}
        for way, entries in ((FORWARD, of_sets[: len(heights)]), (BACKWARD, of_sets[len(heights) :])):
            computed, loaded = (entries[i] * block * max(block, heights[i]) for i in (0, -1))
            found[way] = Side(computed, loaded, entries[-1])
        return cls(block, layout.shape[1] * block, live, found[FORWARD], found[BACKWARD])

    @property
    def density(self) -> float:
        return self.live / self.seq_len**2

    @property
    def computed(self) -> float:
        """Part of all scores that is multiplied, mean of forward and backward."""
        return (self.forward.computed + self.backward.computed) / (2 * self.seq_len**2)

    @property
    def loaded(self) -> float:
        """Part of all scores that is in whole tiles, mean of forward and backward."""
        return (self.forward.loaded + self.backward.loaded) / (2 * self.seq_len**2)

    @property
    def waste(self) -> float:
        """Part of the scores multiplied that no live block has."""
        return 1 - self.density / self.computed if self.live else 0.0


Walked = Walk | None
"""Tiles that a layer's attention walks; None is dense attention."""


@dataclass(frozen=True)
class Kind:
    """Layers that attend alike.

    Attributes:
        layers: their numbers, from 0.
        structure: None is dense, or the model's own window where `window` says how many tokens on either side.
    """

    layers: tuple[int, ...]
    structure: SparsityConfig | None
    window: int | None = None

    @property
    def block(self) -> int:
        return WINDOW_BLOCK if self.structure is None else self.structure.block

    def in_words(self) -> str:
        if self.window is not None:
            return f"own window of {self.window} tokens on either side"
        return DENSE if self.structure is None else f"{mode_of(type(self.structure))}, block {self.structure.block}"


def kinds_of(block: Mapping[str, Any] | None, model: Model, source: str) -> list[Kind]:
    """The kinds of layers that a block gives a model, in the order of their first layers; without a block all are
    dense.

    Raises:
        SparseAttentionConfigError: what is wrong with the block.
    """
    if block is None:
        return [Kind(tuple(range(model.layers)), None)]
    structures = read_block(block, model.heads, source=source, num_layers=model.layers).of_all(model.layers)
    alike: dict[tuple[int, int | None], list[int]] = {}
    for number, window in enumerate(model.windows or [None] * model.layers):
        alike.setdefault((id(structures[number]) if window is None else 0, window), []).append(number)
    return [
        Kind(tuple(layers), structures[layers[0]] if window is None else None, window)
        for (_, window), layers in alike.items()
    ]


def largest_block(kinds: Sequence[Kind]) -> int:
    """Tokens on the side of the largest blocks; 1 where all is dense."""
    return max((kind.block for kind in kinds if kind.structure is not None), default=1)


def in_whole_blocks(kinds: Sequence[Kind], seq_len: int) -> int:
    """Tokens of a sequence that is padded to whole blocks of all kinds."""
    return rounded_up(seq_len, largest_block(kinds))


def spread(kinds: Sequence[Kind], of_kinds: Sequence[T]) -> list[T]:
    """Something of each kind, spread to the numbers of its layers."""
    by_layer = {number: of_kind for kind, of_kind in zip(kinds, of_kinds) for number in kind.layers}
    return [by_layer[number] for number in sorted(by_layer)]


def live_scores(kind: Kind, model: Model, seq_len: int) -> float | None:
    """Scores in live blocks, mean over heads, counted a few block rows at a time; None for dense attention.

    Raises:
        ValueError: the structure has no layout of this length.
    """
    if kind.structure is None:
        walked = walk_of(kind, model, seq_len)
        return walked.live if walked else None
    structure = kind.structure
    if isinstance(structure, ChosenSparsityConfig):
        padded = rounded_up(seq_len, structure.block)
        return structure.computed_share(padded, causal=model.does.causal) * padded**2
    with _same_draws():
        rows = structure.make_rows(rounded_up(seq_len, structure.block))
        pieces = (piece for head in range(rows.heads) for piece in rows.pieces(head))
        causal = is_causal(kind, model)
        live = sum(int((part.tril(of_rows.start) if causal else part).count_nonzero()) for of_rows, part in pieces)
    return live / rows.heads * structure.block**2


def walks_of(kinds: Sequence[Kind], model: Model, settings: Settings, seq_len: int) -> list[Walked]:
    """`walk_of` of each kind, with the exchange of ranks that share a sequence."""
    lengths: tuple[int, ...] = ()
    if settings.ranks > 1 and not model.attention_dropout:  # with which ranks exchange heads
        block = math.lcm(*(kind.block for kind in kinds if kind.structure is not None))
        lengths = part_lengths(seq_len, settings.ranks, block, whole_blocks=settings.ranks > model.heads)
    return [walk_of(kind, model, seq_len, lengths) for kind in kinds]


def walk_of(kind: Kind, model: Model, seq_len: int, lengths: Sequence[int] = ()) -> Walked:
    """The tiles that kernels walk in layers of a kind; None for dense attention.

    Args:
        lengths: tokens of each rank, where ranks share the sequence and may exchange keys.
    """
    layout = layout_of(kind, model, seq_len)
    if layout is None:
        return None
    walk = Walk.of(layout, kind.block)
    if not lengths:
        return walk
    if kind.window is None:
        return replace(walk, keys=_keys_sent(layout, kind.block, model, lengths, is_causal(kind, model)))
    received = received_of_window(lengths, kind.window, model.does.causal, model.key_heads)
    pays = keys_pay(received, seq_len, len(lengths), model.heads, model.key_heads)
    return replace(walk, keys=KeysSent(max(lengths) / seq_len, received)) if pays else walk


def layout_of(kind: Kind, model: Model, seq_len: int) -> Tensor | None:
    """What queries see in layers of a kind, bool (H or 1, R, R); None for dense attention.

    Raises:
        ValueError: the structure has no layout of this length; a layout too large to be laid out here.
    """
    blocks, structure = -(-seq_len // kind.block), kind.structure
    if kind.window is not None:
        row = torch.arange(blocks)
        return ((row[:, None] - row).abs() <= -(-kind.window // WINDOW_BLOCK))[None]
    if structure is None:
        return None
    heads = structure.num_heads if structure.different_layout_per_head else 1
    if heads * blocks**2 > MOST_BLOCKS:
        raise ValueError(
            f"{counted(heads, 'layout')} of {blocks:,} x {blocks:,} blocks would be too large to lay out for a plan; "
            "give a larger block, one layout for all heads, or a shorter --seq."
        )
    tokens = blocks * structure.block
    try:
        with _same_draws():
            layout = structure.make_bool_layout(tokens)
    except ValueError as error:
        raise ValueError(
            f"{kind.in_words()}: no layout of {tokens:,} tokens ({reason(error)}); give a longer --seq, or change the "
            "structure."
        ) from None
    return causal_cut(layout) if is_causal(kind, model) else layout


def is_causal(kind: Kind, model: Model) -> bool:
    """True where queries see no later keys."""
    return bool(declared_value(kind.structure, "causal") or model.does.causal)


def _keys_sent(layout: Tensor, block: int, model: Model, lengths: Sequence[int], causal: bool) -> KeysSent | None:
    heads, key_heads = model.heads, model.key_heads
    deal = partial(deal_heads, live_blocks(layout, heads), key_heads, len(lengths))
    halo = halo_that_pays(layout, block, lengths, heads, key_heads, deal, may_be_wide=not causal)
    return None if halo is None else KeysSent(max(halo.loads) / max(1, sum(halo.loads)), halo.received)


@contextmanager
def _same_draws() -> Iterator[None]:
    """Structures without a seed draw the same blocks each time; random numbers outside stay as they are."""
    with random_numbers_kept():
        random.seed(0)
        yield


def layers_in_words(numbers: tuple[int, ...]) -> str:
    """The numbers as keys of `layers` have them: 0-5,7."""
    return in_ranges(numbers, 2, ",")
