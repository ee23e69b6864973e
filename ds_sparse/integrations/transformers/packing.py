"""Documents packed in rows, as Transformers packs them: read once a forward, and told to every attention layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..pretrained import NAME, pretrained_model_around
from .mask_windows import hides_nothing
from .row_documents import (
    FOR_FLASH_ATTENTION,
    documents_of,
    has_cache,
    has_cumulative,
    ids_of,
    positions_of,
    rows_and_tokens,
)
from .sequence import TOLD as IN_PARTS
from .sequence import Part

TOLD = "ds_sparse_documents"
"""The keyword under which a model hands `PackedDocuments` to its attention layers, as it hands on all that it does not
know. Not a tensor of Transformers' name: what moves arguments between devices would copy it for each layer, and each
copy would get an index of its own."""


class PackedDocuments:
    """The documents of one forward.

    Attributes:
        cu_seqlens: int32 or int64 (documents + 1), on the CPU, over the tokens of all rows, one row after the other.
        told: the attention layers that have computed with it.
    """

    def __init__(self, cu_seqlens: torch.Tensor):
        self.cu_seqlens = cu_seqlens
        self.told: set[nn.Module] = set()


def watch(model: nn.Module) -> list[RemovableHandle]:
    """Has a model read the documents of its rows, and tell its layers; nothing where it does already."""
    if any(hook is _tell for hook in model._forward_pre_hooks.values()):
        return []
    return [
        model.register_forward_pre_hook(_tell, with_kwargs=True),
        model.register_forward_hook(_check_all_were_told, with_kwargs=True),
    ]


def _tell(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Forward pre-hook: replaces what says where documents begin by what the attention layers take."""
    config: Any = model.config
    if config._attn_implementation != NAME or isinstance(named.get(IN_PARTS), Part):  # of which they have been read
        return None
    parameters = inspect.signature(model.forward).parameters
    given = {**dict(zip(parameters, arguments, strict=False)), **named}
    if not has_cumulative(given) and not _may_tell(given):
        if not torch.compiler.is_compiling() or given.get("position_ids") is not None or has_cache(given):
            return None
        # Transformers cannot look at values in a trace, and would take the positions that the model makes for packed.
        return _with(_no_mask(parameters, given), parameters, arguments, named)
    return _told(model, parameters, arguments, named, given)


def _may_tell(given: Mapping[str, Any]) -> bool:
    """Whether there are positions that may start again."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or positions.dim() > 2 or positions.shape[-1] < 2 or positions.is_meta:
        return False
    return mask is None or not torch.compiler.is_compiling()  # with a mask there is but a notice to give


_NOT_IN_GRAPHS = (
    f"{NAME} reads where packed documents begin, from position_ids without an attention_mask or from cu_seq_lens_q, "
    "outside of graphs: compile without fullgraph=True. Or leave position_ids out, or give an attention_mask (of ones "
    "where nothing is padding): then each row is one sequence."
)


@torch.compiler.disable(reason=_NOT_IN_GRAPHS)
def _told(
    model: nn.Module,
    parameters: Mapping[str, inspect.Parameter],
    arguments: tuple,
    named: dict[str, Any],
    given: Mapping[str, Any],
) -> tuple[tuple, dict[str, Any]] | None:
    """What the model is called with instead."""
    if torch.compiler.is_compiling():  # torch.export traces what torch.compile leaves out
        raise RuntimeError(_NOT_IN_GRAPHS)
    cu_seqlens = documents_of(model, given)
    if has_cumulative(given):
        named = {name: value for name, value in named.items() if name not in FOR_FLASH_ATTENTION}
    elif cu_seqlens is None:
        return None
    changes = _no_mask(parameters, given)
    if cu_seqlens is not None:
        changes[TOLD] = PackedDocuments(cu_seqlens)
        if given.get("position_ids") is None:
            changes["position_ids"] = positions_of(model, given, cu_seqlens)
        if "use_cache" in parameters:
            changes["use_cache"] = False
    return _with(changes, parameters, arguments, named)


def _with(
    changes: dict[str, Any], parameters: Mapping[str, inspect.Parameter], arguments: tuple, named: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with changes by name."""
    in_order = [changes.pop(name, value) for name, value in zip(parameters, arguments, strict=False)]
    return (*in_order, *arguments[len(in_order) :]), {**named, **changes}


def _no_mask(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """A mask that hides nothing where none is given: with it Transformers does not look at positions, of which it would
    make a mask of tokens by tokens."""
    if "attention_mask" not in parameters or given.get("attention_mask") is not None:
        return {}
    return {"attention_mask": hides_nothing(*rows_and_tokens(given), torch.bool, ids_of(given).device)}


def _check_all_were_told(model: nn.Module, arguments: tuple, named: dict[str, Any], output: Any) -> None:
    """Forward hook: no layer has let documents see each other, as the model did not hand on what it was told."""
    documents: PackedDocuments | None = named.get(TOLD)
    if documents is None:
        return
    owners = pretrained_model_around(model)
    untold = [
        layer
        for layer in model.modules()
        if "_ds_sparse" in vars(layer) and owners.get(layer) is model and layer not in documents.told
    ]
    if untold:
        raise ValueError(
            f"{type(model).__name__} was given packed documents (position_ids that start again, or cu_seq_lens_q), and "
            f"{len(untold)} of its attention layers ({type(untold[0]).__name__}) did not hear of them, so tokens of "
            "one may have seen the others. Give each document a row, with an attention_mask for the padding."
        )
