"""`deepspeed.ops.sparse_attention` as it was in DeepSpeed 0.3 to 0.19.6, on ds_sparse.

Importing this module makes the package importable with its submodules, `DeepSpeedConfig(...).sparse_attention`, the
functions and constants around it in `deepspeed.runtime`, and `deepspeed.ops.op_builder.SparseAttnBuilder`, so that
programs written for them run unchanged. A DeepSpeed that still has them keeps its own; `register(replace=True)` puts
ours in their place.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...config import ANY_NUM_HEADS, BLOCK_KEY, DEFAULT_MODE, load_config, parse_sparse_attention
from ...tools.extras import optional_imports

with optional_imports():
    import deepspeed

from .builder import SparseAttnBuilder, register_builder

__all__ = [
    "SparseAttnBuilder",
    "get_sparse_attention",
    "get_sparse_attention_mode",
    "get_sparse_attention_type",
    "register",
]

PACKAGE = "deepspeed.ops.sparse_attention"
OVERLAY = str(Path(__file__).parent / "overlay")

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


def __dir__() -> list[str]:
    return __all__


def register(*, replace: bool = False) -> None:
    """Makes `deepspeed.ops.sparse_attention` importable, on ds_sparse. Importing this module calls it.

    DeepSpeed's configuration then takes and shows the block, and its list of operations shows `sparse_attn`.

    Args:
        replace: also where this DeepSpeed has the package itself (0.19.6 and earlier), which is left alone otherwise.

    Examples:
        >>> import ds_sparse
        >>> from ds_sparse.integrations import deepspeed_ops
        >>> deepspeed_ops.register(replace=True)
        >>> from deepspeed.ops.sparse_attention import FixedSparsityConfig
        >>> FixedSparsityConfig is ds_sparse.FixedSparsityConfig
        True
    """
    present = importlib.util.find_spec(PACKAGE)
    # Without an origin it is a folder that an older DeepSpeed has left.
    if present is None or present.origin is None or (replace and not present.origin.startswith(OVERLAY)):
        _register_package()
        register_builder()
    present = getattr(deepspeed.runtime.config, "get_sparse_attention", None)
    if present is None or (replace and present is not get_sparse_attention):
        _register_config()


def _register_package() -> None:
    # Found there by Python's own import, it is a module like any other: it has a file, a source, and can be reloaded.
    deepspeed.ops.__path__.insert(0, OVERLAY)
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    deepspeed.ops.sparse_attention = importlib.import_module(PACKAGE)


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


def _constants() -> dict[str, Any]:
    """`SPARSE_...` of `deepspeed.runtime.constants`: names of modes and keys, and the keys' defaults."""
    named = {"SPARSE_ATTENTION": BLOCK_KEY, "SPARSE_MODE": "mode", "SPARSE_MODE_DEFAULT": DEFAULT_MODE}
    for mode, keys in _ALWAYS.items():
        named[f"SPARSE_{mode.upper()}_MODE"] = mode
        plain = parse_sparse_attention({"mode": mode}, ANY_NUM_HEADS)
        for key in keys:
            name = "SPARSE_ATTENTION_TYPE" if key == "attention" else f"SPARSE_{key.upper()}"
            named |= {name: key, f"{name}_DEFAULT": getattr(plain, key)}
    return named


def _register_config() -> None:
    """Puts the functions and constants into `deepspeed.runtime`, and the block into `DeepSpeedConfig`."""
    config = deepspeed.runtime.config
    for name, value in _constants().items():
        setattr(config, name, value)
        setattr(deepspeed.runtime.constants, name, value)
    for function in (get_sparse_attention, get_sparse_attention_mode, get_sparse_attention_type):
        setattr(config, function.__name__, function)
    for mode in _ALWAYS:
        setattr(config, f"get_sparse_{mode}_config", _config_of(mode))
    below = config.DeepSpeedConfig.__init__

    @functools.wraps(below)
    def __init__(self: Any, config: Any, *positional: Any, **keywords: Any) -> None:
        deepspeed_config, block = load_config(config)
        complete = None if block is None else _complete(block, source=config)
        below(self, config if block is None else deepspeed_config, *positional, **keywords)
        self.sparse_attention = complete

    # In the class, so that DeepSpeedConfig is ours wherever it has been imported to; zero.Init builds one too.
    config.DeepSpeedConfig.__init__ = __init__


register()
