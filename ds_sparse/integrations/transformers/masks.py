"""Masks of Transformers: what one lets a query see, all keys or a window of them, and what layers get in its place.

The mask function is registered beside the attention function: without it Transformers would drop the padding mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ...layout import on_cpu
from ...modules.local_attention import LocalAttention
from ..transformers_family import NAME
from .binding import Refused, Window, which

ALL = math.inf
"""The window of a mask that hides nothing."""

MASK_DTYPE = torch.uint8
"""Dtype of a mask (B, S) of a causal layer, 1 keeps: so it differs from the bool one of a bidirectional layer."""


def key_padding_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable,
    q_length: int | None = None,
    cache_position: Any = None,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """The mask function: the padding mask (B, T), True keeps, as it is, so that nothing of size T x T exists; of causal
    self-attention `_padding_mask`.

    That is for all masks that self-attention has, also inside a window, which a local layer knows itself (a trial has
    made sure). For another mask, a tensor without data (device "meta"): some models make masks that none of their
    layers takes, and `attention` refuses it.
    """
    if q_length is None:  # the first 5.x releases give the positions
        q_length, q_offset = len(cache_position), cache_position[0]
    window: float | None = None  # a query of a causal layer sees so many tokens before it, of another on each side
    if attention_mask is None or attention_mask.dim() == 2:
        if local_size is not None and allow_is_causal_skip:  # it is off where anything is added to causality
            window = local_size - 1
        elif local_size is None and mask_function is causal_mask_function and kv_offset == 0:
            window = ALL
        if window is not None:
            attention_mask = _padding_mask(batch_size, q_length, kv_offset, q_offset, attention_mask, device)
        elif q_length == kv_length:
            skips = allow_is_causal_skip, allow_is_bidirectional_skip
            window = _window_of_mask(mask_function, local_size, *skips, use_vmap)
    if window is None:
        return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    tried = Masks.of(config)
    return attention_mask if tried is None else tried.note(attention_mask, window, (batch_size, kv_length))


def _padding_mask(
    batch_size: int,
    q_length: int,
    kv_offset: int,
    q_offset: int | torch.Tensor,
    attention_mask: torch.Tensor | None,
    device: torch.device | None,
) -> torch.Tensor:
    """The mask of a causal layer: uint8 (B, S), 1 keeps, S the keys that there are, cached ones and the queries' own.
    Behind them a static cache has room, which the layer's keys have too."""
    if isinstance(q_offset, torch.Tensor):
        if torch.compiler.is_compiling():
            raise Refused(
                f"the model is given a static cache under torch.compile, where {NAME} cannot read how many keys are in "
                "it; use the default cache, or generate(..., disable_compile=True)."
            )
        q_offset = int(q_offset)
    keys = q_offset + q_length - kv_offset
    if attention_mask is None or is_seen_to_hide_nothing(attention_mask):
        return hides_nothing(batch_size, keys, MASK_DTYPE, device)
    kept = attention_mask[:, kv_offset : kv_offset + keys]
    return pad(kept, (0, keys - kept.shape[1])).to(MASK_DTYPE)


