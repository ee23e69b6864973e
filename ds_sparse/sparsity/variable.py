from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor

from ._base import (
    REACHES_AHEAD,
    Attention,
    Indices,
    SparsityConfig,
    WindowSizes,
    declared,
    global_ranges,
    horizontal_needs_bidirectional,
    need_blocks,
    ranges_pair_up,
    ranges_run_forward,
    windows,
)
from ._registry import register_sparsity


@register_sparsity("variable")
@declared
class VariableSparsityConfig(SparsityConfig):
    """Local windows of listed sizes, chosen global columns, random blocks (DeepSpeed mode "variable").

    Raises:
        ValueError: a field of the wrong type or out of bounds, starts and ends of the global ranges that do not match,
            horizontal global attention on a unidirectional layout; at `make_layout`, fewer blocks in a row than
            random blocks, or an index before the first block.
    """

    num_random_blocks: int = Field(0, ge=0, description="Blocks drawn at random in every row.")
    local_window_blocks: WindowSizes = Field(
        [4], description="Sizes in blocks of the consecutive local windows; the last one repeats to the end."
    )
    global_block_indices: Indices = Field(
        [0], description="Blocks that are attended by all; starts of ranges when ends are given."
    )
    global_block_end_indices: Indices | None = Field(
        None,
        description="End (exclusive) of the range that starts at each of global_block_indices; null: single blocks.",
    )
    attention: Attention = Field(
        "bidirectional", description="Whether a block sees the blocks after it; unidirectional is block-level only."
    )
    horizontal_global_attention: bool = Field(
        False, description="Whether global blocks also attend to all. Needs bidirectional attention."
    )

    rules = (ranges_pair_up, ranges_run_forward, horizontal_needs_bidirectional)

    def cautions(self) -> Iterator[tuple[str, str]]:
        yield from super().cautions()
        if self.attention == "unidirectional" and not (self.causal or self.strict_causal):
            if self.num_random_blocks:
                yield "num_random_blocks", f"num_random_blocks are drawn over the whole row, {REACHES_AHEAD}"
            ranges = zip(self.global_block_indices, self.global_block_end_indices or (), strict=False)
            if any(end - start > 1 for start, end in ranges):
                yield (
                    "global_block_end_indices",
                    f"global_block_end_indices make stripes that start at the first global row, {REACHES_AHEAD}",
                )

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout = self.set_random_layout(h, layout)
        layout = self.set_local_layout(h, layout)
        return self.set_global_layout(h, layout)

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        blocks = layout.shape[1]
        need_blocks("random blocks", self.num_random_blocks, blocks)
        sample = self.sampler(h)
        columns = [sample(range(blocks), self.num_random_blocks) for _ in range(blocks)]
        layout[h].scatter_(1, torch.tensor(columns, dtype=torch.int64), 1)
        return layout

    def set_local_layout(self, h: int, layout: Tensor) -> Tensor:
        blocks = layout.shape[1]
        sizes = list(self.local_window_blocks)
        sizes += [sizes[-1]] * (max(0, blocks - sum(sizes)) // sizes[-1] + 1)
        mask = windows(torch.tensor(sizes), blocks, self.attention == "unidirectional")
        layout[h].masked_fill_(mask, 1)
        return layout

    def set_global_layout(self, h: int, layout: Tensor) -> Tensor:
        for start, end in global_ranges(self.global_block_indices, self.global_block_end_indices, layout.shape[1]):
            first_row = 0 if self.attention == "bidirectional" else start
            layout[h, first_row:, start:end] = 1
            if self.horizontal_global_attention:
                layout[h, start:end, :] = 1
        return layout
