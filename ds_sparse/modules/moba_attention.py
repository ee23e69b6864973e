"""Attention on the blocks that queries choose in a call, called as `StructuredAttention` is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..index import BlockIndex
from ..ops import block_sparse_attention, select_blocks, selected_attention
from ..ops.operands import check_bias
from ..sparsity import MobaSparsityConfig

PADDING_BELOW = -1000.0
"""Where a float mask is below, models mean padding: they write -10000, the dtype's least number or -inf."""

_NOT_COMPUTED = ("rpe", "distance_bias", "attn_mask")


def moba_attention(
    structure: MobaSparsityConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
    **more: Any,
) -> Tensor:
    """Attention of each query to the blocks of keys that it chooses by their means.

    Args:
        structure: how many blocks, and who chooses.
        others: as of `StructuredAttention`. A float key_padding_mask keeps a key or, below -1000, drops it: what is
            not there cannot count in a mean.

    Raises:
        ValueError: an option that is not computed here.
    """
    refused = [
        (name, "leave it out, or take a structure with a layout")
        for name in _NOT_COMPUTED
        if more.get(name) is not None
    ]
    if document_layout != "own":
        refused.append((f"document_layout={document_layout!r}", "leave it out"))
    if structure.selection == "block":
        rows = {"query_offset, as of cached keys": query_offset, "cu_seqlens of packed documents": cu_seqlens}
        refused += [(name, 'take selection "token"') for name, x in rows.items() if x is not None]
    elif dropout_p:
        refused.append((f"dropout of attention ({dropout_p})", 'set it to 0, or take selection "block"'))
    if refused:
        what, instead = refused[0]
        raise ValueError(
            f'{what}: {type(structure).__name__} with selection "{structure.selection}" does not compute it; {instead}.'
        )
    if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
        check_bias("key_padding_mask", key_padding_mask, query, (query.shape[0], key.shape[2]), (2,))
        key_padding_mask = key_padding_mask.detach() > PADDING_BELOW
    groups = key.shape[-3] if structure.chosen_by_group else None
    how: dict[str, Any] = {"causal": causal, "key_padding_mask": key_padding_mask}
    forced: dict[str, Any] = {
        "first": structure.num_first_blocks,
        "local": structure.num_sliding_window_blocks // 2 + 1,
    }
    if structure.selection == "block":
        asking = query.detach()
        if key_padding_mask is not None:  # queries of padding would count in the mean of their block
            asking = asking.masked_fill(~key_padding_mask[:, None, :, None], 0)
        chosen = select_blocks(
            asking, key, structure.block, structure.num_chosen_blocks, groups=groups, query_block=structure.block,
            **forced, **how,
        )  # fmt: skip
        index = BlockIndex.from_blocks(chosen, structure.block)
        return block_sparse_attention(
            query, key, value, index.causal() if causal else index, scale=scale, sinks=sinks, dropout_p=dropout_p, **how
        )
    how["query_offset"] = 0 if query_offset is None else query_offset
    how["cu_seqlens"] = cu_seqlens
    chosen = select_blocks(query, key, structure.block, structure.num_chosen_blocks, groups=groups, **forced, **how)
    return selected_attention(query, key, value, chosen, structure.block, scale=scale, sinks=sinks, **how)
