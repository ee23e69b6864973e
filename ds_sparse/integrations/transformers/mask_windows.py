"""What a mask function of Transformers lets a query see: all keys, or a window of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function

from ...layout import on_cpu

ALL = math.inf
"""The window of a mask that hides nothing."""


def window_of_mask(
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None,
    allow_is_causal_skip: bool | None,
    allow_is_bidirectional_skip: bool | None,
    use_vmap: bool,
) -> float | None:
    """The tokens that a query sees on either side; None for a mask of another kind: causal, packed, with an overlay.

    Args:
        mask_function: from (batch, head, query, key) to whether the query sees the key.
        local_size, allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap: what Transformers tells the makers of
            masks besides; None where it does not.
    """
    if allow_is_bidirectional_skip is False:  # there is an overlay, or the mask is to be put together with another
        return None
    if mask_function is bidirectional_mask_function:
        return ALL
    if allow_is_bidirectional_skip and allow_is_causal_skip is False and local_size is not None:
        return local_size
    if not use_vmap or torch.compiler.is_compiling() or _holds_tensors(mask_function):
        return None
    # A decoder made bidirectional (Gemma3's use_bidirectional_attention) has its causal mask united with another.
    return _tried(mask_function, 2 * (local_size or 0) + 64)


@on_cpu()
def _tried(mask_function: Callable[..., torch.Tensor], tokens: int) -> float | None:
    """The window of a mask function that knows nothing but places, by what some queries see."""
    zero, key = torch.zeros((), dtype=torch.long), torch.arange(tokens)[None]
    query = torch.tensor([0, 1, tokens // 3, tokens // 2, tokens - 2, tokens - 1])[:, None]
    seen = mask_function(zero, zero, query, key).expand(len(query), tokens)
    distance = (query - key).abs()
    window = int(distance[seen].max()) if bool(seen.any()) else 0
    if not seen.equal(distance <= window):
        return None
    return ALL if bool(seen.all()) else window


def _holds_tensors(value: Any) -> bool:
    """Whether a function depends on data: it, or a function that it calls, holds a tensor."""
    if isinstance(value, tuple | list):
        return any(map(_holds_tensors, value))
    cells = getattr(value, "__closure__", None) or ()
    return isinstance(value, torch.Tensor) or any(_holds_tensors(cell.cell_contents) for cell in cells)


def hides_nothing(rows: int, tokens: int, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A mask (rows, tokens) of ones, which tells by its stride that it hides nothing."""
    return torch.ones(1, 1, dtype=dtype, device=device).expand(rows, tokens)


def is_seen_to_hide_nothing(mask: torch.Tensor) -> bool:
    """Whether a mask (rows, tokens) is of `hides_nothing`, without reading it."""
    return mask.stride(1) == 0
