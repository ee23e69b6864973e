from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import (
    RowStep,
    global_blocks_fit,
    global_rows_and_columns,
    random_blocks_fit,
    row_step,
    sliding_window,
    window_fits,
)
from .declarations import Attention, RandomBlocks, WindowWidth, declared, require

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
    """Random blocks, a sliding window, and leading global rows and columns: mode "bigbird".

    Sources: Zaheer et al., "Big Bird: transformers for longer sequences", 2020, arXiv 2007.14062, its internal
    transformer construction; DeepSpeed's mode of this name.

    Random blocks may fall on blocks that are live anyway. The class draws 1 a row by default, the JSON block 0.

    Raises:
        ValueError: a field of the wrong type or out of bounds; at `make_layout`, fewer blocks in a row than asked for,
            or unidirectional with two or more random blocks and no `strict_causal`.

    Examples:
        >>> import ds_sparse
        >>> structure = ds_sparse.BigBirdSparsityConfig(num_heads=1, block=16, num_sliding_window_blocks=1, seed=0)
        >>> structure.make_layout(seq_len=80)
        tensor([[[1, 1, 1, 1, 1],
                 [1, 1, 0, 1, 0],
                 [1, 0, 1, 1, 0],
                 [1, 0, 0, 1, 0],
                 [1, 0, 0, 1, 1]]])
    """

    num_random_blocks: RandomBlocks = 1
    num_sliding_window_blocks: WindowWidth = 3
    num_global_blocks: int = Field(
        default=1, ge=0, description="Leading blocks that attend to all and are attended by all."
    )
    attention: Attention = "bidirectional"

    json_rules = (first_row_has_one_candidate,)
    length_rules = (random_blocks_fit, window_fits, global_blocks_fit)
    json_defaults: ClassVar[dict[str, Any]] = {"num_random_blocks": 0}

    @row_step
    def set_random_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the random blocks, by DeepSpeed's name."""
        import torch

        require(random_blocks_fit(self.num_random_blocks, blocks))
        sample = self.sampler(h)
        columns: list[int] = []
        wanted: list[int] = []
        for row in range(blocks):
            candidates = range(blocks) if self.attention == "bidirectional" else range(row + 1)
            enough = len(candidates) if self._says("strict_causal") else self.num_random_blocks
            wanted.append(min(self.num_random_blocks, enough))
            columns += sample(candidates, wanted[-1])
        row_of = torch.repeat_interleave(torch.arange(blocks), torch.tensor(wanted))
        column_of = torch.tensor(columns, dtype=torch.int64)

        def step(live: Tensor, rows: range) -> None:
            first, end = torch.searchsorted(row_of, torch.tensor([rows.start, rows.stop])).tolist()
            live[row_of[first:end] - rows.start, column_of[first:end]] = 1

        return step

    @row_step
    def set_sliding_window_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the sliding window, by DeepSpeed's name."""
        return sliding_window(blocks, self.num_sliding_window_blocks, unidirectional=False)

    @row_step
    def set_global_layout_itc(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the global blocks, by DeepSpeed's name."""
        require(global_blocks_fit(self.num_global_blocks, blocks))
        return global_rows_and_columns([(0, self.num_global_blocks)], self.attention == "unidirectional")
