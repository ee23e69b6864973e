"""The attention function of the name, registered with Transformers: sparse self-attention of any layer.

Also of layers of which each rank has some heads: those of torch's `parallelize_module` and of DeepSpeed's AutoTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed, nn
from transformers import AttentionInterface

from ...layout import is_distributed
from ...modules.bert import VARIANTS
from ...modules.chosen_attention import LEARNED, chooses_by_group
from ...modules.chosen_blocks import ChosenBlocks
from ...modules.dense_attention import dense_attention
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention, of_keys_or_pairs
from ...ops.packed_operands import one_as_rows, rows_as_one
from ..transformers_family import NAME
from .binding import Call, OtherKeys, Refused, attached_to, chosen_blocks_of, of_distances, which
from .binding import is_causal as is_causal_layer
from .masks import MASK_DTYPE, Masks, is_seen_to_hide_nothing, refuse_other_masks
from .packing import PackedDocuments
from .sequence import Alone, Part, attend_part, is_in_parts

OWN_WAY = (
    'leave that out, and use ds_sparse.sequence_parallel(model, group), or "sequence_parallel_size" in the DeepSpeed '
    "JSON."
)


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
    block_indices: torch.Tensor | None = None,
    softcap: float | None = None,
    ds_sparse_documents: PackedDocuments | None = None,
    ds_sparse_sequence: Part | Alone | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: sparse self-attention of an encoder's or a decoder's layer.

    Args:
        module: the layer; its `config.sparse_attention` says the structure.
        query: (B, H, T, D), any strides, any T; key, value: alike, or with fewer heads that divide H. Of a causal layer
            they may have cached keys in front. Under tensor parallelism H are this rank's heads; or DTensors by heads.
        attention_mask: (B, T) bool, True keeps; or (B, 1 or H, 1 or T, T), where bool keeps and a float is added; a
            float that requires a gradient gets one. Of a causal layer what `key_padding_mask` gives.
        scaling: factor of the scores, 1 / sqrt(D) by default.
        dropout: probability with which attention probabilities are dropped.
        position_bias: T5's relative positions, added after scaling, with gradient: by distance, (1, H, 1, 2T - 1), as
            `binding` has its layers make them; or of pairs of tokens, (1 or B, H, T, T).
        sliding_window: what the layer asked for when it was tried.
        s_aux: of a causal layer, its sinks, a logit a head.
        block_indices: of a causal layer with an indexer, the blocks that this has chosen, of `indexer.block_size` keys:
            (B, Hkv or H or 1, T, k), -1 for none.
        softcap: of scaled scores; None or 0 for none.
        ds_sparse_documents: where documents begin that are packed in the rows, as the model's forward has read it.
        ds_sparse_sequence: of a sequence-parallel model, which part of the sequence the tokens are.

    Returns:
        (B, T, H, D), contiguous, and None: there is no matrix of attention probabilities.

    Raises:
        ValueError: a call for what is not computed (the probabilities, cross-attention, masks beside packed documents,
            ...), no structure, a mask of another kind.
        SparseAttentionConfigError: the structure in the config is wrong.
    """
    if is_distributed(query) or is_distributed(key) or is_distributed(value):
        (query, key, value), whole = local_heads(module, query, key, value)
    else:
        whole = None
    causal = is_causal_layer(module) if is_causal is None else is_causal
    call = Call(
        module, query, key, value, attention_mask, scaling, dropout, s_aux, position_bias, causal, block_indices,
        softcap or 0.0,
    )  # fmt: skip
    _refuse_what_is_asked(module, {**more, **({"position_bias": position_bias} if causal else {"s_aux": s_aux})})
    output = _attend(call, sliding_window, ds_sparse_documents, ds_sparse_sequence)
    return output if whole is None else whole(output), None


