"""Documents packed in rows, as Transformers packs them: read once a forward, and told to every attention layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...index.documents import Documents
from ...models.position_table import position_table, reserved_rows
from ...notices import say_notices
from ..pretrained import NAME, pretrained_model_around
from .mask_windows import hides_nothing
from .sequence import TOLD as IN_PARTS

TOLD = "ds_sparse_documents"
"""The keyword under which a model hands `PackedDocuments` to its attention layers, as it hands on all that it does not
know. Not a tensor of Transformers' name: what moves arguments between devices would copy it for each layer, and each
copy would get an index of its own."""

_CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
_FOR_FLASH_ATTENTION = (*_CUMULATIVE, "max_length_q", "max_length_k")
"""What Transformers' collators say of documents. The longest is known from the others."""

_CACHES = ("cache", "past_key_values", "past_key_value")
"""The names of a cache in the releases of Transformers."""


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
    if config._attn_implementation != NAME or IN_PARTS in named:  # a part's positions have been read
        return None
    parameters = inspect.signature(model.forward).parameters
    given = {**dict(zip(parameters, arguments, strict=False)), **named}
    if all(given.get(name) is None for name in _CUMULATIVE) and not _may_tell(given):
        return None
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
    cumulative = [given[name] for name in _CUMULATIVE if given.get(name) is not None]
    if cumulative:
        _refuse_models_without_positions(model, parameters)
        cu_seqlens = _read_cumulative(model, cumulative, *_rows_and_tokens(given))
        named = {name: value for name, value in named.items() if name not in _FOR_FLASH_ATTENTION}
    else:
        cu_seqlens = _read_positions(model, given)
        if cu_seqlens is None:
            return None
        _refuse_models_without_positions(model, parameters)
    changes = _no_mask(parameters, given)
    if cu_seqlens is not None:
        _refuse_beside_documents(model, given)
        changes |= _changes(model, parameters, given, cu_seqlens)
    in_order = [changes.pop(name, value) for name, value in zip(parameters, arguments, strict=False)]
    return (*in_order, *arguments[len(in_order) :]), {**named, **changes}


def _read_cumulative(model: nn.Module, given: list[Any], rows: int, tokens: int) -> torch.Tensor | None:
    """Where documents begin, of `cu_seq_lens_q` and `cu_seq_lens_k`; None where each row is one. Waits for the
    device."""
    q, k = torch.as_tensor(given[0]), torch.as_tensor(given[-1])
    alike = len(given) == 2 and q.shape == k.shape
    if alike and q is not k:
        both = torch.stack([q, k.to(q)]).cpu()
        q, alike = both[0], torch.equal(both[0], both[1])
    if not alike:
        raise ValueError(
            f"{type(model).__name__} is given cu_seq_lens_q without cu_seq_lens_k, or the other way round, or with "
            "other numbers; in self-attention they are the same, so give both alike, as DataCollatorWithFlattening("
            "return_flash_attn_kwargs=True) does."
        )
    cu_seqlens = q.cpu().clone()  # what is given may be written anew before a checkpoint runs again
    edges = Documents.read(cu_seqlens).check_fills(rows * tokens).edges
    return None if list(edges) == list(range(0, rows * tokens + 1, tokens)) else cu_seqlens


def _read_positions(model: nn.Module, given: Mapping[str, Any]) -> torch.Tensor | None:
    """Where documents begin by `position_ids`, as Transformers sees it where there is no mask: at each position that is
    not one more than that before it. None where each row is one. Waits for the device."""
    positions, mask = given["position_ids"], given.get("attention_mask")
    if mask is not None:
        _say_that_a_mask_makes_one_row(model, positions, mask, given)
        return None
    positions = positions.reshape(-1, positions.shape[-1])
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    begins = begins.cpu()
    if not bool(begins[:, 1:].any()):
        return None
    begins = begins.expand(_rows_and_tokens(given)[0], -1).flatten()
    return torch.cat([begins.nonzero().flatten(), torch.tensor([len(begins)])])


def _say_that_a_mask_makes_one_row(
    model: nn.Module, positions: torch.Tensor, mask: Any, given: Mapping[str, Any]
) -> None:
    """Prints it once, where positions start again between tokens that are no padding. A mask makes one sequence of a
    row in Transformers, too."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[-1] != positions.shape[-1]:
        return
    if _has_cache(given) or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    kept = mask.to(positions.device).bool()
    if bool(((positions.diff(dim=-1) <= 0) & kept[:, 1:] & kept[:, :-1]).any()):
        say_notices(
            [
                f"{type(model).__name__} is given position_ids that start again and an attention_mask: with a mask a "
                "row is one sequence, as Transformers has it, so documents packed in it see each other. Leave the mask "
                "out to keep them apart."
            ]
        )


def _refuse_models_without_positions(model: nn.Module, parameters: Mapping[str, inspect.Parameter]) -> None:
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "position_ids" not in parameters or not hands_on:
        why = "hands nothing on to its attention layers" if not hands_on else "takes no position_ids"
        raise ValueError(
            f"{type(model).__name__} is given packed documents (position_ids that start again, or cu_seq_lens_q), and "
            f"its forward {why}, so it would not compute each of them alone. Give each document a row, with an "
            "attention_mask for the padding."
        )


def _refuse_beside_documents(model: nn.Module, given: Mapping[str, Any]) -> None:
    name = type(model).__name__
    if given.get("attention_mask") is not None:
        raise ValueError(
            f"{name} is given cu_seq_lens_q of packed documents and an attention_mask. Leave the mask out: packed "
            "documents have no padding, and cu_seq_lens_q says which tokens see each other. Where a model around it "
            "makes the mask, as one of pictures and texts, train the model of texts alone."
        )
    if _has_cache(given) or given.get("use_cache"):
        raise ValueError(
            f"{name} is given packed documents (position_ids that start again, or cu_seq_lens_q) and a cache, which "
            "would go on after the last document alone, with the keys of all. Pass use_cache=False; to generate, give "
            "each prompt a row, with an attention_mask for the padding."
        )


def _changes(
    model: nn.Module,
    parameters: Mapping[str, inspect.Parameter],
    given: Mapping[str, Any],
    cu_seqlens: torch.Tensor,
) -> dict[str, Any]:
    """What a model of packed documents is called with: positions from each document's start where none are given, and
    no cache."""
    changes: dict[str, Any] = {TOLD: PackedDocuments(cu_seqlens)}
    if given.get("position_ids") is None:
        table = position_table(model)
        first = 0 if table is None else reserved_rows(table)
        starts = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff().long())
        positions = torch.arange(first, first + len(starts)) - starts
        changes["position_ids"] = positions.view(_rows_and_tokens(given)).to(_ids(given).device)
    if "use_cache" in parameters:
        changes["use_cache"] = False
    return changes


def _no_mask(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """A mask that hides nothing where none is given: with it Transformers does not look at positions, of which it would
    make a mask of tokens by tokens."""
    if "attention_mask" not in parameters or given.get("attention_mask") is not None:
        return {}
    return {"attention_mask": hides_nothing(*_rows_and_tokens(given), torch.bool, _ids(given).device)}


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


def _has_cache(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in _CACHES)


def _ids(given: Mapping[str, Any]) -> torch.Tensor:
    """(rows, tokens) or (rows, tokens, width): what tells how many tokens there are."""
    known: Sequence[Any] = [given.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states", "position_ids")]
    return next(x for x in known if x is not None)


def _rows_and_tokens(given: Mapping[str, Any]) -> tuple[int, int]:
    rows, tokens = _ids(given).shape[:2]
    return rows, tokens
