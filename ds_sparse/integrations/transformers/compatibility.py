"""Finds which Transformers models can be sparse, and which of their layers: by source, config and a trial.

A trial runs a copy of the model, without computing: what its layers ask of the attention function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...models.trial import TOKENS, Input, fake_copy, first_line, floating_dtype, in_trial
from ...ops.operands import check_attention_operands
from ..transformers_family import NAME, models_around, through_interface
from .binding import (
    Attached,
    Length,
    OtherKeys,
    Refused,
    Window,
    chosen_blocks_of,
    is_causal,
    named,
    seen_across,
    seen_causal,
    seen_operands,
    seen_options,
    seen_windows,
    set_config,
)
from .functions import OWN_WAY
from .masks import Masks

SAMPLES = 8000
"""Audio samples of a trial: half a second."""

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
"""Advice for models with a sparse attention of their own, by the model_type of their config."""

_EXCHANGES = {
    "deepspeed.runtime.sequence_parallel.ulysses_sp": "DeepSpeed's UlyssesSPAttentionHF",
    "accelerate.utils.sequence_parallel": "accelerate's sequence parallelism",
}
"""Libraries that exchange heads around attention functions of Transformers, by module."""


_LAYER_TYPES = {"full_attention", "sliding_attention", "minimax_m3_sparse"}
"""What is computed: all keys, a window, and the blocks that an indexer chooses."""


class Untried(Exception):
    """The model did not run on made-up inputs; the text is its error."""


class OfDecoder(str):
    """The reason why a decoder with cross-attention cannot be sparse, which may stay dense beside its encoder."""


class Roles(NamedTuple):
    """The attention layers in a model.

    Attributes:
        sparse: those that become sparse, by the innermost Transformers model around them and by name.
        dense: those that stay dense, by why.
        decoders: the Transformers models that stay dense, which have cross-attention.
    """

    sparse: dict[PreTrainedModel, dict[str, nn.Module]]
    dense: dict[str, dict[str, nn.Module]]
    decoders: list[PreTrainedModel]


def roles(model: nn.Module, layers_of: Mapping[PreTrainedModel, Mapping[str, nn.Module]]) -> Roles:
    """Decides what each of the Transformers models in a model becomes. A decoder with cross-attention stays dense
    beside its encoder.

    Raises:
        ValueError: one cannot be sparse, or none would be.
    """
    reasons = {owner: why_not(owner, layers, models_around(model, owner)) for owner, layers in layers_of.items()}
    given = [reason for reason in reasons.values() if reason is not None]
    refused = [reason for reason in given if not isinstance(reason, OfDecoder)]
    sparse = {owner: _self_attention(layers) for owner, layers in layers_of.items() if reasons[owner] is None}
    if refused or (layers_of and not sparse):
        raise ValueError((refused or given)[0])
    decoders = [owner for owner, reason in reasons.items() if isinstance(reason, OfDecoder)]
    dense: dict[str, dict[str, nn.Module]] = {}
    for owner in decoders:
        dense.setdefault(f"{type(owner).__name__} has cross-attention", {}).update(layers_of[owner])
    for owner in sparse:
        across = {name: layer for name, layer in layers_of[owner].items() if layer in seen_across}
        if across:
            why = "cross-attention: its keys are of another sequence than its queries"
            dense.setdefault(why, {}).update(across)
    return Roles(sparse, dense, decoders)


def _self_attention(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: layer for name, layer in layers.items() if layer not in seen_across}


def why_not(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel] = ()
) -> str | None:
    """The sentence that says why attention layers of a model cannot be sparse; None where they can, and then every
    forward that raises no error computes them so.

    Args:
        model: the innermost PreTrainedModel around the layers.
        around: the models around it; one of them is tried where `model` takes inputs that only they give it.
    """
    name, config = type(model).__name__, model.config
    if not through_interface(model):
        where = f" ({named(layers)})" if layers else ""
        converted = _CONVERTED.get(config.model_type, "")
        return f"{name} computes its attention itself{where} and would stay dense; {_WHAT_TO_USE}{converted}"
    of_tokens = {
        layer: module
        for layer, module in model.named_modules()
        if layer.rpartition(".")[2] == "indexer" and not hasattr(module, "block_size")
    }
    if of_tokens:
        return (
            f"{name} has an indexer that chooses tokens ({named(of_tokens)}), of which Transformers makes a mask of "
            f"pairs; {NAME} takes chosen blocks, as those of MiniMax-M3; train it as it is."
        )
    if not layers:
        return (
            f"{name} has no attention layer that ds_sparse knows by its projections, and would stay dense; "
            f"{_WHAT_TO_USE}"
        )
    crossing = {name: layer for name, layer in layers.items() if not is_causal(layer)}
    if len(crossing) < len(layers) and crossing:
        return _with_cross_attention(model, named(crossing))
    if getattr(config, "add_cross_attention", False):
        return _with_cross_attention(model, "its config says so")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
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
    for function_name, function in ALL_ATTENTION_FUNCTIONS.items():
        exchange = _EXCHANGES.get(getattr(function, "__module__", ""))
        if exchange is not None:
            return (
                f"{name} cannot be sparse: {exchange} exchanges heads around the attention function {function_name!r} "
                f"for batches in parts, whose padding and packed documents do not come to sparse layers; {OWN_WAY}"
            )
    return _why_not_by_trial(model, layers, around)


def _with_cross_attention(model: PreTrainedModel, where: str) -> OfDecoder:
    return OfDecoder(
        f"{type(model).__name__} has cross-attention ({where}), and {NAME} serves self-attention alone; train it dense."
    )


def _why_not_by_trial(
    model: PreTrainedModel, layers: Mapping[str, nn.Module], around: Sequence[PreTrainedModel]
) -> str | None:
    name, heads = type(model).__name__, getattr(model.config, "num_attention_heads", None)
    try:
        seen = _heads_in_a_trial(model, set(layers.values()), around)
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
    layers = _self_attention(layers)
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


def _heads_in_a_trial(
    model: PreTrainedModel, layers: set[nn.Module], around: Sequence[PreTrainedModel]
) -> dict[nn.Module, int]:
    """The modules of a model that called `attention` in a trial of it, or of one around it, with their number of query
    heads. Of its layers each itself, but not what is inside, is in training, and so asks for dropout."""
    heads: dict[nn.Module, int] = {}
    windows: dict[str, Window] = {}

    def prepare(tried: PreTrainedModel, double: PreTrainedModel) -> None:
        for (name, module), twin in zip(tried.named_modules(), double.modules(), strict=True):
            noting: Any = functools.partial(_note, heads, name, module)
            if isinstance(module, nn.MultiheadAttention):
                twin.register_forward_pre_hook(functools.partial(_note_across, module), with_kwargs=True)
            elif module in layers:
                twin.training = True
            twin._ds_sparse = Attached(None, Length(0, False), noting, name)
            if module is model:
                set_config(twin.config, {})
                twin.config._attn_implementation_internal = NAME
                windows.clear()
                Masks(twin.config, windows)

    problems: list[Untried] = []
    for tried in (model, *around):
        heads.clear()
        try:
            _run(tried, functools.partial(prepare, tried))
            if problems and not heads:  # this one ran without the model
                continue
            seen_windows.update((tried.get_submodule(name), window) for name, window in windows.items())
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
        seen_across.add(module)


def _note(
    heads: dict[nn.Module, int],
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool = False,
    block_indices: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Stands for StructuredAttention in a trial."""
    chosen = chosen_blocks_of(module)
    try:
        check_attention_operands(query, key, value)
        if chosen is not None and block_indices is not None:
            chosen(query, key, value, block_indices=block_indices, dropout_p=options.get("dropout_p", 0.0))
    except ValueError as error:
        raise Refused(f"{named({name: module})} gives the attention what it does not take. {error}") from error
    if causal and not is_causal(module):
        seen_causal.add(module)
    heads[module], seen_operands[module] = query.shape[1], (key.shape[1], key.shape[3])
    given = {name: x for name, x in options.items() if name != "key_padding_mask" and x is not None}
    kept = {name: True if isinstance(x, torch.Tensor | nn.Module) else x for name, x in given.items()}
    seen_options[module] = kept  # without fake tensors, which the copy's modules have, too
    return torch.empty_like(query)


