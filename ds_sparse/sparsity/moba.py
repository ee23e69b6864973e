from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..tools.block_sizes import BLOCK_SIZES, CHOSEN_BLOCK_SIZES
from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import RowStep, row_step
from .declarations import WindowWidth, declared, one_of_sizes

ChosenBlock = Annotated[
    int, AfterValidator(one_of_sizes(CHOSEN_BLOCK_SIZES)), Field(json_schema_extra={"enum": list(CHOSEN_BLOCK_SIZES)})
]


def _forced_fit(
    num_chosen_blocks: int, num_first_blocks: int, num_sliding_window_blocks: int, causal: bool
) -> str | None:
    aside = num_sliding_window_blocks // 2
    forced = num_first_blocks + 1 + (aside if causal else 2 * aside)
    if forced <= num_chosen_blocks:
        return None
    return (
        f"num_first_blocks and num_sliding_window_blocks take {forced} blocks whatever they score, and "
        f"num_chosen_blocks is {num_chosen_blocks}; give that or more."
    )


def _squares_fit(selection: str, block: int) -> str | None:
    if selection == "token" or block in BLOCK_SIZES:
        return None
    return f"block is {block}, and blocks of queries that choose together have {BLOCK_SIZES[-1]} or fewer."


def _not_cut(strict_causal: bool) -> str | None:
    return "strict_causal cuts layouts, and here is none; set causal." if strict_causal else None


@register_sparsity("moba")
@declared
class MobaSparsityConfig(SparsityConfig):
    """Blocks of keys that queries choose anew in each call, by the mean of a block's keys: mode "moba".

    Source: Lu et al., "MoBA: Mixture of block attention for long-context LLMs", 2025, where tokens of a decoder choose.
    There are no parameters, and no layout: `make_layout` has the blocks that may be chosen.

    Raises:
        ValueError: a field of the wrong type or out of bounds; fewer chosen blocks than are taken whatever they score.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> structure = ds_sparse.MobaSparsityConfig(num_heads=4, block=16, num_chosen_blocks=3, causal=True)
        >>> attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=128)
        >>> query, key, value = (torch.randn(2, 4, 128, 8) for _ in range(3))
        >>> attention(query, key, value).shape
        torch.Size([2, 4, 128, 8])
    """

    block: ChosenBlock = Field(default=64, description="Keys in a block that is chosen or not.")
    different_layout_per_head: bool = Field(default=False, init=False)
    num_chosen_blocks: int = Field(
        default=8, ge=1, description="Blocks that a query takes, with those that it takes whatever they score."
    )
    num_first_blocks: int = Field(
        default=0, ge=0, description="Blocks from the sequence's start on that every query takes."
    )
    num_sliding_window_blocks: WindowWidth = Field(
        default=1,
        description="Width of the window of blocks that a query takes whatever they score, as in the other modes: half "
        "of it on either side of its own, before it if causal.",
    )
    selection: Literal["token", "block"] = Field(
        default="token",
        description="Who chooses: each token, or a block of queries together, by their mean, which costs less.",
    )
    chosen_by_group: bool = Field(
        default=False,
        description="Whether heads that share a key head choose together, by the sum of their scores, which costs "
        "less; else each head for itself.",
    )

    rules = (_forced_fit, _squares_fit, _not_cut)

    @row_step
    def _candidates(self, h: int, blocks: int) -> RowStep:
        return lambda live, rows: live.fill_(1).tril_(rows.start) if self.causal else live.fill_(1)

    def computed_share(self, seq_len: int) -> float:
        """The share of scores that are computed, where each query finds as many blocks as it takes.

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            Above 0 to 1.

        Raises:
            ValueError, TypeError: seq_len is no positive multiple of the block.
        """
        blocks = self._blocks_in(seq_len)
        taken = [min(self.num_chosen_blocks, row + 1 if self.causal else blocks) for row in range(blocks)]
        return sum(taken) / blocks**2
