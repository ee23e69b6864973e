"""Reads a DeepSpeed JSON, takes the `sparse_attention` block out, validates it, and hands back the rest.

DeepSpeed refuses the block since 0.19.7, so it never sees it. Keys, defaults and the meaning of a missing mode are
those of DeepSpeed's own documentation of the block.
"""

from .block import (
    ANY_NUM_HEADS,
    LayerStructures,
    example_block,
    mode_of,
    parse_sparse_attention,
    parse_sparse_attention_layers,
    read_block,
    sparse_attention_block,
)
from .file import BLOCK_KEY, LAYERS_KEY, LoadedConfig, Source, SparseAttentionConfigError, load_config, parse_config
from .reading import DEFAULT_MODE, STRUCTURE_ERRORS, describe
from .schema import json_schema, summary

__all__ = [
    "ANY_NUM_HEADS",
    "BLOCK_KEY",
    "DEFAULT_MODE",
    "LAYERS_KEY",
    "STRUCTURE_ERRORS",
    "LayerStructures",
    "LoadedConfig",
    "Source",
    "SparseAttentionConfigError",
    "describe",
    "example_block",
    "json_schema",
    "load_config",
    "mode_of",
    "parse_config",
    "parse_sparse_attention",
    "parse_sparse_attention_layers",
    "read_block",
    "sparse_attention_block",
    "summary",
]
