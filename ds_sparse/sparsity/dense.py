from __future__ import annotations

from typing import TYPE_CHECKING

from ._base import RowStep, SparsityConfig, declared
from ._registry import register_sparsity

if TYPE_CHECKING:
    from torch import Tensor


@register_sparsity("dense")
@declared
class DenseSparsityConfig(SparsityConfig):
    """Every block is live, dense attention through the sparse operations, for comparison: mode "dense".

    Source: DeepSpeed's mode of this name.

    Raises:
        ValueError: a field of the wrong type or out of bounds.

    Examples:
        >>> import ds_sparse
        >>> ds_sparse.DenseSparsityConfig(num_heads=1, block=16).make_layout(seq_len=32)
        tensor([[[1, 1],
                 [1, 1]]])
    """

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout[h] = 1
        return layout

    def row_steps(self, h: int, blocks: int) -> list[RowStep]:
        return [lambda live, rows: live.fill_(1)]
