"""BertSparseSelfAttention: BERT's self-attention layer with a sparse core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .ops.softmax import as_additive
from .self_attention import SparseSelfAttention
from .sparsity import FixedSparsityConfig, SparsityConfig


class BertSparseSelfAttention(nn.Module):
    """Drop-in for a BERT layer's `attention.self`. Source: DeepSpeed's module of this name.

    Args:
        config: has `hidden_size` and `num_attention_heads`, and may have `attention_probs_dropout_prob`.
        sparsity_config: the structure; by default `FixedSparsityConfig` for the model's number of heads.
        max_seq_length: tokens that the layout is built for; longer sequences get a layout of their own.

    Raises:
        ValueError: hidden_size is not a multiple of the number of heads, or the structure is for another number of heads.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None, max_seq_length: int = 2048):
        super().__init__()
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            raise ValueError(
                f"The hidden size ({config.hidden_size}) is not a multiple of the number of attention heads ({heads})"
            )
        sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=heads)
        if sparsity_config.num_heads != heads:
            raise ValueError(
                f"The model has {heads} attention heads and the sparsity config num_heads={sparsity_config.num_heads}; "
                f"build it with num_heads={heads}."
            )
        self.num_attention_heads = heads
        self.attention_head_size = config.hidden_size // heads
        self.all_head_size = config.hidden_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config,
            max_seq_length=max_seq_length,
            attention_dropout=getattr(config, "attention_probs_dropout_prob", 0.0),
        )

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden) -> (B, H, T, D), a view."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Self-attention of hidden states (B, T, hidden), any T.

        Args:
            attention_mask: added to the scores of each key: (B, T) or (B, 1, 1, T), 0 keeps, -10000 or -inf drops.

        Returns:
            (B, T, hidden).
        """
        block = self.sparse_self_attention.sparsity_config.block
        tokens = hidden_states.shape[1]
        query, key, value = (
            self.transpose_for_scores(projection(hidden_states)) for projection in (self.query, self.key, self.value)
        )
        missing = -tokens % block
        if missing:
            query, key, value = (nn.functional.pad(x, (0, 0, 0, missing)) for x in (query, key, value))
            if attention_mask is None:
                attention_mask = query.new_zeros(query.shape[0], tokens)
            attention_mask = as_additive("attention_mask", attention_mask, query.dtype)
            attention_mask = nn.functional.pad(attention_mask, (0, missing), value=float("-inf"))
        context = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)[:, :tokens]
