"""Names in the code of a module's class: finds its functions that call PyTorch's attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

NO_MODELS = ("torch", "builtins", "typing", "abc")
"""Packages whose classes are not those of a model's author."""


@functools.cache
def functions_of(kind: Any) -> Mapping[str, tuple[Callable[..., Any], ...]]:
    """The functions of a module's class by name, but for PyTorch's and `__init__`: the one that its objects find, and
    those of base classes that it overrides and may call."""
    found: dict[str, tuple[Callable[..., Any], ...]] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in NO_MODELS:
            for name, value in vars(base).items():
                if isinstance(value, FunctionType) and name != nn.Module.__init__.__name__:
                    found[name] = (*found.get(name, ()), value)
    return found


@functools.cache
def calls_attention(kind: Any) -> bool:
    """Tells if a function of a module's class names scaled_dot_product_attention."""
    return any(map(name_attention, functions_of(kind).values()))


def name_attention(functions: tuple[Callable[..., Any], ...]) -> bool:
    """Tells if one of these functions names scaled_dot_product_attention."""
    return any(scaled_dot_product_attention.__name__ in names_in(function) for function in functions)


@functools.cache
def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Names in the code of a function, and of functions inside it. A decorator that says what it wraps is looked
    through."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset() if code is None else frozenset(_names(code))


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
