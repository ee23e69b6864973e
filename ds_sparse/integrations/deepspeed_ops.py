"""`deepspeed.ops.sparse_attention` as it was in DeepSpeed 0.3 to 0.19.6, on ds_sparse.

Importing this module registers the package with its six submodules, `DeepSpeedConfig(...).sparse_attention`, and the
functions around it in `deepspeed.runtime.config`, so that programs written for them run unchanged. A DeepSpeed that
still has them keeps its own; `register(replace=True)` puts ours in their place.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import deepspeed

from ..bert import BertSparseSelfAttention
from ..config import ANY_NUM_HEADS, BLOCK_KEY, DEFAULT_MODE, load_config, parse_sparse_attention
from ..ops import MatMul, Softmax
from ..patch import SparseAttentionUtils
from ..self_attention import SparseSelfAttention
from ..sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

PACKAGE = "deepspeed.ops.sparse_attention"

_COMMON = ("block", "different_layout_per_head")
_GLOBAL_INDICES = ("global_block_indices", "global_block_end_indices")
_ALWAYS = {
    "dense": ("block",),
    "fixed": (
        *_COMMON, "num_local_blocks", "num_global_blocks", "attention", "horizontal_global_attention",
        "num_different_global_patterns",
    ),
    "variable": (
        *_COMMON, "num_random_blocks", "local_window_blocks", *_GLOBAL_INDICES, "attention",
        "horizontal_global_attention",
    ),
    "bigbird": (*_COMMON, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
    "bslongformer": (*_COMMON, "num_sliding_window_blocks", *_GLOBAL_INDICES),
}  # fmt: skip
"""Mode to the keys that DeepSpeed 0.19.6 returned, given or at their defaults."""
_WHERE_GIVEN = ("attention", "seed", "causal", "strict_causal")
"""Keys that it dropped, or did not know, and that change the structure."""


_SUBMODULES: dict[str, tuple[type, ...]] = {
    "matmul": (MatMul,),
    "softmax": (Softmax,),
    "sparsity_config": (
        SparsityConfig, DenseSparsityConfig, FixedSparsityConfig, VariableSparsityConfig, BigBirdSparsityConfig,
        BSLongformerSparsityConfig, LocalSlidingWindowSparsityConfig,
    ),
    "sparse_self_attention": (SparseSelfAttention, SparsityConfig),
    "bert_sparse_self_attention": (BertSparseSelfAttention, FixedSparsityConfig),
    "sparse_attention_utils": (SparseAttentionUtils, BertSparseSelfAttention, SparsityConfig),
}  # fmt: skip
"""Submodule to the names that could be imported from it."""


def register(*, replace: bool = False) -> None:
    """Makes `deepspeed.ops.sparse_attention` importable, and DeepSpeed's configuration take and show the block.

    Args:
        replace: also where this DeepSpeed has the package itself (0.19.6 and earlier), which is left alone otherwise.
    """
    if replace or importlib.util.find_spec(PACKAGE) is None:
        _register_package()
    present = getattr(deepspeed.runtime.config, "get_sparse_attention", None)
    if present is None or (replace and present is not get_sparse_attention):
        _register_config_functions()


def get_sparse_attention(param_dict: Mapping[str, Any]) -> dict[str, Any] | None:
    """The block of a configuration as `DeepSpeedConfig(...).sparse_attention` holds it: None without one, else its mode
    and the keys of that mode, given or at their defaults, which are the arguments of the mode's class.

    Equal to DeepSpeed 0.19.6 for all that it read. Beyond that there are the `attention` of "bigbird" and
    "bslongformer", which it dropped, and our own keys, where they are not at their defaults; and other modes.

    Raises:
        SparseAttentionConfigError: every mistake of the block.
    """
    return _complete(param_dict[BLOCK_KEY]) if BLOCK_KEY in param_dict else None


def get_sparse_attention_mode(sparsity: Mapping[str, Any]) -> str:
    """The mode of a block, without a check."""
    return sparsity.get("mode", DEFAULT_MODE)


def get_sparse_attention_type(sparsity: Mapping[str, Any]) -> str:
    """The `attention` of a block, without a check."""
    return sparsity.get("attention", "bidirectional")


def _complete(block: Any, source: Any = "the config dict") -> dict[str, Any]:
    structure = parse_sparse_attention(block, ANY_NUM_HEADS, source=source)
    mode = get_sparse_attention_mode(block)
    if mode in _ALWAYS:
        plain = parse_sparse_attention({"mode": mode}, ANY_NUM_HEADS)
        given = [key for key in _WHERE_GIVEN if getattr(structure, key, None) != getattr(plain, key, None)]
        keys = [*_ALWAYS[mode], *(key for key in given if key not in _ALWAYS[mode])]
    else:
        keys = [key for key in block if key != "mode" and hasattr(structure, key)]
    # Callers take the mode out and change lists.
    return {"mode": mode} | {key: copy.copy(getattr(structure, key)) for key in keys}


def _config_of(mode: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda sparsity: _complete({**sparsity, "mode": mode})


def _register_package() -> None:
    package = _module(PACKAGE, __doc__, is_package=True)
    for name, classes in _SUBMODULES.items():
        submodule = _module(f"{PACKAGE}.{name}", f"{classes[0].__name__} of ds_sparse, where DeepSpeed had it.")
        setattr(package, name, submodule)
        for cls in classes:
            setattr(submodule, cls.__name__, cls)
            setattr(package, cls.__name__, cls)
    deepspeed.ops.sparse_attention = package


def _module(name: str, doc: str | None, is_package: bool = False) -> ModuleType:
    module = importlib.util.module_from_spec(ModuleSpec(name, loader=None, origin=__file__, is_package=is_package))
    module.__doc__ = doc
    sys.modules[name] = module
    return module


def _register_config_functions() -> None:
    config = deepspeed.runtime.config
    for function in (get_sparse_attention, get_sparse_attention_mode, get_sparse_attention_type):
        setattr(config, function.__name__, function)
    for mode in _ALWAYS:
        setattr(config, f"get_sparse_{mode}_config", _config_of(mode))
    below = config.DeepSpeedConfig.__init__

    @functools.wraps(below)
    def __init__(self, config, *positional: Any, **keywords: Any) -> None:
        deepspeed_config, block = load_config(config)
        complete = None if block is None else _complete(block, source=config)
        below(self, config if block is None else deepspeed_config, *positional, **keywords)
        self.sparse_attention = complete

    # In the class, so that DeepSpeedConfig is ours wherever it has been imported to; zero.Init builds one too.
    config.DeepSpeedConfig.__init__ = __init__


register()
