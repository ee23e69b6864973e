"""Layers of decoders: their masks, caches of keys, windows and sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention
from ...notices import say_notices
from ..pretrained import NAME
from .binding import attached_to, which
from .mask_windows import hides_nothing, is_seen_to_hide_nothing
from .tensor_parallel import attention_of
from .trial import Refused

MASK_DTYPE = torch.uint8
"""That of a mask (B, S) of a causal layer, 1 keeps: so it tells itself from the bool one of a bidirectional layer."""


_by_call: WeakSet[nn.Module] = WeakSet()
"""The modules that do not say so themselves, and were seen to ask for causal attention."""


def is_causal(layer: nn.Module) -> bool:
    """Whether a layer's tokens see none after them, as its model says."""
    if layer in _by_call:
        return True
    config: Any = getattr(layer, "config", None)
    return bool(getattr(layer, "is_causal", False)) and getattr(config, "is_causal", True)


def note_causal(layer: nn.Module) -> None:
    """Notes a layer that asks for causal attention when it is called, as those of CLIP's text model do."""
    if not is_causal(layer):
        _by_call.add(layer)


def window_of_causal_mask(
    mask_function: Any, local_size: int | None, allow_is_causal_skip: bool | None, kv_offset: int
) -> float | None:
    """The tokens before it that a query sees under a mask that is causal and perhaps in windows; None for another."""
    if local_size is None:
        return math.inf if mask_function is causal_mask_function and kv_offset == 0 else None
    return local_size - 1 if allow_is_causal_skip else None  # it is off where anything is added


def padding_mask(
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


def refuse_other_masks(module: nn.Module, mask: torch.Tensor | None) -> None:
    """Raises Refused for a mask of a causal layer that is not of `padding_mask`. One on the device "meta" is what
    `key_padding_mask` gives for a mask of the model that is more than causality, padding and a window."""
    if mask is None or (mask.dim() == 2 and mask.dtype == MASK_DTYPE):
        return
    if mask.dim() != 2 and not mask.is_meta:
        raise Refused(
            f"{which(module)} is causal and given a mask of pairs of tokens, {tuple(mask.shape)}; {NAME} takes (batch, "
            "tokens) there, 1 keeps, and causality from the model. Give that as attention_mask, or none where nothing "
            "is padding."
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


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout_p: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a causal layer, (B, H, T, D). The queries are the last of the keys: those before are cached."""
    keys = key.shape[2] if mask is None else mask.shape[1]
    offset = keys - query.shape[2]
    if offset < 0 or keys > key.shape[2]:
        raise Refused(
            f"{which(module)} has {query.shape[2]} queries, {key.shape[2]} keys and a mask of {keys}; {NAME} wants the "
            "keys of all queries, and a mask of all keys."
        )
    padding = None if mask is None or is_seen_to_hide_nothing(mask) else mask.bool()
    return attention_of(module, query)(
        query, key[:, :, :keys], value[:, :, :keys], scale=scale, dropout_p=dropout_p, key_padding_mask=padding,
        sinks=sinks, causal=True, query_offset=offset or None,
    )  # fmt: skip


def say_what_is_cut(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    """Prints what becomes of the structure of a decoder's layers, once a process."""
    causal = [layer for layer in layers.values() if is_causal(layer)]
    attentions = {id(x): x for x in (attached_to(layer).attention for layer in causal)}
    structured = [x for x in attentions.values() if isinstance(x, StructuredAttention)]
    name = type(model).__name__
    notices = [
        f"{name} is causal: {type(x.sparsity_config).__name__} has blocks above the diagonal, which are left out, and "
        "inside blocks no token sees one after it."
        for x in structured
        if x.layout.triu(1).any()
    ]
    if all(isinstance(x, LocalAttention) for x in attentions.values()) and attentions:
        notices.append(f"All attention layers of {name} have a sliding window of their own; none uses the structure.")
    say_notices(notices)
