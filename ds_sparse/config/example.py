"""A block to begin with: every key of a mode, at values that show what it is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..sparsity import sparsity_class
from ..sparsity._fields import class_defaults
from ..sparsity.draws import Draws, draws
from .block import ANY_NUM_HEADS, parse_sparse_attention
from .file import Source


def example_block(
    mode: str,
    given: Mapping[str, Any] | None = None,
    *,
    num_heads: int = ANY_NUM_HEADS,
    seq_len: int | None = None,
    source: Source = "the options",
) -> dict[str, Any]:
    """A block of a mode with all its keys. Those that are not given have the defaults of the mode's class, which draws
    random blocks where JSON's defaults draw none; then the seed is 0, so that each run has the same.

    Args:
        mode: a known one.
        given: keys that are to have other values.
        seq_len: tokens; when given, the layout must exist at this length, though it need not fit into memory.

    Returns:
        The block, which `parse_sparse_attention` takes.

    Raises:
        SparseAttentionConfigError: with every mistake of what is given, or a key is missing that has no default.
    """
    block = {"mode": mode, **copy.deepcopy(class_defaults(sparsity_class(mode))), **(given or {})}
    structure = parse_sparse_attention(block, num_heads, source=source, seq_len=seq_len, whole=False)
    if block.get("seed") is None and draws(structure) is Draws.BY_SEED:
        block["seed"] = 0
    return block
