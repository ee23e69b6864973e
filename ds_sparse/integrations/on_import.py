"""Registers `attn_implementation="ds_sparse"` with Transformers, and its encoders with `sparsify`, when both are
imported, in either order."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

_WATCHED = "transformers.modeling_utils"
"""The module of Transformers that holds its attention functions; all models import it."""


def register_with_transformers() -> None:
    """Registers the name at once where Transformers' models have been imported, else right after they are. Imports
    neither Transformers nor PyTorch itself."""
    if hasattr(sys.modules.get(_WATCHED), "PreTrainedModel"):
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    import_module(f"{__package__}.transformers_family")
    version = getattr(sys.modules.get("transformers"), "__version__", "0")
    if int(version.split(".")[0]) >= 5:  # for older ones the module below has a sentence, where it is asked for
        import_module(f"{__package__}.transformers")


class _Watch:
    """A finder of modules that finds nothing itself: it has the watched one's loader register the name afterwards."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            self._register_after(spec.loader)
        return spec

    def _register_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        loader.exec_module = exec_module
