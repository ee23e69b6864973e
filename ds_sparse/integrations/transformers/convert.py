"""convert: a checkpoint of Longformer, BigBird or LED becomes one of RoBERTa, BERT or BART, with block-sparse
attention."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ...models.report import SparsifyReport
from ...models.sparsify import sparsify
from ...sparsity import SparsityConfig
from .big_bird import BigBirdConverter
from .checkpoint import folder_of, load, new_folder
from .led import LEDConverter
from .longformer import LongformerConverter

_CONVERTERS = {"longformer": LongformerConverter(), "big_bird": BigBirdConverter(), "led": LEDConverter()}
"""By the model_type of a config."""


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    sparsity_config: SparsityConfig | Mapping[str, Any] | None = None,
) -> SparsifyReport:
    """Writes a checkpoint of RoBERTa, BERT or BART, made of one of Longformer, BigBird or LED, as the command does.

    Weights, head and tokenizer are the same; the structure is by default the one nearest to the model's own, at its
    longest sequence. A Longformer's window is rounded up to whole blocks, and the projections of its global tokens are
    left out; so it is in LED's encoder, while its decoder stays dense. A BigBird gets the random blocks that it trains
    with, layer by layer, or a dense layout where its attention_type is "original_full". Load the result with
    `attn_implementation="ds_sparse"`.

    Args:
        model: the folder of a checkpoint of Transformers, or its name in the hub's cache; nothing is downloaded.
        out: the new checkpoint's folder, which is new or empty.
        sparsity_config: another structure, or a dict with the keys of the JSON block.

    Returns:
        What became sparse; `str()` is a table.

    Raises:
        ValueError: no such model, one of another family, with a head that the new family does not have, a BigBird with
            blocks of a size that structures do not have and no `sparsity_config`, one without a tokenizer, an `out`
            that holds something. Then nothing has been written.
        SparseAttentionConfigError: the dict is wrong (a ValueError).
        TypeError: neither a structure nor a dict.

    Examples:
        >>> import ds_sparse
        >>> report = ds_sparse.convert("allenai/longformer-base-4096", "roberta-4096")  # doctest: +SKIP
    """
    with new_folder(out) as folder:
        checkpoint = load(folder_of(model))
        converter = _CONVERTERS.get(checkpoint.model.config.model_type)
        if converter is None:
            raise ValueError(
                f"{type(checkpoint.model).__name__} is neither a Longformer nor a BigBird nor an LED; sparsify and "
                "ds_sparse adapt take other encoders as they are."
            )
        structure = converter.structure(checkpoint.model) if sparsity_config is None else sparsity_config
        converted = converter.convert(checkpoint.model)
        report = sparsify(converted, structure, max_seq_length=converter.longest(checkpoint.model))
        dataclasses.replace(checkpoint, model=converted).save(folder)
    return report