def _window_of_mask(
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
    """Tells whether a function depends on data: it, or one that it calls, holds a tensor."""
    if isinstance(value, tuple | list):
        return any(map(_holds_tensors, value))
    cells = getattr(value, "__closure__", None) or ()
    return isinstance(value, torch.Tensor) or any(_holds_tensors(cell.cell_contents) for cell in cells)


def hides_nothing(rows: int, tokens: int, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A mask (rows, tokens) of ones, which tells by its stride that it hides nothing."""
    return torch.ones(1, 1, dtype=dtype, device=device).expand(rows, tokens)


def is_seen_to_hide_nothing(mask: torch.Tensor) -> bool:
    """Tells whether a mask (rows, tokens) is of `hides_nothing`, without reading it."""
    return mask.stride(1) == 0


def refuse_other_masks(module: nn.Module, mask: torch.Tensor | None) -> None:
    """Raises Refused for a mask of a causal layer that is not of `key_padding_mask`. One on the device "meta" is what
    `key_padding_mask` gives for a mask of the model that is more than causality, padding and a window."""
    if mask is None or (mask.dim() == 2 and mask.dtype == MASK_DTYPE):
        return
    if mask.dim() != 2 and not mask.is_meta:
        raise Refused(
            f"{which(module)} is causal and given a mask of pairs of tokens, {tuple(mask.shape)}; {NAME} takes (batch, "
            "tokens) there, 1 keeps, and causality from the model. Give that as attention_mask, or none where nothing "
            "is padding. Such a mask, as of a prefix, is taken in an attention module of your own, by "
            "ds_sparse.block_sparse_attention(query, key, value, layout, attn_mask=mask)."
        )
    if mask.dim() != 2 and mask.shape[-1] != mask.shape[-2]:
        raise Refused(
            f"{which(module)} is causal and has {mask.shape[-2]} queries and room for {mask.shape[-1]} keys, as in a "
            "static cache of layers with a window, or in the cache that a sliding_window in the config makes for "
            f"layers without one, which {NAME} does not take; generate with the default cache, without "
            "cache_implementation; where no layer reads config.sliding_window, set it to None or above all lengths."
        )
    raise Refused(
        f"{which(module)} is causal, and its model makes a mask of more than causality and padding for it, as for "
        f"packed documents that position_ids tell of under torch.compile, which {NAME} does not take there. Give an "
        "attention_mask (batch, tokens), of ones where nothing is padding, and use_cache=False: then a row is one "
        "sequence. To keep documents apart, call without torch.compile."
    )


_MASKS = "_ds_sparse_masks"
"""The attribute of a config in a trial where its masks are."""


class Masks:
    """The masks that were made in a trial, with the window of each. The config of the model that is tried holds it, so
    that no other thread notices.

    Args:
        config: of the model.
        windows: gets those of the layers, by name.
    """

    def __init__(self, config: Any, windows: dict[str, Window]) -> None:
        self._made: dict[int, tuple[torch.Tensor, float]] = {}
        self._windows = windows
        setattr(config, _MASKS, self)

    @classmethod
    def of(cls, config: Any) -> Masks | None:
        """Masks of the trial that a config is in; None where it is in none."""
        return getattr(config, _MASKS, None)

    def note(self, mask: torch.Tensor | None, window: float, shape: tuple[int, int]) -> torch.Tensor:
        """A mask of its own for the layers of the trial, by which `check` knows the window."""
        own = torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone()
        self._made[id(own)] = (own, window)
        return own

    def window(self, name: str, layer: str, mask: torch.Tensor | None, asked: int | None, causal: bool) -> Window:
        """The window of a layer, that of its mask, as in dense attention. Raises Refused where the layer asks for
        another one."""
        any_window = any(window != ALL for _, window in self._made.values())
        unknown = math.nan if any_window and mask is not None else ALL
        by_mask = self._made[id(mask)][1] if id(mask) in self._made else unknown
        # Where a bidirectional mask sees as many tokens on a side, Transformers gives FlashAttention one less.
        by_layer = [ALL] if asked is None else [asked - 1] if causal else [asked - 1, asked]
        if math.isnan(by_mask) or (asked is not None and by_mask not in by_layer):
            raise Refused(
                f"{layer} is local, and its mask and its sliding_window are not the same window ({by_mask} and "
                f"{by_layer[0]} tokens on a side; inf: all, nan: a mask made anew by the model)."
            )
        window = Window(asked, None if by_mask == ALL else LocalAttention(int(by_mask)))
        if self._windows.setdefault(name, window) != window:
            raise Refused(f"{layer} is called more than once in a forward, with other windows each time.")
        return window


AttentionMaskInterface.register(NAME, key_padding_mask)
