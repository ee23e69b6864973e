"""Which attention layers of a model are sparse, whatever family it is of."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..modules.layers import ours_and_others
from .families import families


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The sparse and the dense self-attention layers of a model, by name.

    Sparse is a `SparseSelfAttention`, and what its family says is switched, such as a layer of a Transformers model on
    the attention interface whose implementation is "ds_sparse". Dense are the others that `ours_and_others` finds.
    """
    sparse, dense = ours_and_others(model)
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
