from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ._base import (
    Attention,
    RandomBlocks,
    SparsityConfig,
    WindowWidth,
    declared,
    global_blocks_fit,
    random_blocks_fit,
    require,
    sliding_window,
    window_fits,
)
from ._registry import register_sparsity

if TYPE_CHECKING:
    from torch import Tensor


def first_row_has_one_candidate(num_random_blocks: int, attention: str, strict_causal: bool) -> str | None:
    if attention == "unidirectional" and num_random_blocks > 1 and not strict_causal:
        return (
            "The first row of a unidirectional layout has one block to draw from. Set strict_causal to true, which "
            "draws as many as a row has, or ask for at most 1 random block."
        )
    return None


@register_sparsity("bigbird")
@declared
class BigBirdSparsityConfig(SparsityConfig):
    """BigBird, internal transformer construction: random blocks, a sliding window, and leading global rows and columns
    (Zaheer et al. 2020, arXiv 2007.14062; DeepSpeed mode "bigbird").

    Random blocks may fall on blocks that are live anyway. The class draws 1 a row by default, the JSON block 0.

    Raises:
        ValueError: a field of the wrong type or out of bounds; at `make_layout`, fewer blocks in a row than asked for,
            or unidirectional with two or more random blocks and no `strict_causal`.
    """

    num_random_blocks: RandomBlocks = 1
    num_sliding_window_blocks: WindowWidth = 3
    num_global_blocks: int = Field(1, ge=0, description="Leading blocks that attend to all and are attended by all.")
    attention: Attention = "bidirectional"

    json_rules = (first_row_has_one_candidate,)
    length_rules = (random_blocks_fit, window_fits, global_blocks_fit)
    json_defaults = {"num_random_blocks": 0}

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        layout = self.set_random_layout(h, layout)
        layout = self.set_sliding_window_layout(h, layout)
        return self.set_global_layout_itc(h, layout)

    def set_random_layout(self, h: int, layout: Tensor) -> Tensor:
        import torch

        blocks = layout.shape[1]
        require(random_blocks_fit(self.num_random_blocks, blocks))
        sample = self.sampler(h)
        rows: list[int] = []
        columns: list[int] = []
        for row in range(blocks):
            candidates = range(blocks) if self.attention == "bidirectional" else range(row + 1)
            wanted = min(self.num_random_blocks, len(candidates)) if self.strict_causal else self.num_random_blocks
            rows += [row] * wanted
            columns += sample(candidates, wanted)
        layout[h, torch.tensor(rows, dtype=torch.int64), torch.tensor(columns, dtype=torch.int64)] = 1
        return layout

    def set_sliding_window_layout(self, h: int, layout: Tensor) -> Tensor:
        band = sliding_window(layout.shape[1], self.num_sliding_window_blocks, unidirectional=False)
        layout[h].masked_fill_(band, 1)
        return layout

    def set_global_layout_itc(self, h: int, layout: Tensor) -> Tensor:
        require(global_blocks_fit(self.num_global_blocks, layout.shape[1]))
        layout[h, : self.num_global_blocks, :] = 1
        layout[h, :, : self.num_global_blocks] = 1
        if self.attention == "unidirectional":
            layout[h].tril_()
        return layout
