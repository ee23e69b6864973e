"""Documents packed in rows, as Transformers packs them: read once a forward from what a model is given, and told to
every attention layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...index.cache import is_in_graph
from ...index.packed import Documents
from ...models.position_table import base_model, longest_row, position_table, reserved_rows, why_too_long
from ...tools.notices import say_notices
from ..transformers_family import NAME, pretrained_model_around
from .binding import chosen_blocks_of
from .masks import hides_nothing

DOCUMENTS_KEYWORD = "ds_sparse_documents"
"""The keyword under which a model hands `PackedDocuments` to its attention layers, as it hands on all that it does not
know. Not a tensor of Transformers' name: what moves arguments between devices would copy it for each layer, and each
copy would get an index of its own."""

PART_KEYWORD = "ds_sparse_sequence"
"""The keyword under which a sequence-parallel model hands its part of the sequence to its layers."""

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
FOR_FLASH_ATTENTION = (*CUMULATIVE, "max_length_q", "max_length_k")
"""Arguments in which Transformers' collators tell of documents. The longest is known from the others."""

_CACHES = ("cache", "past_key_values", "past_key_value")
"""The names of a cache in the releases of Transformers."""


class DocumentsRead:
    """Marks what a model hands on that has read the documents of the batch itself."""


class PackedDocuments:
    """The documents of one forward.

    Attributes:
        cu_seqlens: int32 or int64 (documents + 1), over the tokens of all rows, one row after the other; on the CPU
            but in the capture of a CUDA graph.
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
    if config._attn_implementation != NAME or isinstance(named.get(PART_KEYWORD), DocumentsRead):
        return None
    given = by_name(model, arguments, named)
    _refuse_too_long(model, given)
    if has_cumulative(given) or _may_tell(given):
        return _told(model, given)
    if not torch.compiler.is_compiling() or given.get("position_ids") is not None or has_cache(given):
        return None
    # Transformers cannot look at values in a trace, and would take the positions that the model makes for packed.
    return (), {**given, **_no_mask(model, given)}


def _refuse_too_long(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raises ValueError where a batch has more tokens than the model's table of positions, before an index does."""
    ids = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    if torch.compiler.is_compiling() or ids is None or ids.is_meta or ids.dim() < 2:
        return
    if given.get("position_ids") is not None or has_cumulative(given) or why_too_long(model, ids.shape[1]) is None:
        return
    if (why := why_too_long(model, longest_row(model, ids))) is not None:
        raise ValueError(why)


