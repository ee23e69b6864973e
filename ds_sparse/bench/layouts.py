"""The layouts of `ds_sparse bench matmul`, by name: one for all heads, the same at every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..sparsity import BigBirdSparsityConfig, BSLongformerSparsityConfig, FixedSparsityConfig, SparsityConfig
from ..tools.arguments import UsageError
from ..tools.wording import reason

RANDOM_PERCENTS = (1, 5, 10, 25, 50)

SEEN_FROM_ANY_ROW = 128
"""Tokens on either side that a row of `DenseRow` sees."""


class RandomBlocks(SparsityConfig):
    """Blocks that are live with a probability."""

    def __init__(self, num_heads: int, block: int, density: float) -> None:
        super().__init__(num_heads, block)
        self.density = density

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        """Raises ValueError where no block is live."""
        layout[h] = torch.rand(layout.shape[1:], generator=torch.Generator().manual_seed(0)) < self.density
        if not layout[h].any():
            rows, columns = layout.shape[1:]
            raise ValueError(
                f"Of {rows} x {columns} blocks at a density of {self.density:.0%} none is live; take a smaller block, "
                "more tokens or a higher density."
            )
        return layout


class DenseRow(SparsityConfig):
    """Long rows among short ones: a narrow window, and one block row in the middle that sees all tokens."""

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        row = torch.arange(layout.shape[1])
        layout[h] = (row[:, None] - row).abs() * self.block <= SEEN_FROM_ANY_ROW
        layout[h, len(row) // 2] = True
        return layout


LAYOUTS: dict[str, Callable[..., SparsityConfig]] = {
    "fixed": FixedSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "bslongformer-1": partial(BSLongformerSparsityConfig, num_sliding_window_blocks=1),
    "bslongformer-9": partial(BSLongformerSparsityConfig, num_sliding_window_blocks=9),
    "bigbird-3": partial(BigBirdSparsityConfig, num_random_blocks=3, num_global_blocks=2, seed=0),
    "dense-row": DenseRow,
    **{f"random-{percent}": partial(RandomBlocks, density=percent / 100) for percent in RANDOM_PERCENTS},
}
"""Name to structure: DeepSpeed's defaults, narrow and wide windows, rows of very different length, and random blocks by
their density in percent."""


def make_layout(name: str, block: int, seq_len: int) -> Tensor:
    """bool (1, R, R) on the CPU.

    Raises:
        UsageError: tokens that are no multiple of the block or too few for the structure, or another block than theirs.
    """
    try:
        return LAYOUTS[name](num_heads=1, block=block).make_bool_layout(seq_len)
    except ValueError as error:
        raise UsageError(reason(error)) from error
