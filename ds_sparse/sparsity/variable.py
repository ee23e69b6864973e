from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import (
    REACHES_AHEAD,
    RowStep,
    global_ranges,
    horizontal_needs_bidirectional,
    indices_beyond,
    indices_reach_the_row,
    random_blocks_fit,
    ranges_pair_up,
    ranges_run_forward,
    row_step,
    windows,
    within,
)
from .declarations import (
    Attention,
    GlobalBlockEndIndices,
    HorizontalGlobalAttention,
    Indices,
    RandomBlocks,
    WindowSizes,
    declared,
    require,
)

if TYPE_CHECKING:
    from torch import Tensor


@register_sparsity("variable")
@declared
class VariableSparsityConfig(SparsityConfig):
    """Local windows of listed sizes, chosen global columns, random blocks: mode "variable".

    Source: DeepSpeed's mode of this name.

    Raises:
        ValueError: a field of the wrong type or out of bounds, starts and ends of the global ranges that do not match,
            horizontal global attention on a unidirectional layout; at `make_layout`, fewer blocks in a row than
            random blocks, or an index before the first block.

    Examples:
        >>> import ds_sparse
        >>> structure = ds_sparse.VariableSparsityConfig(num_heads=1, block=16, local_window_blocks=[1, 2])
        >>> structure.make_layout(seq_len=80)
        tensor([[[1, 0, 0, 0, 0],
                 [1, 1, 1, 0, 0],
                 [1, 1, 1, 0, 0],
                 [1, 0, 0, 1, 1],
                 [1, 0, 0, 1, 1]]])
    """

    num_random_blocks: RandomBlocks = 0
    local_window_blocks: WindowSizes = Field(
        default=[4], description="Sizes in blocks of the consecutive local windows; the last one repeats to the end."
    )
    global_block_indices: Indices = Field(
        default=[0], description="Blocks that are attended by all; starts of ranges when ends are given."
    )
    global_block_end_indices: GlobalBlockEndIndices = None
    attention: Attention = "bidirectional"
    horizontal_global_attention: HorizontalGlobalAttention = False

    rules = (ranges_pair_up, ranges_run_forward, horizontal_needs_bidirectional)
    length_rules = (random_blocks_fit, indices_reach_the_row)

    def cautions(self) -> Iterator[tuple[str, str]]:
        yield from super().cautions()
        if self.attention == "unidirectional" and not (self._says("causal") or self._says("strict_causal")):
            if self.num_random_blocks:
                yield "num_random_blocks", f"num_random_blocks are drawn over the whole row, {REACHES_AHEAD}"
            ranges = zip(self.global_block_indices, self.global_block_end_indices or (), strict=False)
            if any(end - start > 1 for start, end in ranges):
                yield (
                    "global_block_end_indices",
                    f"global_block_end_indices make stripes that start at the first global row, {REACHES_AHEAD}",
                )

    def cautions_at(self, blocks: int) -> Iterator[tuple[str, str]]:
        yield from super().cautions_at(blocks)
        yield from indices_beyond(self.global_block_indices, blocks)

    @row_step
    def set_random_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the random blocks, by DeepSpeed's name."""
        import torch

        require(random_blocks_fit(self.num_random_blocks, blocks))
        sample = self.sampler(h)
        columns = torch.tensor(
            [sample(range(blocks), self.num_random_blocks) for _ in range(blocks)], dtype=torch.int64
        )
        return lambda live, rows: live.scatter_(1, columns[rows.start : rows.stop], 1)

    @row_step
    def set_local_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the local windows, by DeepSpeed's name."""
        return windows(self.local_window_blocks, blocks, self.attention == "unidirectional")

    @row_step
    def set_global_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the global blocks, by DeepSpeed's name."""
        ranges = global_ranges(self.global_block_indices, self.global_block_end_indices, blocks)

        def step(live: Tensor, rows: range) -> None:
            for start, end in ranges:
                first_row = 0 if self.attention == "bidirectional" else start
                live[within(rows, first_row, blocks), start:end] = 1
                if self.horizontal_global_attention:
                    live[within(rows, start, end)] = 1

        return step
