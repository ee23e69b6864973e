"""What a layer of a Transformers model has of ours: the structure that its config says, with its layouts."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...config import BLOCK_KEY, parse_sparse_attention
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...sparsity import SparsityConfig
from ...sparsity.draws import Draws, draws, why_unrepeatable
from ..pretrained import NAME

MAX_SEQ_LENGTH_KEY = f"{BLOCK_KEY}_max_seq_length"
CONFIG_KEYS = (BLOCK_KEY, MAX_SEQ_LENGTH_KEY)
"""What we write to a config."""


@dataclass
class Attached:
    """What the attention function keeps on a layer."""

    block: dict[str, Any] | None  # what the config said when `attention` was made; None: a structure that has no block
    tokens: int
    attention: StructuredAttention | LocalAttention
    name: str = ""

    def __post_init__(self):
        self.block = copy.deepcopy(self.block)  # the config's own may be edited in place


_made: weakref.WeakValueDictionary[tuple, StructuredAttention] = weakref.WeakValueDictionary()
"""What layers that say the same share."""


def attached_to(layer: nn.Module) -> Attached:
    """What is on a layer, made from its config when it is first used or the config has changed since."""
    config: Any = layer.config
    attached: Attached | None = vars(layer).get("_ds_sparse")
    block = getattr(config, BLOCK_KEY, None)
    if attached is not None and attached.block == block and (block is None or attached.tokens == tokens_of(config)):
        return attached
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"config.{BLOCK_KEY} has changed since the model was made sparse, and torch.compile cannot trace what "
            "makes a layout of it; call the model once before."
        )
    structured = _attention_for(config, block)
    attached = Attached(block, tokens_of(config), local_attention_of(layer) or structured)
    vars(layer)["_ds_sparse"] = attached
    return attached


def _attention_for(config: PreTrainedConfig, block: dict[str, Any] | None) -> StructuredAttention:
    if block is None:
        raise ValueError(
            f"{type(config).__name__} has no {BLOCK_KEY}; set it before the model takes the name {NAME}, as in "
            f'config.{BLOCK_KEY} = {{"mode": "fixed", "block": 16}}, or call ds_sparse.sparsify, which does.'
        )
    structure = parse_sparse_attention(block, config.num_attention_heads, source=type(config).__name__)
    tokens = whole_blocks(tokens_of(config), structure.block)
    key = (type(structure), json.dumps(block, sort_keys=True), structure.num_heads, tokens)
    attention = _made.get(key)
    if attention is None:
        attention = StructuredAttention(structure, tokens)
        check_is_repeated(attention)
        _made[key] = attention
    return attention


def local_attention_of(layer: nn.Module) -> LocalAttention | None:
    """The window of a local layer, from its `sliding_window`, or from the config's where all layers of a decoder have
    one: as Transformers gives it to FlashAttention, one more than the tokens that are seen on a side. None for a layer
    that sees all."""
    sliding_window, config = getattr(layer, "sliding_window", None), getattr(layer, "config", None)
    if getattr(layer, "is_causal", False) and not hasattr(layer, "sliding_window"):
        sliding_window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    return LocalAttention(sliding_window - 1) if isinstance(sliding_window, int) else None


def check_is_repeated(attention: StructuredAttention) -> None:
    """Raises ValueError where ranks would draw other blocks, and so would the model when it is loaded."""
    structure = attention.sparsity_config
    how = draws(structure, attention.max_seq_length)
    if how is Draws.UNREPEATABLY:
        raise ValueError(why_unrepeatable(structure))
    if how is Draws.BY_SEED and structure.seed is None:
        raise ValueError(
            f"{type(structure).__name__} has random blocks and no seed, so they would differ between ranks and after "
            f'loading; add one to config.{BLOCK_KEY}, such as "seed": 0.'
        )


def tokens_of(config: PreTrainedConfig) -> int:
    """Tokens that the layout of a model is built for, not yet in whole blocks."""
    return getattr(config, MAX_SEQ_LENGTH_KEY, None) or positions_of(config)


def positions_of(config: PreTrainedConfig) -> int:
    tokens = getattr(config, "max_position_embeddings", None)
    if tokens is None:
        raise ValueError(
            f"{type(config).__name__} has no max_position_embeddings, so the length that the layout is to be built for "
            f"is not known; pass max_seq_length to ds_sparse.sparsify, or set config.{MAX_SEQ_LENGTH_KEY}."
        )
    return tokens


def structure_of(layer: nn.Module) -> SparsityConfig | None:
    """The structure of a layer whose config has `attn_implementation="ds_sparse"`; None for a local layer."""
    return getattr(attached_to(layer).attention, "sparsity_config", None)


def set_config(config: PreTrainedConfig, entries: dict[str, Any]) -> None:
    for key in CONFIG_KEYS:
        if key in entries:
            setattr(config, key, entries[key])
        elif key in vars(config):
            delattr(config, key)


def which(module: nn.Module) -> str:
    attached = vars(module).get("_ds_sparse")
    return named({attached.name: module}) if attached is not None and attached.name else type(module).__name__


def named(layers: Mapping[str, nn.Module]) -> str:
    layer, module = next(iter(layers.items()))
    return f"layer {layer} ({type(module).__name__})"
