from __future__ import annotations

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import RowStep, row_step
from .declarations import declared


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

    @row_step
    def _all(self, h: int, blocks: int) -> RowStep:
        return lambda live, rows: live.fill_(1)