def by_name(model: nn.Module, arguments: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model's forward, by name."""
    return {**dict(zip(inspect.signature(model.forward).parameters, arguments, strict=False)), **named}


def _may_tell(given: Mapping[str, Any]) -> bool:
    """Tells whether there are positions that may start again."""
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
def _told(model: nn.Module, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Makes the arguments that the model is called with instead; None where they stay."""
    if torch.compiler.is_compiling():  # torch.export traces what torch.compile leaves out
        raise RuntimeError(_NOT_IN_GRAPHS)
    cu_seqlens = documents_of(model, given)
    if cu_seqlens is None and not has_cumulative(given):
        return None
    told = {name: value for name, value in given.items() if name not in FOR_FLASH_ATTENTION} | _no_mask(model, given)
    if cu_seqlens is not None:
        told[DOCUMENTS_KEYWORD] = PackedDocuments(cu_seqlens)
        if given.get("position_ids") is None:
            told["position_ids"] = positions_of(model, given, cu_seqlens)
        if "use_cache" in inspect.signature(model.forward).parameters:
            told["use_cache"] = False
    return (), told


def _no_mask(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """A mask that hides nothing where none is given: with it Transformers does not look at positions, of which it would
    make a mask of tokens by tokens."""
    takes_one = "attention_mask" in inspect.signature(model.forward).parameters
    if not takes_one or given.get("attention_mask") is not None:
        return {}
    return {"attention_mask": hides_nothing(*rows_and_tokens(given), torch.bool, ids_of(given).device)}


def _check_all_were_told(model: nn.Module, arguments: tuple, named: dict[str, Any], output: Any) -> None:
    """Forward hook: no layer has let documents see each other, as the model did not hand on what it was told."""
    documents: PackedDocuments | None = named.get(DOCUMENTS_KEYWORD)
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


def has_cumulative(given: Mapping[str, Any]) -> bool:
    """Tells whether a model is given where documents begin, beside their positions."""
    return any(given.get(name) is not None for name in CUMULATIVE)


def documents_of(model: nn.Module, given: Mapping[str, Any]) -> torch.Tensor | None:
    """Where the documents of a batch begin, as `cu_seqlens` on the CPU over the tokens of all rows, one row after the
    other; None where each row is one. Waits for the device. In the capture of a CUDA graph nobody looks at
    `cu_seq_lens_q`, and it stays on the device.

    Args:
        model: what is given the batch.
        given: the arguments of its forward, by name.

    Raises:
        ValueError: packed documents beside a mask or a cache, or for a model that does not hand on where they begin;
            `cu_seq_lens_q` that does not fit.
    """
    if has_cumulative(given):
        _refuse_models_that_cannot(model)
        cu_seqlens = _read_cumulative(model, [given[x] for x in CUMULATIVE if given.get(x) is not None], given)
    else:
        cu_seqlens = _read_positions(model, given)
        if cu_seqlens is not None:
            _refuse_models_that_cannot(model)
    if cu_seqlens is not None:
        _refuse_beside_documents(model, given)
    return cu_seqlens


def positions_of(model: nn.Module, given: Mapping[str, Any], cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The position of each token from its document's start, (rows, tokens)."""
    table = position_table(base_model(model))
    first = 0 if table is None else reserved_rows(table)
    rows, tokens = rows_and_tokens(given)
    places, begins = torch.arange(rows * tokens, device=cu_seqlens.device), cu_seqlens.long()
    positions = places - begins[torch.searchsorted(begins, places, right=True) - 1] + first
    if is_in_graph(cu_seqlens):
        # Nobody has read where documents begin: of what is wrong with it attention makes NaN, and not the table an end.
        positions = positions.clamp(first, None if table is None else table.num_embeddings - 1)
    return positions.view(rows, tokens).to(ids_of(given).device)


def _read_cumulative(model: nn.Module, cumulative: list[Any], given: Mapping[str, Any]) -> torch.Tensor | None:
    """Where documents begin, of `cu_seq_lens_q` and `cu_seq_lens_k`."""
    rows, tokens = rows_and_tokens(given)
    q, k = torch.as_tensor(cumulative[0]), torch.as_tensor(cumulative[-1])
    if is_in_graph(q):
        if len(cumulative) == 2 and q is k:
            return q.clone()
        raise RuntimeError(
            f"{type(model).__name__} is given cu_seq_lens_q and cu_seq_lens_k while a CUDA graph is captured, where "
            "nobody can see that they are alike; give the same tensor as both."
        )
    alike = len(cumulative) == 2 and q.shape == k.shape
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
    not one more than that before it."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None:
        return None
    if mask is not None:
        _refuse_places_without_blocks(model, positions, mask)
        _say_that_a_mask_makes_one_row(model, positions, mask, given)
        return None
    positions = positions.reshape(-1, positions.shape[-1])
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    begins = begins.cpu()
    if not bool(begins[:, 1:].any()):
        return None
    begins = begins.expand(rows_and_tokens(given)[0], -1).flatten()
    return torch.cat([begins.nonzero().flatten(), torch.tensor([len(begins)])])


def _say_that_a_mask_makes_one_row(
    model: nn.Module, positions: torch.Tensor, mask: Any, given: Mapping[str, Any]
) -> None:
    """Prints it once, where positions start again between tokens that are no padding. A mask makes one sequence of a
    row in Transformers, too."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[-1] != positions.shape[-1]:
        return
    if has_cache(given) or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
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


def _refuse_places_without_blocks(model: nn.Module, positions: torch.Tensor, mask: Any) -> None:
    """Raises ValueError where an indexer, which takes positions for places among the keys, would choose padding alone
    for a token. Waits for the device where the model has such an indexer."""
    blocks = [chosen.block for chosen in map(chosen_blocks_of, model.modules()) if chosen is not None]
    mask = next(iter(mask.values())) if isinstance(mask, dict) else mask
    if not blocks or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    tokens, keys = positions.shape[-1], mask.shape[1]
    places = torch.arange(keys - tokens, keys, device=positions.device)
    behind = (places - positions).masked_fill(mask[:, keys - tokens :].to(positions.device) == 0, 0).max().item()
    if behind >= min(blocks):
        raise ValueError(
            f"{type(model).__name__} is given {behind} tokens of padding on the left, and its indexer takes "
            f"position_ids for places in the row: of blocks of {min(blocks)} keys it would choose padding alone for "
            f"some tokens. Pad by less than {min(blocks)} tokens, or on the right; or pass position_ids that count "
            "padding too, torch.arange(tokens)[None], also to generate."
        )


def _refuse_models_that_cannot(model: nn.Module) -> None:
    parameters, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)
    convolutions = [x for x in model.modules() if isinstance(x, nn.Conv1d) and x.kernel_size != (1,)]
    whys = {
        "hands nothing on to its attention layers": all(x.kind is not x.VAR_KEYWORD for x in parameters.values()),
        "takes no position_ids": "position_ids" not in parameters,
        "puts the embeddings of neighbouring tokens together": getattr(config, "trigram_input", False),
        "has convolutions over tokens": bool(convolutions),
        "has an indexer that chooses blocks of a row, whatever documents they are of": any(
            chosen_blocks_of(x) is not None for x in model.modules()
        ),
    }
    why = next((why for why, is_so in whys.items() if is_so), None)
    if why is not None:
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
    if has_cache(given) or given.get("use_cache"):
        raise ValueError(
            f"{name} is given packed documents (position_ids that start again, or cu_seq_lens_q) and a cache, which "
            "would go on after the last document alone, with the keys of all. Pass use_cache=False; to generate, give "
            "each prompt a row, with an attention_mask for the padding."
        )


def has_cache(given: Mapping[str, Any]) -> bool:
    """Tells whether a model is given cached keys."""
    return any(given.get(name) is not None for name in _CACHES)


def ids_of(given: Mapping[str, Any]) -> torch.Tensor:
    """(rows, tokens) or (rows, tokens, width): what tells how many tokens there are."""
    known = ("input_ids", "inputs_embeds", "hidden_states", "position_ids")
    return next(given[name] for name in known if given.get(name) is not None)


def rows_and_tokens(given: Mapping[str, Any]) -> tuple[int, int]:
    rows, tokens = ids_of(given).shape[:2]
    return rows, tokens
