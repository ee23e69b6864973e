"""Which Transformers models can be sparse: by what their source and config tell, and by a trial."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import PreTrainedModel

from ...ops.operands import check_attention_operands
from ..pretrained import NAME, through_interface
from .binding import Attached, Length, local_attention_of, named, note_window, set_config
from .causal import is_causal, note_causal
from .tensor_parallel import why_in_parts
from .trial import Masks, OtherKeys, Refused, Untried, Window
from .trial import run as run_trial

_WHAT_TO_USE = (
    "use BERT, RoBERTa, XLM-RoBERTa, ELECTRA, DistilBERT, ALBERT, GPT-NeoX, Llama or another model on Transformers' "
    "attention interface. For BERT code of your own there is "
    "SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention."
)

_CONVERTED = {
    "longformer": " ds_sparse convert makes a RoBERTa of this one.",
    "big_bird": " ds_sparse convert makes a BERT of this one.",
    "led": " ds_sparse convert makes a BART of this one.",
}
"""What else there is for models with a sparse attention of their own, by the model_type of their config."""


class OfDecoder(str):
    """The reason why a decoder with cross-attention cannot be sparse, which may stay dense beside its encoder."""


_across: WeakSet[nn.Module] = WeakSet()
"""The modules that were seen to attend to another sequence than that of their queries."""


def self_attention(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The layers of a model that `why_not` takes which are to be sparse: not those which attend to another sequence, as
    where a learned query gathers a picture into one token."""
    return {name: layer for name, layer in layers.items() if layer not in _across}


def why_not(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel] = ()
) -> str | None:
    """The sentence that says why attention layers of a model cannot be sparse; None where they can, and then every
    forward that raises no error computes them so.

    Args:
        model: the innermost PreTrainedModel around the layers.
        layers: by name.
        around: the models around it; one of them is tried where `model` takes inputs that only they give it.
    """
    name, config = type(model).__name__, model.config
    if not through_interface(model):
        where = f" ({named(layers)})" if layers else ""
        converted = _CONVERTED.get(config.model_type, "")
        return f"{name} computes its attention itself{where} and would stay dense; {_WHAT_TO_USE}{converted}"
    if not layers:
        return (
            f"{name} has no attention layer that ds_sparse knows by its projections, and would stay dense; "
            f"{_WHAT_TO_USE}"
        )
    crossing = _cross_attention(layers)
    if crossing or getattr(config, "add_cross_attention", False):
        return _with_cross_attention(model, named(crossing) if crossing else "its config says so")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"{name} has layers of {', '.join(sorted(kinds))}, a sparse structure of its own; train it as it is."
    foreign = {
        layer: module
        for layer, module in layers.items()
        if getattr(module, "config", None) is not config and not isinstance(module, nn.MultiheadAttention)
    }
    if foreign:
        return (
            f"{named(foreign)} of {name} does not read the model's config, where the structure is kept, and would stay "
            "dense; train the model dense."
        )
    if getattr(config, "output_attentions", False):
        return f"{name} has config.output_attentions, and {NAME} computes no attention probabilities; set it to False."
    in_parts = why_in_parts()
    if in_parts is not None:
        return f"{name} cannot be sparse: {in_parts}"
    return _why_not_by_trial(model, layers, around)


def _cross_attention(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The layers of a decoder that are not causal."""
    other = {name: layer for name, layer in layers.items() if not is_causal(layer)}
    return other if len(other) < len(layers) else {}


def _with_cross_attention(model: PreTrainedModel, where: str) -> OfDecoder:
    return OfDecoder(
        f"{type(model).__name__} has cross-attention ({where}), and {NAME} serves self-attention alone; train it dense."
    )


def _why_not_by_trial(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel]
) -> str | None:
    name, heads = type(model).__name__, getattr(model.config, "num_attention_heads", None)
    try:
        seen = _heads_in_a_trial(model, around)
    except OtherKeys as refusal:
        return _with_cross_attention(model, str(refusal))
    except Refused as refusal:
        return f"{name} cannot be sparse: {refusal}"
    except Untried as error:
        another = (
            "give ds_sparse.sparsify a part of the model without this one, or train it dense"
            if around
            else "if it is a part of a model, give ds_sparse.sparsify that, else train it dense"
        )
        return (
            f"{name} did not run on inputs that ds_sparse made up, without data, to see what its attention does "
            f"({error}); {another}."
        )
    layers = self_attention(layers)
    dropping = {
        layer: module
        for layer, module in layers.items()
        if local_attention_of(module) is not None and getattr(module, "attention_dropout", False)
    }
    if dropping:
        return (
            f"{named(dropping)} of {name} is local and drops attention probabilities, which window attention does not; "
            "set config.attention_dropout to 0."
        )
    silent = {layer: module for layer, module in layers.items() if module not in seen}
    if silent:
        return f"{named(silent)} of {name} did not call the attention function, and would stay dense; {_WHAT_TO_USE}"
    unknown = {layer: module for layer, module in model.named_modules() if module in seen.keys() - set(layers.values())}
    if unknown:
        return (
            f"{name} has an attention that ds_sparse does not know by its projections ({named(unknown)}); train it "
            "dense."
        )
    other = {layer: module for layer, module in layers.items() if seen[module] != heads}
    if other:
        return (
            f"{named(other)} of {name} has {seen[next(iter(other.values()))]} attention heads and the config says "
            f"{heads}, for which the structure is made; train it dense."
        )
    return None


def _heads_in_a_trial(model: PreTrainedModel, around: Sequence[PreTrainedModel]) -> dict[nn.Module, int]:
    """The modules of a model that called `attention` in a trial of it, or of one around it, with their number of query
    heads."""
    heads: dict[nn.Module, int] = {}
    windows: dict[str, Window] = {}

    def prepare(tried: PreTrainedModel, double: PreTrainedModel) -> None:
        for (name, module), twin in zip(tried.named_modules(), double.modules(), strict=True):
            noting: Any = functools.partial(_note, heads, name, module)
            if isinstance(module, nn.MultiheadAttention):
                twin.register_forward_pre_hook(functools.partial(_note_across, module), with_kwargs=True)
            twin._ds_sparse = Attached(None, Length(0, False), noting, name)
            if module is model:
                set_config(twin.config, {})
                twin.config._attn_implementation_internal = NAME
                windows.clear()
                Masks(windows).note_in(twin.config)

    problems: list[Untried] = []
    for tried in (model, *around):
        heads.clear()
        try:
            run_trial(tried, functools.partial(prepare, tried))
            if problems and not heads:  # this one ran without the model
                continue
            for name, window in windows.items():
                note_window(tried.get_submodule(name), window)
            return heads
        except Untried as error:
            problems.append(error)
    raise problems[0]


def _note_across(module: nn.Module, twin: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
    """Forward hook of an nn.MultiheadAttention in a trial."""
    query, key = (
        named.get(name, arguments[n] if n < len(arguments) else None) for n, name in enumerate(("query", "key"))
    )
    if query is not None and key is not None and query.shape != key.shape:
        _across.add(module)


def _note(
    heads: dict[nn.Module, int],
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Stands for StructuredAttention in a trial."""
    try:
        check_attention_operands(query, key, value)
    except ValueError as error:
        raise Refused(f"{named({name: module})} gives the attention what it does not take. {error}") from error
    if causal:
        note_causal(module)
    heads[module] = query.shape[1]
    return torch.empty_like(query)
