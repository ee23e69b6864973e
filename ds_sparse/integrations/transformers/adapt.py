"""adapt: a published dense checkpoint becomes one for longer sequences, with block-sparse attention."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ...models.position_table import base_model, kind_without_table, position_table, why_no_table
from ...models.report import SparsifyReport
from ...models.sparse_attention_utils import SparseAttentionUtils
from ...models.sparsify import sparsify
from ...ranks import say
from ...sparsity import SparsityConfig
from .checkpoint import folder_of, load, new_folder


def adapt(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_position: int,
    sparsity_config: SparsityConfig | Mapping[str, Any],
) -> SparsifyReport:
    """Writes a checkpoint for longer sequences, made of a dense one: what `ds_sparse adapt` does.

    The table of positions is extended by repetition, as `SparseAttentionUtils.extend_position_embedding` does; a model
    with rotary or relative positions has none, and its weights stay as they are. The structure is written to
    `config.sparse_attention`, the length to the tokenizer and, where there are such, to the files of
    sentence-transformers. Load the result with `attn_implementation="ds_sparse"`, to use it or to train on. With a
    dense layout, sequences that the original takes give what they gave.

    Args:
        model: the folder of a checkpoint of Transformers, or its name in the hub's cache; nothing is downloaded.
        out: the new checkpoint's folder, which is new or empty.
        max_position: tokens that there shall be room for.
        sparsity_config: the structure, or a dict with the keys of the JSON block.

    Returns:
        What became sparse; `str()` is a table.

    Raises:
        ValueError: no such model, one without a tokenizer or that cannot be sparse, fewer tokens than there are, an
            `out` that holds something. Then nothing has been written.
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        TypeError: neither a structure nor a dict.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "bslongformer", "block": 64}
        >>> report = ds_sparse.adapt(
        ...     "all-MiniLM-L6-v2", "minilm-4096", max_position=4096, sparsity_config=block
        ... )  # doctest: +SKIP
    """
    with new_folder(out) as folder:
        checkpoint = load(folder_of(model))
        report = sparsify(checkpoint.model, sparsity_config, max_seq_length=max_position)
        make_room(checkpoint.model, max_position)
        SparseAttentionUtils.update_tokenizer_model_max_length(checkpoint.tokenizer, max_position)
        checkpoint.save(folder, max_position)
    return report


def make_room(model: PreTrainedModel, max_position: int) -> None:
    """Extends the positions of a model, in whatever way it has them, and says how.

    Raises:
        ValueError: fewer tokens than there are; a model whose positions are not known.
    """
    if position_table(base_model(model)) is not None:
        SparseAttentionUtils.extend_position_embedding(model, max_position)
        return
    known = kind_without_table(model)
    if known is None:
        raise ValueError(why_no_table(model, max_position))
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_position < positions:
        raise ValueError(f"max_position is {max_position}, and there are {positions} positions; ask for more.")
    if positions is not None and not _scales_by_length(config):
        config.max_position_embeddings = max_position
    trained = "" if positions is None else f"; it was made for {positions} tokens"
    say(f"{type(model).__name__} has {known[0]} positions and no table, so its weights stay as they are{trained}.")


def _scales_by_length(config: Any) -> bool:
    """Whether rotary angles depend on `max_position_embeddings`, as all but the plain ones may."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = given.values() if all(isinstance(entry, dict) for entry in given.values()) else [given]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
