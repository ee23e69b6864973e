"""The structure that was asked for, for the number of heads that layers have."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..common_seed import set_common_seed
from ..config import parse_sparse_attention
from ..modules.bert import check_num_heads
from ..modules.multihead_attention import check_repeatable
from ..notices import say_notices
from ..sparsity import FixedSparsityConfig, SparsityConfig


class Structures:
    """The structure that was asked for, by number of heads, so that all layers of a kind have the same."""

    def __init__(self, wanted: SparsityConfig | Mapping[str, Any] | None):
        self.wanted = wanted
        self._made: dict[tuple[int, int, int | None], SparsityConfig] = {}

    def make(self, num_heads: int, saved: Mapping[str, Any] | None = None) -> SparsityConfig:
        """The structure for so many heads; where none was asked for, that of the block that was saved with the model,
        and where it has no seed, with the seed of that block."""
        wanted = saved if self.wanted is None else self.wanted
        seed = saved.get("seed") if isinstance(saved, Mapping) else None
        key = (id(wanted), num_heads, seed)
        if key not in self._made:
            self._made[key] = make_structure(wanted, num_heads, seed)
        return self._made[key]

    def make_repeatable(self, num_heads: int) -> SparsityConfig:
        """`make` for a model that saves neither structure nor layout: random blocks need a seed from who asked.

        Raises:
            ValueError: they have none, too.
        """
        if self.wanted is not None:
            check_repeatable(_read(self.wanted, num_heads))
        return self.make(num_heads)


def make_structure(
    wanted: SparsityConfig | Mapping[str, Any] | None, num_heads: int, seed: int | None = None
) -> SparsityConfig:
    """The structure that was asked for, a copy, with `seed` or one that rank 0 draws where it has none.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        ValueError: it is for another number of heads.
        TypeError: neither a structure nor a dict.
        RuntimeError: several ranks would draw a seed before torch.distributed runs.
    """
    if wanted is None:
        return FixedSparsityConfig(num_heads=num_heads)
    structure = _read(wanted, num_heads)
    set_common_seed(structure, seed)
    return structure


def _read(wanted: SparsityConfig | Mapping[str, Any], num_heads: int) -> SparsityConfig:
    if isinstance(wanted, Mapping):
        notices: list[str] = []
        structure = parse_sparse_attention(wanted, num_heads, source=wanted, notices=notices)
        say_notices(notices)
    elif hasattr(wanted, "make_layout") and not isinstance(wanted, type):
        structure = copy.copy(wanted)
    else:
        raise TypeError(
            f"sparsity_config is {type(wanted).__name__}; it has to be a sparsity config, such as FixedSparsityConfig, "
            "or a dict with the keys of the sparse_attention block."
        )
    check_num_heads(structure, num_heads)
    return structure
