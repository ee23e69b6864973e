from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ._registry import register_sparsity
from .chosen import ChosenSparsityConfig, NumChosenBlocks
from .declarations import declared


@register_sparsity("indexer")
@declared
class IndexerSparsityConfig(ChosenSparsityConfig):
    """Blocks of keys that a small indexer chooses anew in each call, which learns from the attention: mode "indexer".

    Sources: MiniMax, "MiniMax-M3", 2026; DeepSeek-AI, "DeepSeek-V3.2", 2025 (its loss). Each layer gets an
    `IndexerAttention`, whose parameters learn without a loss of the model's.

    Raises:
        ValueError: a field of the wrong type or out of bounds; fewer chosen blocks than are taken whatever they score.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> structure = ds_sparse.IndexerSparsityConfig(num_heads=4, block=16, num_chosen_blocks=3, index_dim=8)
        >>> attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=128, head_dim=16)
        >>> query, key, value = (torch.randn(2, 4, 128, 16) for _ in range(3))
        >>> attention(query, key, value).shape
        torch.Size([2, 4, 128, 16])
    """

    num_chosen_blocks: NumChosenBlocks = 16
    index_dim: int = Field(
        default=64, ge=1, description="Numbers of a head of the indexer, no more than one of attention has."
    )
    index_heads: Literal["group", "head", "one"] = Field(
        default="group",
        description="Heads of the indexer: one for each group of heads that share a key head, one for each head, or "
        "one for all.",
    )
    loss_weight: float = Field(default=1.0, gt=0, description="Gradient of the indexer's loss.")

    adds_parameters: ClassVar[bool] = True
