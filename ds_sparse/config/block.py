"""From a block to its structures, and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from numbers import Integral
from typing import Any

from ..sparsity import SparsityConfig, sparsity_class, sparsity_modes
from ..sparsity._fields import json_fields, value_of
from ..wording import reason
from .file import BLOCK_KEY, LAYERS_KEY, Source, SparseAttentionConfigError, check_is_object, name_of
from .layers import LayerStructures, has_layers, read_layers
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
        seq_len: tokens; when given, the layout must exist at this length, the last block of which may be short.
        whole: the layout must also fit into memory, as training needs it; False where rows of it are enough.
        notices: receives a sentence for each thing that is accepted but deserves a line, for rank 0 to print.

    Returns:
        The structure.

    Raises:
        SparseAttentionConfigError: with every mistake of the block; it has `layers`, which have structures of their
            own.
        ValueError: num_heads is no integer of 1 or more.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "bigbird", "block": 32, "num_random_blocks": 1, "seed": 0}
        >>> structure = ds_sparse.parse_sparse_attention(block, num_heads=4, seq_len=1024)
        >>> structure.make_layout(1024).shape
        torch.Size([4, 32, 32])
    """
    said: list[str] = []
    structures = read_block(block, num_heads, source=source, seq_len=seq_len, whole=whole, notices=said)
    if structures.entries:
        raise SparseAttentionConfigError(
            [
                f"{name_of(source)}: {BLOCK_KEY}.{LAYERS_KEY}: layers have structures of their own, and here all are "
                "to have one; use ds_sparse.parse_sparse_attention_layers or ds_sparse.get_sparse_attention_layers."
            ]
        )
    if notices is not None:
        notices += said
    return structures.others


def parse_sparse_attention_layers(
    block: Mapping[str, Any],
    num_heads: int,
    num_layers: int,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    notices: list[str] | None = None,
) -> list[SparsityConfig | None]:
    """Validates a block and makes the structure of each layer, also where the block has no `layers`.

    Args:
        block, num_heads, source, seq_len, notices: as in `parse_sparse_attention`.
        num_layers: attention layers of the model.

    Returns:
        A structure a layer, the same object where they are of one entry; None for a layer that stays dense.

    Raises:
        SparseAttentionConfigError: with every mistake of the block; an entry names a layer that there is not.
        ValueError: num_heads is no integer of 1 or more.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "fixed", "block": 32, "layers": {"0-1": {"num_local_blocks": 8}, "3": None}}
        >>> first, *_, last = ds_sparse.parse_sparse_attention_layers(block, num_heads=4, num_layers=4)
        >>> first.block, first.num_local_blocks, last
        (32, 8, None)
    """
    return read_block(block, num_heads, source=source, seq_len=seq_len, notices=notices, num_layers=num_layers).of_all(
        num_layers
    )


def read_block(
    block: Mapping[str, Any],
    num_heads: int,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    whole: bool = True,
    notices: list[str] | None = None,
    num_layers: int | None = None,
) -> LayerStructures:
    """Validates a block and makes its structures, where the number of layers may not be known.

    Raises:
        SparseAttentionConfigError, ValueError: as `parse_sparse_attention_layers`.
    """
    if not isinstance(num_heads, Integral) or num_heads < 1:
        raise ValueError(
            f"num_heads is {num_heads!r}; it has to be the number of attention heads of the model, an integer of 1 or "
            "more."
        )
    name = name_of(source)
    check_is_object(block, name)
    reading = Reading(f"{name}: {BLOCK_KEY}", whole)
    by_layer = has_layers(block)
    alone = {key: value for key, value in block.items() if key != LAYERS_KEY or not by_layer}
    structure = reading.read(alone, num_heads, seq_len)
    entries = read_layers(reading, block, num_heads, seq_len, num_layers) if by_layer else {}
    if structure is None or reading.mistakes:
        raise SparseAttentionConfigError(reading.mistakes) from reading.cause
    if notices is not None:
        notices += reading.notices
    return LayerStructures(structure, entries)


def layer_structures_block(structures: LayerStructures) -> dict[str, Any]:
    """The block that `read_block` makes these structures from, every key spelled out.

    Raises:
        ValueError: as `sparse_attention_block`.
    """
    block = sparse_attention_block(structures.others)
    if not structures.entries:
        return block
    return block | {LAYERS_KEY: {key: _difference(block, of_key) for key, of_key in structures.entries.items()}}


def _difference(block: dict[str, Any], structure: SparsityConfig | None) -> dict[str, Any] | None:
    if structure is None:
        return None
    own = sparse_attention_block(structure)
    return {key: value for key, value in own.items() if key not in block or block[key] != value}


def sparse_attention_block(structure: SparsityConfig) -> dict[str, Any]:
    """The block that `parse_sparse_attention` makes this structure from, every key spelled out.

    Raises:
        ValueError: a class without a mode (`register_sparsity` gives it one), or whose values are not those that it was
            made from.
    """
    cls = type(structure)
    what = f"{cls.__qualname__} cannot be written as a sparse_attention block"
    mode = mode_of(cls)
    if mode is None:
        raise ValueError(f'{what}: it has no mode; decorate it with @ds_sparse.register_sparsity("its name").')
    keys = json_fields(cls)
    block = {"mode": mode} | {key: copy.deepcopy(value_of(structure, key)) for key in keys}
    try:
        again = parse_sparse_attention(json.loads(json.dumps(block)), structure.num_heads, source=cls.__qualname__)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {reason(error)}") from error
    changed = [key for key in keys if value_of(again, key) != block[key]]
    if changed:
        raise ValueError(
            f"{what}: made again from it, it has another {', '.join(changed)}. Keep each argument of its __init__ in "
            "an attribute of the same name."
        )
    return block


def mode_of(cls: type[SparsityConfig]) -> str | None:
    """The mode by which a block names a class; None where it has none."""
    for mode in sparsity_modes():
        try:
            if sparsity_class(mode) is cls:
                return mode
        except STRUCTURE_ERRORS:  # an entry point that does not load names some other class
            continue
    return None
