"""Classes that a JSON `mode` selects: the built-in structures, those registered here, and entry points."""

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

    Args:
        mode: what the JSON block calls it.

    Returns:
        The decorator, which returns the class.

    Raises:
        TypeError: in the decorator, not a subclass of SparsityConfig, or one that lays nothing out.
        ValueError: in the decorator, another class has the mode already.

    Examples:
        >>> import ds_sparse
        >>> @ds_sparse.register_sparsity("stripes")
        ... class StripesSparsityConfig(ds_sparse.SparsityConfig):
        ...     def __init__(self, num_heads: int, block: int = 16, every: int = 4):
        ...         super().__init__(num_heads, block)
        ...         self.every = every
        ...
        ...     def make_layout(self, seq_len):
        ...         layout = self.setup_layout(seq_len)
        ...         layout[:, :, :: self.every] = 1
        ...         return layout
        >>> structure = ds_sparse.parse_sparse_attention({"mode": "stripes", "every": 2}, num_heads=1)
        >>> structure.make_layout(64)[0, 0]
        tensor([1, 0, 1, 0])
    """

    def register(cls: _Structure) -> _Structure:
        if not (isinstance(cls, type) and issubclass(cls, SparsityConfig)):
            raise TypeError(f"Mode {mode!r} needs a subclass of SparsityConfig, got {cls!r}.")
        if not cls._steps and cls.make_layout is SparsityConfig.make_layout and cls.lay_out is SparsityConfig.lay_out:
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
    """All modes by name: built-in, registered, and those of entry points, which are not loaded for this.

    Returns:
        The names, without repetition.

    Examples:
        >>> from ds_sparse.sparsity import sparsity_modes
        >>> "fixed" in sparsity_modes()
        True
    """
    return [*_classes, *(name for name in _entry_points() if name not in _classes)]


def sparsity_class(mode: str) -> type[SparsityConfig]:
    """The class behind a mode; an entry point is loaded at its first use.

    Args:
        mode: what the JSON block calls it.

    Returns:
        A subclass of `SparsityConfig`.

    Raises:
        KeyError: no such mode.
        TypeError: the entry point is not a subclass of SparsityConfig, or lays nothing out.
        ImportError, AttributeError: the entry point does not load.

    Examples:
        >>> from ds_sparse.sparsity import sparsity_class
        >>> sparsity_class("fixed").__name__
        'FixedSparsityConfig'
    """
    if mode not in _classes:
        register_sparsity(mode)(_entry_points()[mode].load())
    return _classes[mode]


def loaded_classes() -> dict[str, type[SparsityConfig]]:
    """Mode to class for all modes that need no import: built-in, registered, and entry points already in use."""
    return dict(_classes)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
