"""The attention function and the mask function of the name, registered with Transformers.

With the first alone Transformers would drop the padding mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...modules.bert import VARIANTS
from ...modules.structured_attention import of_keys_or_pairs
from ..pretrained import NAME
from . import causal
from .binding import attached_to, local_attention_of, which
from .mask_windows import window_of_mask
from .trial import Masks, NotBidirectional, Refused


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: sparse self-attention of an encoder's or a decoder's layer.

    Args:
        module: the layer; its `config.sparse_attention` says the structure.
        query: (B, H, T, D), any strides, any T; key, value: alike, or with fewer heads that divide H. Of a causal layer
            they may have cached keys in front.
        attention_mask: (B, T) bool, True keeps; or (B, 1 or H, 1 or T, T), where bool keeps and a float is added; a
            float that requires a gradient gets one. Of a causal layer what `key_padding_mask` gives.
        scaling: factor of the scores, 1 / sqrt(D) by default.
        dropout: probability with which attention probabilities are dropped.
        position_bias: (1 or B, H, T, T), T5's relative positions, added after scaling; it gets a gradient.
        sliding_window, s_aux: of a causal layer, its own window and its sinks, a logit a head.

    Returns:
        (B, T, H, D), contiguous, and None: there is no matrix of attention probabilities.

    Raises:
        ValueError: a call for what is not computed (the probabilities, cross-attention, packed documents, ...), no
            structure, a mask of another kind.
        SparseAttentionConfigError: the structure in the config is wrong.
    """
    if causal.is_causal(module) and is_causal is not False:
        _refuse_what_is_asked(module, {**more, "position_bias": position_bias})
        output = causal.attend(
            module, query, key, value, attention_mask, scale=scaling, dropout_p=dropout,
            sliding_window=sliding_window, sinks=s_aux,
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None
    local = local_attention_of(module)
    own_window = local is not None and sliding_window == local.window + 1
    _refuse_what_is_asked(module, {**more, "sliding_window": None if own_window else sliding_window, "s_aux": s_aux})
    _refuse_what_is_no_encoder(module, query, key, attention_mask, is_causal)
    tried = Masks.of(module.config)
    if tried is not None:
        tried.check(which(module), attention_mask, local, sliding_window)
    rpe = position_bias
    if attention_mask is not None and attention_mask.requires_grad:
        rpe = attention_mask if rpe is None else attention_mask + rpe
        attention_mask = None
    sparse = attached_to(module).attention
    masks: dict[str, Any] = {**of_keys_or_pairs(attention_mask), "rpe": None if rpe is None else rpe.to(query.dtype)}
    output = sparse(query, key, value, scale=scaling, dropout_p=dropout, **masks)
    return output.transpose(1, 2).contiguous(), None


def _refuse_what_is_asked(module: nn.Module, more: Mapping[str, Any]) -> None:
    asked = [name for name in VARIANTS if more.get(name) is not None and more[name] is not False]
    asked += ["output_attentions"] if getattr(module.config, "output_attentions", False) else []
    if asked:
        raise Refused(
            f"{which(module)} asks the attention for {', '.join(asked)}, which {NAME} does not compute; leave "
            'that out, or use attn_implementation="sdpa" or "eager".'
        )


def _refuse_what_is_no_encoder(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    asks_causal: bool | None,
) -> None:
    if asks_causal or query.shape[2] != key.shape[2]:
        raise NotBidirectional(
            f"{which(module)} is {'causal' if asks_causal else 'cross-attention, or has cached keys'}, and {NAME} "
            'serves the self-attention of encoders and decoders; use attn_implementation="sdpa".'
        )
    is_causal_mask = attention_mask is not None and attention_mask.dtype == causal.MASK_DTYPE
    if attention_mask is not None and (is_causal_mask or (attention_mask.is_meta and not query.is_meta)):
        raise NotBidirectional(
            f"{which(module)} is bidirectional and given a mask that is causal, packed, with an overlay or for "
            f'cross-attention, which {NAME} does not compute there; use attn_implementation="sdpa".'
        )


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
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """The mask function: the padding mask (B, T), True keeps, as it is, so that nothing of size T x T exists; of causal
    self-attention, in windows or not, `causal.padding_mask`.

    The padding mask alone is for all masks that bidirectional self-attention has, also inside a window, which a local
    layer knows itself (a trial has made sure). For another mask, a tensor without data (device "meta"): some models
    make masks that none of their layers takes, and `attention` refuses it.
    """
    if q_length is None:  # the first 5.x releases give the positions
        q_length, q_offset = len(cache_position), cache_position[0]
    if attention_mask is None or attention_mask.dim() == 2:
        skips = allow_is_causal_skip and allow_is_bidirectional_skip is None
        if causal.is_plain(mask_function, local_size, skips, kv_offset):
            return causal.padding_mask(batch_size, q_length, kv_offset, q_offset, attention_mask, device)
        window = window_of_mask(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, use_vmap)
        if window is not None and q_length == kv_length:
            tried = Masks.of(config)
            return attention_mask if tried is None else tried.note(attention_mask, window, (batch_size, kv_length))
    return torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, key_padding_mask)
