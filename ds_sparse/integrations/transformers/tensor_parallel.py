"""Layers of which each rank has some heads: those of torch's `parallelize_module` and of DeepSpeed's AutoTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...layout import is_distributed
from ...modules.dense_attention import dense_attention
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention
from .binding import attached_to, which
from .trial import Refused

_EXCHANGES = {
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "DeepSpeed's UlyssesSPAttentionHF",
    "accelerate.utils.sequence_parallel": "accelerate's sequence parallelism",
}
"""What puts an exchange of heads around attention functions of Transformers, by module."""

_OWN_WAY = (
    'leave that out, and use ds_sparse.sequence_parallel(model, group), or "sequence_parallel_size" in the DeepSpeed '
    "JSON."
)


def why_in_parts() -> str | None:
    """The sentence that says that models of this process are given parts of sequences by another library, of which
    sparse layers would see each rank's alone; None where nothing tells of one."""
    for name, function in ALL_ATTENTION_FUNCTIONS.items():
        exchange = _EXCHANGES.get(getattr(function, "__module__", ""))
        if exchange is not None:
            return (
                f"{exchange} exchanges heads around the attention function {name!r} for batches in parts, whose "
                f"padding and packed documents do not come to sparse layers; {_OWN_WAY}"
            )
    return None


def attention_of(layer: nn.Module, query: torch.Tensor) -> Any:
    """What computes in a layer; of a structure the part for the heads of this rank, where the query has fewer.

    Raises:
        ValueError: fewer heads than the model has, in a layer that is not dealt to ranks, or not evenly.
    """
    attention: Any = attached_to(layer).attention
    if not isinstance(attention, StructuredAttention | LocalAttention) and attention is not dense_attention:
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
            f"parallelism, without padding and packed documents; {_OWN_WAY}"
        )
    if not isinstance(attention, StructuredAttention):
        return attention
    rank, ranks = place
    if heads * ranks != of_all:
        raise ValueError(
            f"{which(layer)} has {of_all} heads, of which rank {rank} of {ranks} has {heads}; a structure is dealt to "
            f"ranks that have as many heads each: take a number of ranks that divides {of_all}."
        )
    return attention.of_heads(tuple(range(rank * heads, (rank + 1) * heads)))


def on_local_heads(
    layer: nn.Module,
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """`attend`, which returns (B, T, H, D), on this rank's heads of DTensors (B, H, T, D), as a DTensor.

    Raises:
        Refused: they are not all DTensors, alike, of which ranks have heads or all of it.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    operands: list[Any] = [query, key, value]
    placements: list[Any] = [x.placements if is_distributed(x) else None for x in operands]
    alike = placements[0] is not None and placements.count(placements[0]) == len(operands)
    if not alike or not set(placements[0]) <= {Replicate(), Shard(1)}:
        raise Refused(
            f"{which(layer)} is given DTensors that are dealt in another way than by heads (query, key and value are "
            f"{', '.join(str(x) for x in placements)}); shard the projections of query, key and value by columns."
        )
    output = attend(*(x.to_local() for x in operands))
    by_heads = [Shard(2) if x == Shard(1) else x for x in placements[0]]
    return DTensor.from_local(output, operands[0].device_mesh, by_heads, run_check=False)


def _place(layer: nn.Module) -> tuple[int, int] | None:
    """Which of how many ranks this is, that share the layer's heads; None where none do."""
    parameter: Any
    for parameter in layer.parameters():
        if is_distributed(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements
            dims = [dim for dim, placement in enumerate(placements) if placement.is_shard(0)]
            return (mesh.get_local_rank(dims[0]), mesh.size(dims[0])) if len(dims) == 1 else None
    groups = (getattr(module, "mp_group", None) for module in layer.modules())  # DeepSpeed's name
    group = next((group for group in groups if group is not None), None)
    return None if group is None else (distributed.get_rank(group), distributed.get_world_size(group))
