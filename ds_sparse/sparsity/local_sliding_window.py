from __future__ import annotations

from pydantic import Field

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import RowStep, row_step, sliding_window, window_fits
from .declarations import Attention, WindowWidth, declared


@register_sparsity("local_sliding_window")
@declared
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A band around the diagonal and nothing else: mode "local_sliding_window".

    Source: DeepSpeed's class of this name, which had no mode.

    Unidirectional by default, and then only the `num_sliding_window_blocks // 2 + 1` blocks up to the diagonal.
    All heads share one layout.

    Raises:
        ValueError: a field of the wrong type or out of bounds; at `make_layout`, fewer blocks in a row than the window.

    Examples:
        >>> import ds_sparse
        >>> ds_sparse.LocalSlidingWindowSparsityConfig(num_heads=1, block=16, causal=True).make_layout(seq_len=80)
        tensor([[[1, 0, 0, 0, 0],
                 [1, 1, 0, 0, 0],
                 [0, 1, 1, 0, 0],
                 [0, 0, 1, 1, 0],
                 [0, 0, 0, 1, 1]]])
    """

    different_layout_per_head: bool = Field(default=False, init=False)
    num_sliding_window_blocks: WindowWidth = 3
    attention: Attention = "unidirectional"

    length_rules = (window_fits,)

    @row_step
    def set_sliding_window_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the sliding window, by DeepSpeed's name."""
        return sliding_window(blocks, self.num_sliding_window_blocks, self.attention == "unidirectional")
