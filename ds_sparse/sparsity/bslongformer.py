from __future__ import annotations

from pydantic import Field
from torch import Tensor

from ._base import (
    Attention,
    Indices,
    SparsityConfig,
    declared,
    global_ranges,
    ranges_pair_up,
    ranges_run_forward,
    sliding_window,
)
from ._registry import register_sparsity


@register_sparsity("bslongformer")
@declared
class BSLongformerSparsityConfig(SparsityConfig):
    """Longformer on blocks: a sliding window and chosen global rows and columns (Beltagy et al. 2020, arXiv 2004.05150;
    DeepSpeed mode "bslongformer").

    Raises:
        ValueError: a field of the wrong type or out of bounds, starts and ends of the global ranges that do not match;
            at `make_layout`, fewer blocks in a row than the window, or an index before the first block.
    """

    num_sliding_window_blocks: int = Field(
        3, ge=1, description="Width of the window in blocks, half of it on either side of the diagonal."
    )
    global_block_indices: Indices = Field(
        [0], description="Blocks that attend to all and are attended by all; starts of ranges when ends are given."
    )
    global_block_end_indices: Indices | None = Field(
        None,
        description="End (exclusive) of the range that starts at each of global_block_indices; null: single blocks.",
    )
    attention: Attention = Field(
        "bidirectional", description="Whether a block sees the blocks after it; unidirectional is block-level only."
    )

    rules = (ranges_pair_up, ranges_run_forward)

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout = self.set_sliding_window_layout(h, layout)
        return self.set_global_layout(h, layout)

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        band = sliding_window(layout.shape[1], self.num_sliding_window_blocks, unidirectional=False)
        layout[h].masked_fill_(band, 1)
        return layout

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        for start, end in global_ranges(self.global_block_indices, self.global_block_end_indices, layout.shape[1]):
            layout[h, start:end, :] = 1
            layout[h, :, start:end] = 1
        if self.attention == "unidirectional":
            layout[h].tril_()
        return layout
