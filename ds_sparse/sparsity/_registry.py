"""Which class a JSON `mode` selects: the built-in structures, those registered here, and entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from ._base import SparsityConfig

ENTRY_POINT_GROUP = "ds_sparse.sparsity"

_Structure = TypeVar("_Structure", bound=type[SparsityConfig])

_classes: dict[str, type[SparsityConfig]] = {}


def register_sparsity(mode: str) -> Callable[[_Structure], _Structure]:
    """Class decorator: makes a subclass of `SparsityConfig` selectable as `"mode": mode` in the JSON block.

    An installed package does the same without being imported first, through an entry point of the group
    `ds_sparse.sparsity` whose name is the mode and whose value is the class.

    Raises:
        TypeError: not a subclass of SparsityConfig, or one that lays nothing out.
        ValueError: another class has the mode already.
    """

    def register(cls: _Structure) -> _Structure:
        if not (isinstance(cls, type) and issubclass(cls, SparsityConfig)):
            raise TypeError(f"Mode {mode!r} needs a subclass of SparsityConfig, got {cls!r}.")
        if cls.make_layout is SparsityConfig.make_layout and cls.lay_out is SparsityConfig.lay_out:
            raise TypeError(
                f"{cls.__qualname__} lays nothing out: write its make_layout(seq_len), or lay_out(h, layout)."
            )
        known = _classes.get(mode)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"Mode {mode!r} is already {known.__module__}.{known.__qualname__}; choose another name.")
        _classes[mode] = cls
        return cls

    return register


def sparsity_modes() -> list[str]:
    """All modes by name: built-in, registered, and those of entry points, which are not loaded for this."""
    return [*_classes, *(name for name in _entry_points() if name not in _classes)]


def sparsity_class(mode: str) -> type[SparsityConfig]:
    """The class behind a mode; an entry point is loaded at its first use.

    Raises:
        KeyError: no such mode.
        TypeError: the entry point is not a subclass of SparsityConfig.
        ImportError, AttributeError: the entry point does not load.
    """
    if mode not in _classes:
        register_sparsity(mode)(_entry_points()[mode].load())
    return _classes[mode]


def loaded_classes() -> dict[str, type[SparsityConfig]]:
    """Mode to class for all modes that need no import: built-in, registered, and entry points already in use."""
    return dict(_classes)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
