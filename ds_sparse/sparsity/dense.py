from __future__ import annotations

from torch import Tensor

from ._base import SparsityConfig, declared
from ._registry import register_sparsity


@register_sparsity("dense")
@declared
class DenseSparsityConfig(SparsityConfig):
    """Every block is live: dense attention through the sparse operations, for comparison (DeepSpeed mode "dense")."""

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout[h] = 1
        return layout
