"""Attention on the blocks that queries choose in a call, called as `StructuredAttention` is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..index import BlockIndex
from ..index.transforms import refuse_samples
from ..layout import is_distributed
from ..ops import block_sparse_attention, select_blocks, selected_attention
from ..ops.operands import check_bias
from ..sparsity import ChosenSparsityConfig, IndexerSparsityConfig, MobaSparsityConfig, NativeSparsityConfig
from .choices import note
from .indexer_attention import IndexerAttention
from .native_sparse_attention import NativeSparseAttention

PADDING_BELOW = -1000.0
"""Where a float mask is below, models mean padding: they write -10000, the dtype's least number or -inf."""

LEARNED = "sparse_attention"
"""The name in a layer of the module that has the parameters of its structure."""

LearnedAttention = NativeSparseAttention | IndexerAttention

_NOT_COMPUTED = ("rpe", "distance_bias", "attn_mask")


def learned_attention(
    structure: Any, num_key_heads: int, head_dim: int, *, causal: bool = False, like: nn.Module | None = None
) -> LearnedAttention:
    """Makes the module with the parameters that a structure adds to a layer.

    Args:
        causal: whether the layer is, whatever the structure says.
        like: a module whose device, dtype and mode it takes.

    Raises:
        ValueError: numbers that do not fit; a structure for causal layers alone, and one that is not; parameters of
            `like` of which each rank has a part.
    """
    if like is None:
        return _learned(structure, num_key_heads, head_dim, causal)
    parameter: Any = next(like.parameters())
    if hasattr(parameter, "ds_id") or is_distributed(parameter):  # ds_id is what ZeRO 3 gives its parameters
        raise ValueError(
            f"The layer has parameters of which each rank has a part, and {type(structure).__name__} adds whole ones; "
            "make the model sparse before they are dealt to ranks, outside of deepspeed.zero.Init."
        )
    with parameter.device:
        made = _learned(structure, num_key_heads, head_dim, causal)
    # A quantized layer has no dtype to compute in.
    dtype = next((p.dtype for p in like.parameters() if p.is_floating_point()), torch.get_default_dtype())
    return made.to(dtype).train(like.training)


def _learned(structure: Any, num_key_heads: int, head_dim: int, causal: bool) -> LearnedAttention:
    sizes = (structure.num_heads, num_key_heads, head_dim)
    shared: dict[str, Any] = {
        "block": structure.block,
        "k": structure.num_chosen_blocks,
        "first": structure.num_first_blocks,
        "local": _local(structure),
    }
    if isinstance(structure, IndexerSparsityConfig):
        heads = {"group": num_key_heads, "head": structure.num_heads, "one": 1}[structure.index_heads]
        return IndexerAttention(
            *sizes, index_heads=heads, index_dim=structure.index_dim, loss_weight=structure.loss_weight, **shared
        )
    if not isinstance(structure, NativeSparsityConfig):
        raise TypeError(f"{type(structure).__name__} adds parameters, and ds_sparse has no module with them.")
    if not causal and not structure.causal:
        raise ValueError(
            f"{type(structure).__name__} is for causal models: tokens see compressed keys that are behind them. Take "
            'mode "indexer" or "moba" for a model that is not, or make it causal, by causal=True of the structure.'
        )
    return NativeSparseAttention(
        *sizes, length=structure.compressed_length, stride=structure.compressed_stride, window=structure.window,
        **shared,
    )  # fmt: skip


def chosen_attention(
    structure: ChosenSparsityConfig,
    learned: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    query_offset: int | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    document_layout: str = "own",
    scale: float | None = None,
    **more: Any,
) -> Tensor:
    """Attention of each query to the blocks of keys that it chooses.

    Args:
        structure: how many blocks, and who chooses.
        learned: the layer's module, of a structure that adds parameters.
        others: as of `StructuredAttention`. A float key_padding_mask keeps a key or, below -1000, drops it: what is
            not there cannot count in a choice.

    Raises:
        ValueError: an option that is not computed here; no module for a structure that adds parameters; torch.vmap.
    """
    refuse_options(
        structure, causal=causal, dropout_p=dropout_p, sinks=sinks, query_offset=query_offset, cu_seqlens=cu_seqlens,
        document_layout=document_layout, **more,
    )  # fmt: skip
    if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
        check_bias("key_padding_mask", key_padding_mask, query, (query.shape[0], key.shape[2]), (2,))
        key_padding_mask = key_padding_mask.detach() > PADDING_BELOW
    if _by_blocks(structure):
        return _of_query_blocks(
            structure, query, key, value, key_padding_mask, dropout_p=dropout_p, scale=scale, sinks=sinks
        )
    how: dict[str, Any] = {
        "causal": causal,
        "key_padding_mask": key_padding_mask,
        "query_offset": 0 if query_offset is None else query_offset,
        "cu_seqlens": cu_seqlens,
    }
    if not structure.adds_parameters:
        chosen = _by_means(structure, query, key, scale, **how)
        return selected_attention(query, key, value, chosen, structure.block, scale=scale, sinks=sinks, **how)
    if learned is None:
        raise ValueError(
            f"{type(structure).__name__} adds parameters, and this layer has no module with them; call "
            "ds_sparse.sparsify, or build SparseSelfAttention with head_dim."
        )
    return learned(query, key, value, scale=scale, **how)


