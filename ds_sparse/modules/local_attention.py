"""LocalAttention: the window of a model's own local layers, called as `StructuredAttention` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..ops import window_attention


def given_options(options: Mapping[str, Any]) -> str:
    """The names of options that ask for something, as dropout of 0 does not."""
    return ", ".join(name for name, x in options.items() if x is not None and not (name == "dropout_p" and x == 0))


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
        causal: bool = False,
        key_padding_mask: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        query_offset: int | None = None,
        cu_seqlens: torch.Tensor | None = None,
        softcap: float = 0.0,
        **others: Any,
    ) -> torch.Tensor:
        if refused := given_options(others):
            raise ValueError(
                f"a local layer with a window of {self.window} tokens is given {refused}, which window attention does "
                "not compute; leave it out."
            )
        return window_attention(
            query, key, value, self.window, causal, key_padding_mask, scale=scale,
            cu_seqlens=cu_seqlens, sinks=sinks, query_offset=query_offset, softcap=softcap,
        )  # fmt: skip
