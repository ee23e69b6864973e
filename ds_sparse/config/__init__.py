"""Reads a DeepSpeed JSON, takes the `sparse_attention` block out, validates it, and hands back the rest.

DeepSpeed refuses the block since 0.19.7, so it never sees it. Keys, defaults and the meaning of a missing mode are
those of DeepSpeed's own documentation of the block.
"""

from .block import ANY_NUM_HEADS, parse_sparse_attention, sparse_attention_block
from .file import BLOCK_KEY, LoadedConfig, Source, SparseAttentionConfigError, load_config, parse_config
from .reading import DEFAULT_MODE, STRUCTURE_ERRORS
from .schema import json_schema

__all__ = [
    "ANY_NUM_HEADS",
    "BLOCK_KEY",
    "DEFAULT_MODE",
    "STRUCTURE_ERRORS",
    "LoadedConfig",
    "Source",
    "SparseAttentionConfigError",
    "json_schema",
    "load_config",
    "parse_config",
    "parse_sparse_attention",
    "sparse_attention_block",
]
