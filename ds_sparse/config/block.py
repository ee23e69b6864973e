"""From a block to its structure, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from ..sparsity import SparsityConfig, sparsity_class, sparsity_modes
from ..sparsity._fields import json_fields
from ..wording import reason
from .file import BLOCK_KEY, Source, SparseAttentionConfigError, check_is_object, name_of
from .reading import STRUCTURE_ERRORS, Reading

ANY_NUM_HEADS = 12
"""For a check of a block where no model is known: no key depends on the number of heads."""


def parse_sparse_attention(
    block: Mapping[str, Any],
    num_heads: int,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    whole: bool = True,
    notices: list[str] | None = None,
) -> SparsityConfig:
    """Validates a block and makes its structure.

    Args:
        block: the `sparse_attention` object. A missing mode means "fixed".
        num_heads: attention heads of the model.
        source: what the block was loaded from; it names the file in every message.
        seq_len: tokens; when given, the layout must exist at this length.
        whole: the layout must also fit into memory, as training needs it; False where rows of it are enough.
        notices: receives a sentence for each thing that is accepted but deserves a line, for rank 0 to print.

    Returns:
        The structure.

    Raises:
        SparseAttentionConfigError: with every mistake of the block.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "bigbird", "block": 32, "num_random_blocks": 1, "seed": 0}
        >>> structure = ds_sparse.parse_sparse_attention(block, num_heads=4, seq_len=1024)
        >>> structure.make_layout(1024).shape
        torch.Size([4, 32, 32])
    """
    name = name_of(source)
    check_is_object(block, name)
    reading = Reading(f"{name}: {BLOCK_KEY}", whole)
    structure = reading.read(block, num_heads, seq_len)
    if structure is None or reading.mistakes:
        raise SparseAttentionConfigError(reading.mistakes) from reading.cause
    if notices is not None:
        notices += reading.notices
    return structure


def sparse_attention_block(structure: SparsityConfig) -> dict[str, Any]:
    """The block that `parse_sparse_attention` makes this structure from, every key spelled out.

    Raises:
        ValueError: a class without a mode (`register_sparsity` gives it one), or whose values are not those that it was
            made from.
    """
    cls = type(structure)
    what = f"{cls.__qualname__} cannot be written as a sparse_attention block"
    mode = _mode_of(cls)
    if mode is None:
        raise ValueError(f'{what}: it has no mode; decorate it with @ds_sparse.register_sparsity("its name").')
    keys = json_fields(cls)
    block = {"mode": mode} | {key: copy.deepcopy(getattr(structure, key, None)) for key in keys}
    try:
        again = parse_sparse_attention(json.loads(json.dumps(block)), structure.num_heads, source=cls.__qualname__)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {reason(error)}") from error
    changed = [key for key in keys if getattr(again, key, None) != block[key]]
    if changed:
        raise ValueError(
            f"{what}: made again from it, it has another {', '.join(changed)}. Keep each argument of its __init__ in "
            "an attribute of the same name."
        )
    return block


def _mode_of(cls: type[SparsityConfig]) -> str | None:
    for mode in sparsity_modes():
        try:
            if sparsity_class(mode) is cls:
                return mode
        except STRUCTURE_ERRORS:  # an entry point that does not load names some other class
            continue
    return None
