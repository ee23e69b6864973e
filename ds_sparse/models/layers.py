"""Which attention layers of a model are sparse, whatever family it is of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ..modules.layers import cross_attention_layers, ours_and_others
from .families import families


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The sparse and the dense self-attention layers of a model, by name.

    Sparse is what `ours_and_others` says is ours, and what its family says is switched, such as a layer of a
    Transformers model on the attention interface whose implementation is "ds_sparse". Dense are the others that it
    finds, and the innermost modules outside of these whose code names scaled_dot_product_attention.
    """
    sparse, dense = ours_and_others(model)
    dense |= _callers(model, {*sparse.values(), *dense.values(), *cross_attention_layers(model).values()})
    for family in families():
        sparse |= family.switched(model, dense)
    return sparse, {name: layer for name, layer in dense.items() if name not in sparse}


def refuse_sparse(model: nn.Module, sparse: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a model that is to become sparse has a sparse layer."""
    if sparse:
        raise ValueError(
            f"{next(iter(sparse))} of {type(model).__name__} is sparse already; give the dense model (undo() of what "
            "sparsify returned makes it dense again)."
        )


def _callers(model: nn.Module, known: set[nn.Module]) -> dict[str, nn.Module]:
    """The innermost modules, neither inside nor around the known ones, whose code names the function."""
    inside = {module for layer in known for module in layer.modules()}
    found: dict[str, nn.Module] = {}
    around: set[nn.Module] = set(known)
    for name, module in reversed(list(model.named_modules())):  # what is inside comes before what is around it
        if module in inside or not around.isdisjoint(module.modules()):
            continue
        kind: Any = type(module)
        if _names_the_function(kind):
            found[name] = module
            around.add(module)
    return dict(reversed(found.items()))


@functools.cache
def _names_the_function(kind: Any) -> bool:
    own = [base for base in kind.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")]
    functions = [value for base in own for name, value in vars(base).items() if name != "__init__"]
    return any(_names(function.__code__) for function in functions if isinstance(function, FunctionType))


def _names(code: CodeType) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return scaled_dot_product_attention.__name__ in code.co_names or any(map(_names, inner))