def _run(model: nn.Module, prepare: Callable[[nn.Module], None]) -> None:
    """Runs a copy of a PreTrainedModel without weights, in eval mode, on fake tensors: a batch of two sequences.
    Nothing is computed, and neither the model nor its hooks notice.

    Args:
        prepare: is called with the copy before it runs; its modules come in the same order.

    Raises:
        Refused: a layer or a mask asks for what is not computed.
        Untried: the model runs on none of the inputs that its forward and its config let one make up.
    """
    problem: Exception | None = None
    for inputs in _inputs(model):
        try:
            in_trial(model, functools.partial(_run_copy, model, prepare, inputs))
            return
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001  code that is not ours, on inputs that it does not expect
            problem = problem or error  # of the likeliest inputs
    if problem is None:
        problem = TypeError(f"its forward takes ({', '.join(inspect.signature(model.forward).parameters)})")
    if isinstance(problem, DataDependentOutputException):
        raise Untried("its forward reads a number of a tensor, as .item() does, and there is none") from problem
    if 'device "meta"' in str(problem):  # that of fake tensors, in PyTorch's words
        raise Untried("its forward works on the memory of its tensors, and there is none") from problem
    raise Untried(first_line(problem)) from problem


def _run_copy(model: nn.Module, prepare: Callable[[nn.Module], None], inputs: dict[str, Input]) -> None:
    double = fake_copy(model, without="_ds_sparse")
    for module in double.modules():
        config: Any = getattr(module, "config", None)
        # Mixtures of experts run as fake tensors can: other ways read values, or want bf16 of them.
        if hasattr(config, "_experts_implementation_internal"):
            config._experts_implementation_internal = "batched_mm"
    prepare(double)
    double(**{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in inputs.items()})


