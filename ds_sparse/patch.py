"""Adapting models and batches to block-sparse attention."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


class SparseAttentionUtils:
    """Static helpers around a sparse model. Source: DeepSpeed's class of this name."""

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: torch.nn.Module,
    ) -> tuple[int, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Pads the inputs of an encoder on the right, to a multiple of the block.

        Args:
            block_size: tokens on a block's side.
            input_ids: (B, T), or None when `inputs_embeds` is given; filled with `pad_token_id`.
            attention_mask: (..., T); bool and integer masks keep where not zero and are filled with 0, float masks are
                added to the scores and are filled with the dtype's lowest number.
            token_type_ids: (B, T), filled with 0.
            position_ids: (B, T), filled with `pad_token_id`.
            inputs_embeds: (B, T, hidden); filled with `model_embeddings` of `pad_token_id`.

        Returns:
            The number of tokens added, then the five tensors in this order; None stays None.

        Raises:
            ValueError: neither `input_ids` nor `inputs_embeds` is given.
        """
        if input_ids is None and inputs_embeds is None:
            raise ValueError("input_ids and inputs_embeds are both None; give one of them.")
        batch, seq_len = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        pad_len = -seq_len % block_size
        if pad_len:
            input_ids = _pad(input_ids, pad_len, pad_token_id)
            position_ids = _pad(position_ids, pad_len, pad_token_id)
            token_type_ids = _pad(token_type_ids, pad_len, 0)
            if attention_mask is not None:
                additive = attention_mask.is_floating_point()
                attention_mask = _pad(attention_mask, pad_len, torch.finfo(attention_mask.dtype).min if additive else 0)
            if inputs_embeds is not None:
                padding = torch.full((batch, pad_len), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
                inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], dim=-2)
        return pad_len, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Drops the last `pad_len` tokens of (B, T, ...)."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]


def _pad(x: torch.Tensor | None, pad_len: int, value: float) -> torch.Tensor | None:
    return None if x is None else pad(x, (0, pad_len), value=value)
