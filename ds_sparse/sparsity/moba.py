from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..tools.block_sizes import BLOCK_SIZES
from ._registry import register_sparsity
from .chosen import ChosenSparsityConfig
from .declarations import declared


def _squares_fit(selection: str, block: int) -> str | None:
    if selection == "token" or block in BLOCK_SIZES:
        return None
    return f"block is {block}, and blocks of queries that choose together have {BLOCK_SIZES[-1]} or fewer."


def _none_ahead(selection: str, causal: bool) -> str | None:
    if selection == "token" or not causal:
        return None
    return 'selection is "block" and causal true: what a token sees would depend on the tokens after it; take "token".'


@register_sparsity("moba")
@declared
class MobaSparsityConfig(ChosenSparsityConfig):
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

    selection: Literal["token", "block"] = Field(
        default="token",
        description="Who chooses: each token; or a block of queries together, by their mean, which costs less, and is "
        "for encoders: of causal queries it would tell of those ahead.",
    )
    chosen_by_group: bool = Field(
        default=False,
        description="Whether heads that share a key head choose together, by the sum of their scores, which costs "
        "less; else each head for itself.",
    )

    rules = (*ChosenSparsityConfig.rules, _squares_fit, _none_ahead)
