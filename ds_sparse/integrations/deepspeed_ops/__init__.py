"""`deepspeed.ops.sparse_attention` as it was in DeepSpeed 0.3 to 0.19.6, on ds_sparse.

Importing this module makes the package importable with its submodules, `DeepSpeedConfig(...).sparse_attention`, the
functions and constants around it in `deepspeed.runtime`, and `deepspeed.ops.op_builder.SparseAttnBuilder`, so that
programs written for them run unchanged. A DeepSpeed that still has them keeps its own; `register(replace=True)` puts
ours in their place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

from ...extras import optional_imports

with optional_imports():
    import deepspeed

from .builder import SparseAttnBuilder, register_builder
from .config import get_sparse_attention, get_sparse_attention_mode, get_sparse_attention_type, register_config

__all__ = [
    "SparseAttnBuilder",
    "get_sparse_attention",
    "get_sparse_attention_mode",
    "get_sparse_attention_type",
    "register",
]

PACKAGE = "deepspeed.ops.sparse_attention"
OVERLAY = str(Path(__file__).parent / "overlay")


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
        register_config()


def _register_package() -> None:
    # Found there by Python's own import, it is a module like any other: it has a file, a source, and can be reloaded.
    deepspeed.ops.__path__.insert(0, OVERLAY)
    for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    deepspeed.ops.sparse_attention = importlib.import_module(PACKAGE)


register()
