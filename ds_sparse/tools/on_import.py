"""Acts when a package of others is imported: registers `attn_implementation="ds_sparse"` with Transformers, and its
models with `sparsify`, when both are imported, in either order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any


def register_with_transformers() -> None:
    """Registers the name at once where Transformers' models have been imported, else right after they are. Imports
    neither Transformers nor PyTorch itself."""
    # The module holds its attention functions; all models import it.
    after_import("transformers.modeling_utils", "PreTrainedModel", _register)


def after_import(module: str, name: str, action: Callable[[], None]) -> None:
    """Runs the action at once where a module that has the name has been imported, else right after it is."""
    if hasattr(sys.modules.get(module), name):
        action()
        return
    watch = next((each for each in sys.meta_path if isinstance(each, _Watch) and each.watched == module), None)
    if watch is None:
        watch = _Watch(module)
        sys.meta_path.insert(0, watch)
    watch.actions.setdefault(action)


def _register() -> None:
    import_module("..integrations.transformers_family", __package__)
    version = getattr(sys.modules.get("transformers"), "__version__", "0")
    if int(version.split(".")[0]) >= 5:  # for older ones the module below has a sentence, where it is asked for
        import_module("..integrations.transformers", __package__)


class _Watch:
    """A finder of modules that finds nothing itself: it has the watched one's loader run actions afterwards.

    Attributes:
        actions: in their order, each once.
    """

    def __init__(self, watched: str):
        self.watched = watched
        self.actions: dict[Callable[[], None], None] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.watched:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            for action in self.actions:
                action()

        loader.exec_module = exec_module
