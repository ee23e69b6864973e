from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import (
    RowStep,
    global_ranges,
    global_rows_and_columns,
    indices_beyond,
    indices_reach_the_row,
    ranges_pair_up,
    ranges_run_forward,
    row_step,
    sliding_window,
    window_fits,
)
from .declarations import Attention, GlobalBlockEndIndices, Indices, WindowWidth, declared


@register_sparsity("bslongformer")
@declared
class BSLongformerSparsityConfig(SparsityConfig):
    """Longformer on blocks, a sliding window and chosen global rows and columns: mode "bslongformer".

    Sources: Beltagy et al., "Longformer: the long-document transformer", 2020, arXiv 2004.05150; DeepSpeed's mode of
    this name.

    Raises:
        ValueError: a field of the wrong type or out of bounds, starts and ends of the global ranges that do not match;
            at `make_layout`, fewer blocks in a row than the window, or an index before the first block.

    Examples:
        >>> import ds_sparse
        >>> ds_sparse.BSLongformerSparsityConfig(num_heads=1, block=16).make_layout(seq_len=80)
        tensor([[[1, 1, 1, 1, 1],
                 [1, 1, 1, 0, 0],
                 [1, 1, 1, 1, 0],
                 [1, 0, 1, 1, 1],
                 [1, 0, 0, 1, 1]]])
    """

    num_sliding_window_blocks: WindowWidth = 3
    global_block_indices: Indices = Field(
        default=[0],
        description="Blocks that attend to all and are attended by all; starts of ranges when ends are given.",
    )
    global_block_end_indices: GlobalBlockEndIndices = None
    attention: Attention = "bidirectional"

    rules = (ranges_pair_up, ranges_run_forward)
    length_rules = (window_fits, indices_reach_the_row)

    def cautions_at(self, blocks: int) -> Iterator[tuple[str, str]]:
        yield from super().cautions_at(blocks)
        yield from indices_beyond(self.global_block_indices, blocks)

    @row_step
    def set_sliding_window_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the sliding window, by DeepSpeed's name."""
        return sliding_window(blocks, self.num_sliding_window_blocks, unidirectional=False)

    @row_step
    def set_global_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the global blocks, by DeepSpeed's name."""
        ranges = global_ranges(self.global_block_indices, self.global_block_end_indices, blocks)
        return global_rows_and_columns(ranges, self.attention == "unidirectional")
