"""Chooses the implementation of an operation that runs: `implementations` says what each takes, `choice` chooses."""

from .choice import (
    choose,
    dtypes_on,
    force_implementation,
    forced_implementation,
    largest_head_dim,
    reasons,
    tile_heights,
    walkers,
)
from .implementations import HOPPER_TILE, IMPLEMENTATIONS, TILE, Call, Implementation
from .strides import is_aligned, is_readable, readable

__all__ = [
    "HOPPER_TILE",
    "IMPLEMENTATIONS",
    "TILE",
    "Call",
    "Implementation",
    "choose",
    "dtypes_on",
    "force_implementation",
    "forced_implementation",
    "is_aligned",
    "is_readable",
    "largest_head_dim",
    "readable",
    "reasons",
    "tile_heights",
    "walkers",
]