def _inputs(model: nn.Module) -> Iterator[dict[str, Input]]:
    """Inputs that a model may take, the likeliest first."""
    taken, config = inspect.signature(model.forward).parameters, model.config
    dtype = floating_dtype(model)
    mask = {"attention_mask": ((2, TOKENS), torch.int64)} if "attention_mask" in taken else {}
    ids = {name: ((2, TOKENS), torch.int64) for name in ("input_ids", "decoder_input_ids") if name in taken}
    pictures = [(name, shape) for name in ("pixel_values", "pixel_values_videos") for shape in _pictures(config, name)]
    sounds = [(name, shape) for name in ("input_features", "input_values") for shape in _sounds(config)]
    width: Any = getattr(config, "hidden_size", None)
    names = ("inputs_embeds", "hidden_states") if isinstance(width, int) else ()
    states = [(name, (2, TOKENS, width)) for name in names]
    others = [(name, shape) for name, shape in (*pictures, *sounds, *states) if name in taken]
    first = [(name, shape) for name, shape in others if name == model.main_input_name]
    if ids and not first:
        yield {**ids, **mask}
        yield from ({**ids, **mask, name: (shape, dtype)} for name, shape in others if not name.startswith("inputs_"))
    for name, shape in first + others:
        yield {name: (shape, dtype)} | (mask if shape[1:2] == (TOKENS,) else {})
    if ids and first:
        yield {**ids, **mask}


def _pictures(config: Any, name: str) -> list[tuple[int, ...]]:
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels, frames = getattr(config, "num_channels", 3), getattr(config, "num_frames", None)
    still = (2, channels, height, width)
    return [(2, frames, channels, height, width), still] if frames else [still]


def _sounds(config: Any) -> list[tuple[int, ...]]:
    bins = [getattr(config, name, None) for name in ("num_mel_bins", "input_feat_per_channel", "feat_in", "input_dim")]
    frames = 2 * getattr(config, "max_source_positions", 128)
    shapes = [shape for n in bins if n for shape in ((2, n, frames), (2, getattr(config, "max_length", 128), n))]
    return [*shapes, (2, SAMPLES), (2, 1, SAMPLES)]
