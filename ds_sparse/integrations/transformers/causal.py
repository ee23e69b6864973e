"""Layers of decoders: their masks, caches of keys, windows and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention
from ...notices import say_notices
from ..pretrained import NAME
from .binding import attached_to, local_attention_of, which
from .trial import Refused

MASK_DTYPE = torch.uint8
"""That of a mask (B, S) of a causal layer, 1 keeps: so it tells itself from the bool one of a bidirectional layer."""


def is_causal(layer: nn.Module) -> bool:
    """Whether a layer's tokens see none after them, as its model says."""
    return bool(getattr(layer, "is_causal", False)) and getattr(layer.config, "is_causal", True)


def is_plain(mask_function: Any, local_size: int | None, allow_is_causal_skip: bool, kv_offset: int) -> bool:
    """Whether a mask that Transformers wants is causal, and in windows where `local_size` says so, and nothing else."""
    if local_size is None:
        return mask_function is causal_mask_function and kv_offset == 0
    return allow_is_causal_skip  # it is off where anything is added


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
    if attention_mask is None:
        return torch.ones(1, 1, dtype=MASK_DTYPE, device=device).expand(batch_size, keys)
    kept = attention_mask[:, kv_offset : kv_offset + keys]
    return pad(kept, (0, keys - kept.shape[1])).to(MASK_DTYPE)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None,
    dropout_p: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a causal layer, (B, H, T, D). The queries are the last of the keys: those before are cached.

    Raises:
        Refused: a mask that is not of `padding_mask`; a window that the layer is not known to have.
    """
    if mask is not None and (mask.dim() != 2 or mask.dtype != MASK_DTYPE):
        raise Refused(
            f"{which(module)} is causal and given a mask of its own, of packed documents, of a static cache of windows "
            f"or of another kind, and {NAME} takes (batch, tokens) there, 1 keeps. Give that as attention_mask, under "
            "torch.compile with use_cache=False too, where Transformers cannot tell packed documents; generate with "
            "the default cache."
        )
    local = local_attention_of(module)
    if (None if local is None else local.window + 1) != sliding_window:
        raise Refused(
            f"{which(module)} asks the attention for sliding_window={sliding_window}, which {NAME} did not find in it; "
            "train it dense."
        )
    keys = key.shape[2] if mask is None else mask.shape[1]
    offset = keys - query.shape[2]
    if offset < 0 or keys > key.shape[2]:
        raise Refused(
            f"{which(module)} has {query.shape[2]} queries, {key.shape[2]} keys and a mask of {keys}; {NAME} wants the "
            "keys of all queries, and a mask of all keys."
        )
    padding = None if mask is None or mask.stride(1) == 0 else mask.bool()
    return attached_to(module).attention(
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
    if attentions and all(isinstance(x, LocalAttention) for x in attentions.values()):
        notices.append(f"All attention layers of {name} have a sliding window of their own; none uses the structure.")
    say_notices(notices)