def _attend(
    call: Call, sliding_window: int | None, documents: PackedDocuments | None, part: Part | Alone | None
) -> torch.Tensor:
    """Attention of a layer, (B, T, H, D), contiguous."""
    tried, attached = Masks.of(call.layer.config), attached_to(call.layer)
    window = attached.window
    if tried is None and window.asked != sliding_window:
        raise Refused(
            f"{which(call.layer)} asks the attention for sliding_window={sliding_window}, and asked for {window.asked} "
            f'when it took {NAME}; set the name anew, model.set_attn_implementation("{NAME}"), after such a change.'
        )
    if is_in_parts(call.layer, part):
        if call.softcap:
            raise Refused(
                f"{which(call.layer)} asks the attention for softcap={call.softcap}, which {NAME} does not compute in "
                "a sequence over several ranks; leave sequence parallelism out."
            )
        return attend_part(call, part)
    _refuse_other_choices(call)
    if documents is not None:
        _refuse_beside_documents(call)
        _refuse_beside_a_window(call._replace(mask=None, position_bias=None), window.local)
        return _attend_packed(call, documents)
    if call.causal:
        refuse_other_masks(call.layer, call.mask)
    else:
        _refuse_what_is_no_encoder(call)
    if tried is not None:
        window = tried.window(attached.name, which(call.layer), call.mask, sliding_window, call.causal)
    _refuse_beside_a_window(call, window.local)
    output = (_attend_causal if call.causal else _attend_both_ways)(call)
    return output.transpose(1, 2).contiguous()


def _attend_both_ways(call: Call) -> torch.Tensor:
    """Attention of a bidirectional layer, (B, H, T, D)."""
    mask, position_bias = call.mask, call.position_bias
    distance_bias = of_distances(position_bias, call.query.shape[2])
    rpe = position_bias if distance_bias is None else None
    if mask is not None and mask.requires_grad:
        if distance_bias is not None:
            raise Refused(
                f"{which(call.layer)} is given a mask that requires a gradient, beside relative positions by distance, "
                f'which {NAME} does not compute together; detach the mask, or use attn_implementation="sdpa".'
            )
        rpe, mask = mask if rpe is None else mask + rpe, None
    if mask is not None and mask.dim() == 2 and is_seen_to_hide_nothing(mask):
        mask = None
    added: dict[str, Any] = of_keys_or_pairs(mask)
    if rpe is not None:
        added["rpe"] = rpe.to(call.query.dtype)
    if distance_bias is not None:
        added["distance_bias"] = distance_bias
    return _compute(call, call.query, call.key, call.value, **added)


def _attend_causal(call: Call) -> torch.Tensor:
    """Attention of a causal layer, (B, H, T, D). The queries are the last of the keys: those before are cached."""
    query, key, mask = call.query, call.key, call.mask
    keys = key.shape[2] if mask is None else mask.shape[1]
    offset = keys - query.shape[2]
    if offset < 0 or keys > key.shape[2]:
        raise Refused(
            f"{which(call.layer)} has {query.shape[2]} queries, {key.shape[2]} keys and a mask of {keys}; {NAME} wants "
            "the keys of all queries, and a mask of all keys."
        )
    padding = None if mask is None or is_seen_to_hide_nothing(mask) else mask.bool()
    chosen = {} if call.chosen is None else {"block_indices": call.chosen}
    return _compute(
        call, query, key[:, :, :keys], call.value[:, :, :keys], key_padding_mask=padding, sinks=call.sinks,
        causal=True, query_offset=offset or None, **chosen,
    )  # fmt: skip


@torch.compiler.disable(
    reason=f"{NAME} computes packed documents outside of graphs, as their index is another one in each batch: compile "
    "without fullgraph=True."
)
def _attend_packed(call: Call, documents: PackedDocuments) -> torch.Tensor:
    """Attention of each document alone, (B, T, H, D). The rows become one: the end of a row is the end of a document,
    too."""
    rows = map(rows_as_one, (call.query, call.key, call.value))
    output = _compute(call, *rows, sinks=call.sinks, causal=call.causal, cu_seqlens=documents.cu_seqlens)
    documents.told.add(call.layer)
    return one_as_rows(output, call.query.shape[0]).transpose(1, 2).contiguous()