def refuse_options(
    structure: object, *, causal: bool = False, dropout_p: float = 0.0, document_layout: str = "own", **given: Any
) -> None:
    """Raises ValueError for what a structure whose queries choose does not compute: an option of a call, or one that a
    layer is known to give its calls.

    Args:
        structure: any; nothing is refused of those with a layout.
        given: other options by name, None of what is not given.
    """
    if not isinstance(structure, ChosenSparsityConfig):
        return
    other, who = "leave it out, or take a structure with a layout", type(structure).__name__
    refused = [(name, other) for name in _NOT_COMPUTED if given.get(name) is not None]
    if given.get("softcap"):
        refused.append(("softcap", other))
    if document_layout != "own":
        refused.append((f"document_layout={document_layout!r}", "leave it out"))
    if _by_blocks(structure):
        of_tokens = {
            "query_offset, as of cached keys": given.get("query_offset") is not None,
            "cu_seqlens of packed documents": given.get("cu_seqlens") is not None,
            "a causal layer, whose tokens would choose by those after them": causal,
        }
        refused += [(name, 'take selection "token"') for name, is_given in of_tokens.items() if is_given]
    elif dropout_p:
        both_ways = isinstance(structure, MobaSparsityConfig) and not (causal or structure.causal)
        or_blocks = ', or take selection "block"' if both_ways else ""
        refused.append((f"dropout of attention ({dropout_p})", f"set it to 0{or_blocks}"))
    if structure.adds_parameters and given.get("sinks") is not None:
        refused.append(("sinks", other))
    if refused:
        who += f' with selection "{structure.selection}"' if isinstance(structure, MobaSparsityConfig) else ""
        raise ValueError(f"{refused[0][0]}: {who} does not compute it; {refused[0][1]}.")


def chooses_by_group(structure: object) -> bool:
    """Tells if heads that share a key head choose their blocks together, so that one rank has all of them."""
    return isinstance(structure, MobaSparsityConfig) and structure.chosen_by_group


def _by_blocks(structure: object) -> bool:
    return isinstance(structure, MobaSparsityConfig) and structure.selection == "block"


def _of_query_blocks(
    structure: Any, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, **more: Any
) -> Tensor:
    asking = query.detach()
    if padding is not None:  # queries of padding would count in the mean of their block
        asking = asking.masked_fill(~padding[:, None, :, None], 0)
    chosen = _by_means(structure, asking, key, more["scale"], query_block=structure.block, key_padding_mask=padding)
    if query.is_meta or len(query) == 0:  # no index is made of numbers that are not there
        del more["dropout_p"]
        chosen = chosen.repeat_interleave(structure.block, 2)[:, :, : query.shape[2]]
        return selected_attention(query, key, value, chosen, structure.block, key_padding_mask=padding, **more)
    index = BlockIndex.from_blocks(chosen, structure.block)
    return block_sparse_attention(query, key, value, index, key_padding_mask=padding, **more)


def _by_means(structure: Any, query: Tensor, key: Tensor, scale: float | None, **how: Any) -> Tensor:
    refuse_samples(type(structure).__name__, query, key)
    groups = key.shape[-3] if structure.chosen_by_group else None
    how |= {"first": structure.num_first_blocks, "local": _local(structure)}
    chosen = select_blocks(query, key, structure.block, structure.num_chosen_blocks, groups=groups, **how)
    note(chosen, structure.block, query, key, scale=scale, **how)
    return chosen


def _local(structure: ChosenSparsityConfig) -> int:
    """Blocks up to a query's own that are forced."""
    return structure.num_sliding_window_blocks // 2 + 1
