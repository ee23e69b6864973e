"""LocalAttention: the window of a model's own local layers, called as `StructuredAttention` is."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import window_attention


class LocalAttention(NamedTuple):
    """Attention of each token to those at most `window` tokens away.

    Call:
        As `StructuredAttention`, without `rpe`, `distance_bias`, `attn_mask` and dropout; `query_offset` is an integer.

    Raises:
        ValueError: in the call, one of these.
    """

    window: int

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        dropout_p: float = 0.0,
        rpe: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        query_offset: int | None = None,
        causal: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = {"rpe": rpe is not None, "distance_bias": distance_bias is not None}
        given |= {"attn_mask": attn_mask is not None, "dropout_p": dropout_p != 0}
        refused = [name for name, is_given in given.items() if is_given]
        if refused:
            raise ValueError(
                f"a local layer with a window of {self.window} tokens is given {', '.join(refused)}, which window "
                "attention does not compute; leave it out."
            )
        return window_attention(
            query, key, value, self.window, causal, key_padding_mask, scale=scale, cu_seqlens=cu_seqlens, sinks=sinks,
            query_offset=query_offset,
        )  # fmt: skip