def _compute(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    attention = attention_of(call.layer, call.query, call.key)
    learned = call.layer._modules.get(LEARNED)
    if learned is not None:
        options["learned"] = learned
    if call.softcap:
        options["softcap"] = call.softcap
    return attention(query, key, value, scale=call.scale, dropout_p=call.dropout_p, **options)


def _refuse_what_is_asked(module: nn.Module, more: Mapping[str, Any]) -> None:
    asked = [name for name in VARIANTS if more.get(name) is not None and more[name] is not False]
    asked += ["output_attentions"] if getattr(module.config, "output_attentions", False) else []
    if asked:
        raise Refused(
            f"{which(module)} asks the attention for {', '.join(asked)}, which {NAME} does not compute; leave "
            'that out, or use attn_implementation="sdpa" or "eager".'
        )


def _refuse_beside_documents(call: Call) -> None:
    mask = call.mask
    beside = {
        "a mask that its model has made": mask is not None and (mask.dim() != 2 or not is_seen_to_hide_nothing(mask)),
        "position_bias": call.position_bias is not None,
        "other keys than those of its queries": call.query.shape[2] != call.key.shape[2],
    }
    if any(beside.values()):
        raise Refused(
            f"{which(call.layer)} is given packed documents and {_names_of(beside)}, which {NAME} does not compute "
            "together. Give each document a row, with an attention_mask for the padding."
        )


def _refuse_other_choices(call: Call) -> None:
    """Raises Refused for chosen blocks of a layer without an indexer of blocks, or the other way round."""
    chooses = chosen_blocks_of(call.layer) is not None
    if chooses != (call.chosen is not None):
        raise Refused(
            f"{which(call.layer)} has {'an' if chooses else 'no'} indexer that says how large its blocks are, and "
            f"gives the attention {'no ' if chooses else ''}block_indices; {NAME} takes both or none. Train it with "
            'attn_implementation="sdpa".'
        )
    if chooses and not call.causal:
        raise Refused(f"{which(call.layer)} is bidirectional, and {NAME} takes chosen blocks of causal layers alone.")


def _refuse_beside_a_window(call: Call, local: LocalAttention | None) -> None:
    if local is None:
        return
    mask = call.mask
    beside = {
        f"a mask of shape {() if mask is None else tuple(mask.shape)}": mask is not None and mask.dim() != 2,
        "a mask that requires a gradient": mask is not None and mask.requires_grad,
        "position_bias": call.position_bias is not None,
        f"dropout={call.dropout_p}": call.dropout_p != 0,
    }
    if any(beside.values()):
        raise Refused(
            f"{which(call.layer)} is local, with a window of {local.window} tokens, and given {_names_of(beside)}, "
            f"which {NAME} does not compute there. Give padding as attention_mask (batch, tokens), no position_bias "
            'and no attention dropout, or use attn_implementation="sdpa".'
        )


def _names_of(given: Mapping[str, bool]) -> str:
    return " and ".join(name for name, is_given in given.items() if is_given)


def _refuse_what_is_no_encoder(call: Call) -> None:
    mask, keys = call.mask, call.key.shape[2]
    if call.query.shape[2] != keys:
        raise OtherKeys(
            f"{which(call.layer)} is cross-attention, or has cached keys, and {NAME} serves the self-attention of "
            'encoders and decoders; use attn_implementation="sdpa".'
        )
    if mask is not None and mask.shape[-1] != keys:
        raise Refused(
            f"{which(call.layer)} has {keys} tokens and is given a mask of {mask.shape[-1]}; give attention_mask as "
            "many tokens as input_ids."
        )
    if mask is not None and (mask.dtype == MASK_DTYPE or (mask.is_meta and not call.query.is_meta)):
        raise Refused(
            f"{which(call.layer)} is bidirectional and given a mask that is causal, packed, with an overlay or for "
            f"cross-attention, which {NAME} does not compute there; give padding alone, as attention_mask (batch, "
            'tokens), or use attn_implementation="sdpa".'
        )


def attention_of(layer: nn.Module, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Takes what computes in a layer; of a structure the part for this rank's heads, where the query has fewer.

    Raises:
        ValueError: fewer heads than the model has, in a layer that is not dealt to ranks, or not evenly, or not in
            whole groups where these choose blocks.
    """
    attention: Any = attached_to(layer).attention
    kinds = StructuredAttention | LocalAttention | ChosenBlocks
    if not isinstance(attention, kinds) and attention is not dense_attention:
        return attention  # of a trial
    config: Any = layer.config
    of_all, heads = config.num_attention_heads, query.shape[1]
    if heads == of_all:
        return attention
    place = _place(layer)
    if place is None:
        raise Refused(
            f"{which(layer)} has {of_all} heads and its attention is called with {heads}, as by what exchanges heads "
            "around it for parts of a sequence, such as DeepSpeed's UlyssesSPAttentionHF or accelerate's sequence "
            f"parallelism, without padding and packed documents; {OWN_WAY}"
        )
    if isinstance(attention, ChosenBlocks):
        raise Refused(
            f"{which(layer)} has {of_all} heads, of which this rank has {heads}, and its indexer has chosen blocks for "
            "all; train it without tensor parallelism of its attention."
        )
    if not isinstance(attention, StructuredAttention):
        return attention
    rank, ranks = place
    if heads * ranks != of_all:
        raise ValueError(
            f"{which(layer)} has {of_all} heads, of which rank {rank} of {ranks} has {heads}; a structure is dealt to "
            f"ranks that have as many heads each: take a number of ranks that divides {of_all}."
        )
    group = of_all // (getattr(config, "num_key_value_heads", None) or of_all)
    if chooses_by_group(attention.sparsity_config) and heads != group * key.shape[1]:
        raise Refused(
            f"{which(layer)} has groups of {group} heads that share a key head and choose their blocks together, and "
            f"rank {rank} of {ranks} has {heads} heads and {key.shape[1]} key head{'s' * (key.shape[1] > 1)}; take a "
            "number of ranks that divides that of key heads, or set chosen_by_group to false."
        )
    return attention.of_heads(tuple(range(rank * heads, (rank + 1) * heads)))


def local_heads(layer: nn.Module, *operands: Any) -> tuple[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """This rank's heads of DTensors (B, H, T, D), and what makes a DTensor of the output (B, T, H, D) for them.

    Raises:
        Refused: they are not all DTensors, alike, of which ranks have heads or all of it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements: list[Any] = [x.placements if is_distributed(x) else None for x in operands]
    alike = placements[0] is not None and placements.count(placements[0]) == len(operands)
    if not alike or not set(placements[0]) <= {Replicate(), Shard(1)}:
        raise Refused(
            f"{which(layer)} is given DTensors that are dealt in another way than by heads (query, key and value are "
            f"{', '.join(str(x) for x in placements)}); shard the projections of query, key and value by columns."
        )
    by_heads = [Shard(2) if x == Shard(1) else x for x in placements[0]]

    def whole(output: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(output, operands[0].device_mesh, by_heads, run_check=False)

    return [x.to_local() for x in operands], whole


def _place(layer: nn.Module) -> tuple[int, int] | None:
    """This rank and the number of ranks that share the layer's heads; None where none do."""
    parameter: Any
    for parameter in layer.parameters():
        if is_distributed(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements
            dims = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
            return (mesh.get_local_rank(dims[0]), mesh.size(dims[0])) if len(dims) == 1 else None
    groups = (getattr(module, "mp_group", None) for module in layer.modules())  # DeepSpeed's name
    group = next((group for group in groups if group is not None), None)
    return None if group is None else (distributed.get_rank(group), distributed.get_world_size(group))


AttentionInterface.register(NAME, attention)
