"""What a structure says of itself beside its layout: `seed`, `causal` and `strict_causal`, where it declares them.

They count where our constructor got them. A class with an `__init__` of its own, or one that derives from nothing, may
use the same names for something else.
"""

from __future__ import annotations

import warnings
from typing import Any

DEFAULTS: dict[str, Any] = {"seed": None, "causal": False, "strict_causal": False}

DECLARED = "_declared"
"""Attribute with the names of those that count: of a class with our constructor all of them, of a structure whose own
`__init__` calls ours those that it passes on."""


def declared_value(structure: object, name: str) -> Any:
    """The value of a structure's `seed`, `causal` or `strict_causal`; the default of one that it does not declare. A
    structure that derives from ours and has one for itself is told once that it does not count."""
    if name in getattr(structure, DECLARED, ()):
        return getattr(structure, name)
    if hasattr(structure, DECLARED) and getattr(structure, name, DEFAULTS[name]) is not DEFAULTS[name]:
        _say_not_counted(type(structure), name)
    return DEFAULTS[name]


_said: set[tuple[type, str]] = set()


def _say_not_counted(cls: type, name: str) -> None:
    import torch  # not above: commands that compute nothing start without it

    from ._base import SparsityWarning

    if (cls, name) in _said or torch.compiler.is_compiling():  # a warning would end the graph
        return
    _said.add((cls, name))
    warnings.warn(
        f"{cls.__name__} has a {name} that does not count: its own __init__ does not pass {name} to "
        "super().__init__(). Pass it there, where it is meant as ours; an attribute of its own needs nothing.",
        SparsityWarning,
        stacklevel=3,
    )


def may_declare(structure: object, name: str) -> bool:
    """Whether the attribute is ours to set: declared, or at the default that our constructor gave it."""
    names = getattr(structure, DECLARED, None)
    return names is not None and (name in names or getattr(structure, name, DEFAULTS[name]) is DEFAULTS[name])


def declare(structure: object, name: str, value: Any) -> None:
    """Sets `seed`, `causal` or `strict_causal` of a structure of ours, which counts from now on."""
    setattr(structure, name, value)
    names = getattr(structure, DECLARED)
    if name not in names:
        setattr(structure, DECLARED, names | {name})
