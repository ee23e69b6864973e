"""Which attention layers of a model are sparse, whatever family it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..modules.code_names import calls_attention
from ..modules.layers import cross_attention_layers, ours_and_others
from .families import families


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The sparse and the dense self-attention layers of a model, by name.

    Sparse is what `ours_and_others` says is ours, and what its family says is switched, such as a layer of a
    Transformers model on the attention interface whose implementation is "ds_sparse". Dense are the others that it
    finds, and the innermost modules outside of these whose code names scaled_dot_product_attention. Both are in the
    model's order.
    """
    sparse, dense = ours_and_others(model)
    dense |= _callers(model, {*sparse.values(), *dense.values(), *cross_attention_layers(model).values()})
    for family in families():
        sparse |= family.switched(model, dense)
    places = _places(model)
    sparse, dense = (dict(sorted(those.items(), key=lambda item: places[item[0]])) for those in (sparse, dense))
    return sparse, {name: layer for name, layer in dense.items() if name not in sparse}


def numbers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, int]:
    """The number of each attention layer, by name, by which `layers` of a block counts it: from 0, in the model's
    order, whatever family it is of. Layers of a family that counts them by model have none here.

    Args:
        layers: all attention layers of the model, sparse and dense.
    """
    apart = {name for family in families() if family.counts_by_model for name in family.of_this_family(model, layers)}
    together = sorted(layers.keys() - apart, key=_places(model).__getitem__)
    return {name: number for number, name in enumerate(together)}


def refuse_sparse(model: nn.Module, sparse: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a model that is to become sparse has a sparse layer."""
    if sparse:
        raise ValueError(
            f"{next(iter(sparse))} of {type(model).__name__} is sparse already; give the dense model (undo() of what "
            "sparsify returned makes it dense again)."
        )


def _places(model: nn.Module) -> dict[str, int]:
    return {name: place for place, (name, _) in enumerate(model.named_modules())}


def _callers(model: nn.Module, known: set[nn.Module]) -> dict[str, nn.Module]:
    """The innermost modules, neither inside nor around the known ones, whose code names the function."""
    inside = {module for layer in known for module in layer.modules()}
    found: dict[str, nn.Module] = {}
    around: set[nn.Module] = set(known)
    for name, module in reversed(list(model.named_modules())):  # what is inside comes before what is around it
        if module in inside or not around.isdisjoint(module.modules()):
            continue
        kind: Any = type(module)
        if calls_attention(kind):
            found[name] = module
            around.add(module)
    return dict(reversed(found.items()))
