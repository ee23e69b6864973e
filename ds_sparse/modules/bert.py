"""BertSparseSelfAttention: BERT's self-attention layer with a sparse core."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..ops import check_inputs
from ..ops.softmax import as_additive, of_first_head
from ..sparsity import FixedSparsityConfig, SparsityConfig
from .self_attention import SparseSelfAttention, as_key_padding_mask
from .structured_attention import check_structure, of_keys_or_pairs


class BertSparseSelfAttention(nn.Module):
    """Drop-in for a BERT layer's `attention.self`. Source: DeepSpeed's module of this name.

    Args:
        config: has `hidden_size` and `num_attention_heads`, and may have `attention_probs_dropout_prob`, with which
            attention probabilities are dropped in training. A new module is in training: call `model.eval()` after
            putting it into a model that is in evaluation.
        sparsity_config: the structure; by default `FixedSparsityConfig` for the model's number of heads.
        max_seq_length: tokens that the layout is built for; longer sequences get a layout of their own.
        projections_of: a dense layer whose `query`, `key` and `value` are used, the same modules, instead of new ones,
            and whose mode, training or evaluation, is taken.

    Raises:
        TypeError: sparsity_config is no structure.
        ValueError: hidden_size is not a multiple of the number of heads, or the structure is for another number of
            heads; what `SparseSelfAttention` refuses.

    Examples:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> import ds_sparse
        >>> config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
        >>> structure = ds_sparse.BSLongformerSparsityConfig(num_heads=4, block=16)
        >>> layer = ds_sparse.BertSparseSelfAttention(config, structure, max_seq_length=128)
        >>> layer(torch.randn(2, 100, 32)).shape
        torch.Size([2, 100, 32])
    """

    query: nn.Module
    key: nn.Module
    value: nn.Module

    def __init__(
        self,
        config: Any,
        sparsity_config: SparsityConfig | None = None,
        max_seq_length: int = 2048,
        *,
        projections_of: nn.Module | None = None,
    ):
        super().__init__()
        heads = config.num_attention_heads
        if config.hidden_size % heads:
            raise ValueError(
                f"The hidden size ({config.hidden_size}) is not a multiple of the number of attention heads ({heads})"
            )
        if sparsity_config is None:
            sparsity_config = FixedSparsityConfig(num_heads=heads)
        check_structure(sparsity_config)
        check_num_heads(sparsity_config, heads)
        self.num_attention_heads = heads
        self.attention_head_size = config.hidden_size // heads
        self.all_head_size = config.hidden_size
        for name in ("query", "key", "value"):
            new = projections_of is None
            projection = nn.Linear(config.hidden_size, self.all_head_size) if new else getattr(projections_of, name)
            self.add_module(name, projection)
        self.sparse_self_attention = SparseSelfAttention(
            sparsity_config,
            max_seq_length=max_seq_length,
            attention_dropout=getattr(config, "attention_probs_dropout_prob", 0.0),
            head_dim=self.attention_head_size,
            learned_like=projections_of,
        )
        if projections_of is not None:
            self.train(projections_of.training)

    def with_projections_of(self, dense: nn.Module) -> BertSparseSelfAttention:
        """A copy that shares this layer's layout, and uses `query`, `key`, `value` and the mode of another layer."""
        shared = {id(getattr(self, name)): getattr(dense, name) for name in ("query", "key", "value")}
        made = copy.deepcopy(self, shared).train(dense.training)
        made.sparse_self_attention.add_learned(self.num_attention_heads, self.attention_head_size, dense)
        return made

    def transpose_for_scores(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, hidden) -> (B, H, T, D), a view."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *more: Any,
        **named: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Self-attention of hidden states (B, T, hidden), any T.

        With these two arguments it is DeepSpeed's layer and returns (B, T, hidden). With more, which is how
        Transformers calls `attention.self`, it is a layer of theirs: a bool mask keeps where True, and ((B, T,
        hidden), None) is returned.

        Args:
            hidden_states: (B, T, hidden).
            attention_mask: added to the scores: (B, T) or (B, 1, 1, T) for each key, (B, 1, T, T) for each pair; 0
                keeps, -10000 or -inf drops. Bool ones are added as numbers, with a warning, except in a call of
                Transformers. Of one (B, H, T) the first head's counts for all, as in DeepSpeed, with a warning.
            more, named: what else Transformers hands over, by its names of version 5 or in the order of version 4.

        Returns:
            (B, T, hidden); where Transformers calls it, that and None.

        Raises:
            TypeError: operands that are no tensors.
            ValueError: a mask for another number of tokens; a call for what this layer does not compute:
                cross-attention, cached keys, a head mask, causal or packed attention, the attention probabilities.
        """
        check_inputs(hidden_states=hidden_states, attention_mask=attention_mask)
        from_transformers = bool(more or named)
        if from_transformers:
            _refuse_more_than_self_attention(more, named)
        elif attention_mask is not None and not attention_mask.is_floating_point():
            attention_mask = as_additive("attention_mask", attention_mask, hidden_states.dtype)
        if attention_mask is not None and attention_mask.dim() == 3:
            attention_mask = of_first_head(attention_mask, self.num_attention_heads)
        tokens = hidden_states.shape[1]
        if attention_mask is not None and attention_mask.shape[-1] != tokens:
            raise ValueError(
                f"attention_mask is for {attention_mask.shape[-1]} tokens and hidden_states has {tokens}. Where "
                "pad_to_block_size has padded the tokens, give the mask that it returned; or pad neither: this layer "
                "takes any length."
            )
        query, key, value = (
            self.transpose_for_scores(projection(hidden_states)) for projection in (self.query, self.key, self.value)
        )
        context = self.sparse_self_attention.attend(
            query, key, value, **of_keys_or_pairs(as_key_padding_mask(attention_mask))
        )
        context = context.transpose(1, 2).flatten(2)
        return (context, None) if from_transformers else context


def check_num_heads(structure: SparsityConfig, heads: int) -> None:
    """Raises ValueError unless the structure is for as many heads as the model has."""
    if structure.num_heads != heads:
        raise ValueError(
            f"The model has {heads} attention heads and the sparsity config num_heads={structure.num_heads}; build it "
            f"with num_heads={heads}."
        )


VARIANTS = (
    "output_attentions", "sliding_window", "s_aux", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k",
    "seq_idx", "indices",
)  # fmt: skip
"""Options of Transformers beyond self-attention under a mask, by its names; not computed here."""

_NOT_COMPUTED = (
    *VARIANTS, "softcap", "head_mask", "encoder_hidden_states", "past_key_value", "past_key_values", "is_causal",
)  # fmt: skip


def _refuse_more_than_self_attention(more: tuple[Any, ...], named: dict[str, Any]) -> None:
    asked = [
        name for name, value in named.items() if name in _NOT_COMPUTED and value is not None and value is not False
    ]
    asked += [f"argument {place}" for place, value in enumerate(more, 3) if value is not None and value is not False]
    if asked:
        raise ValueError(
            f"BertSparseSelfAttention is called with {', '.join(asked)}; it computes bidirectional self-attention and "
            "its output alone. Leave these out, or keep this layer dense."
        )
