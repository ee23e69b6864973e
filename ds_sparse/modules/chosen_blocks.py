"""ChosenBlocks: the blocks that a model's own indexer chooses, called as `StructuredAttention` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops import selected_attention
from .choices import note
from .local_attention import given_options


@dataclass(frozen=True)
class ChosenBlocks:
    """Attention of each token to the blocks of keys that an indexer has chosen for it.

    Padding that sees no key gets the mean of all values, as under the masks of Transformers, where all its scores are
    the lowest number: indexers of later layers score what becomes of it, and would choose other blocks.

    Call:
        As `StructuredAttention`, with `block_indices` (B, Hkv or H or 1, T, k), and without `rpe`, `distance_bias`,
        `attn_mask`, `cu_seqlens` and dropout; `query_offset` is an integer.

    Raises:
        ValueError: in the call, one of these, or what `selected_attention` does not take.
    """

    block: int

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        block_indices: torch.Tensor,
        scale: float | None = None,
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        query_offset: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        if refused := given_options(others):
            raise ValueError(
                f"a layer whose indexer chooses blocks of {self.block} keys is given {refused}, which "
                "selected_attention does not compute there; leave it out, and set attention dropout to 0."
            )
        options: dict[str, Any] = {"causal": causal, "scale": scale, "sinks": sinks, "query_offset": query_offset or 0}
        operands = query, key, value, block_indices, self.block
        note(
            block_indices, self.block, query, key, causal=causal, scale=scale, query_offset=query_offset or 0,
            key_padding_mask=key_padding_mask,
        )  # fmt: skip
        if key_padding_mask is None or query.shape[2] == 1:
            return selected_attention(*operands, key_padding_mask=key_padding_mask, **options)
        output, lse = selected_attention(*operands, key_padding_mask=key_padding_mask, return_lse=True, **options)
        mean = value.mean(2, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], 1)
        return torch.where(lse.isneginf().unsqueeze(-1), mean, output)
