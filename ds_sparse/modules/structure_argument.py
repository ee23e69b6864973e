"""The argument `sparsity_config` of layers and models: what it may be, and the structures that it says."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError, read_block
from ..sparsity import FixedSparsityConfig, SparsityConfig
from ..tools.notices import say_notices
from ..tools.wording import kind
from .bert import check_num_heads
from .structured_attention import is_structure


def read_structures(
    wanted: SparsityConfig | Mapping[str, Any] | LayerStructures | None, num_heads: int
) -> LayerStructures:
    """The structures that were asked for, copies; `FixedSparsityConfig` where none was.

    Args:
        wanted: a structure, a dict with the keys of the JSON block, or what has been read of one.

    Raises:
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        ValueError: they are for another number of heads.
        TypeError: neither a structure nor a dict.
    """
    if wanted is None:
        return LayerStructures(FixedSparsityConfig(num_heads=num_heads))
    if isinstance(wanted, LayerStructures):
        return wanted.for_heads(num_heads)
    if isinstance(wanted, Mapping):
        if isinstance(wanted.get(BLOCK_KEY), Mapping):
            raise SparseAttentionConfigError(
                [f'The dict is a whole DeepSpeed JSON; give its block alone, as in config["{BLOCK_KEY}"].']
            )
        notices: list[str] = []
        structures = read_block(wanted, num_heads, source=wanted, notices=notices)
        say_notices(notices)
        return structures
    if not is_structure(wanted):
        raise TypeError(
            f"sparsity_config is {kind(wanted)}; it has to be a sparsity config, such as FixedSparsityConfig(num_heads="
            f"{num_heads}), or a dict with the keys of the {BLOCK_KEY} block."
        )
    check_num_heads(wanted, num_heads)
    return LayerStructures(copy.copy(wanted))


def for_all_layers(structures: LayerStructures) -> SparsityConfig:
    """The structure of all layers. Raises ValueError where layers have structures of their own."""
    if structures.entries:
        raise ValueError(
            f"the {BLOCK_KEY} block has {LAYERS_KEY}, and one structure is wanted here; leave {LAYERS_KEY} out."
        )
    return structures.others
