"""Making a Transformers model sparse, and dense again: by `sparsify`, or where it takes the name.

Where it takes the name, one that would stay dense, or fail later, is refused.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from ...config import BLOCK_KEY, LayerStructures
from ...models.report import NULL, Change, Kind, describe
from ...modules.chosen_attention import LearnedAttention
from ...modules.chosen_blocks import ChosenBlocks
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention
from ...tools.notices import say_notices
from ..transformers_family import NAME, layers_by_model, models_around, through_interface
from .binding import (
    CONFIG_KEYS,
    MAX_SEQ_LENGTH_KEY,
    Attention,
    Length,
    OwnAttention,
    Unrepeatable,
    attach,
    attention_of_each,
    chosen_blocks_of,
    is_causal,
    learned_of_each,
    own_attention_of,
    set_config,
    structures_in,
    take_distances,
    take_learned,
)
from .compatibility import roles, why_not
from .packing import watch


def activate(
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    attentions: Mapping[str, Attention],
    learned: Mapping[str, LearnedAttention],
) -> list[RemovableHandle]:
    """Has what computes in each compute in attention layers of a model whose config has our name: the one place that
    makes them sparse. Returns the hooks on the model."""
    attach(model.config, layers, attentions, learned)
    of_causal = dict.fromkeys(attentions[name] for name, layer in layers.items() if is_causal(layer))
    name = type(model).__name__
    notices = [
        f"{name} is causal: {type(x.sparsity_config).__name__} has blocks above the diagonal, which are left out, and "
        "inside blocks no token sees one after it."
        for x in of_causal
        if isinstance(x, StructuredAttention) and not x.chooses and x.layout.triu(1).any()
    ]
    if of_causal and all(isinstance(x, LocalAttention) for x in of_causal):
        notices.append(f"All attention layers of {name} have a sliding window of their own; none uses the structure.")
    elif of_causal and all(isinstance(x, OwnAttention) for x in of_causal) and hasattr(model.config, BLOCK_KEY):
        notices.append(f"{name} chooses the blocks of all its attention layers itself; none uses the structure.")
    say_notices(notices)  # each once a process
    return watch(model)


def give_own_configs(model: nn.Module) -> None:
    """Puts copies in the place of the configs in a model: one made by `BertModel(config)` holds its caller's, which
    other models may hold too. What is one config in the model stays one."""
    holders = [module for module in model.modules() if isinstance(vars(module).get("config"), PreTrainedConfig)]
    for module, config in zip(holders, copy.deepcopy([module.config for module in holders]), strict=True):
        module.config = config


class OwnConfigs(Change):
    """A change without layers, before those of a model: `give_own_configs`, which stays."""

    def __init__(self, model: nn.Module):
        self._model = model

    def on(self) -> None:
        give_own_configs(self._model)


def give_encoder_its_config(encoder: PreTrainedModel, decoders: list[PreTrainedModel]) -> PreTrainedModel | None:
    """Puts a copy of its config into an encoder whose decoder has the same one, as in BART, so that each has an
    attention implementation of its own. Returns the config that it had, None where nothing was done."""
    config = encoder.config
    if all(decoder.config is not config for decoder in decoders):
        return None
    _exchange_config(encoder, config, copy.deepcopy(config))
    return config


def _exchange_config(model: PreTrainedModel, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


class Switch(Change):
    """A Transformers model that `on` makes sparse and `off` dense again.

    Args:
        model: the innermost PreTrainedModel around the layers.
        around: the Transformers models around it, whose configs are saved; of these, a config of the same class gets
            the structure too (T5's encoder may have a copy).
        max_seq_length: tokens that layouts are built for; by default those of the config.
        decoders: the models beside it that stay dense, which may have the same config.

    Raises:
        ValueError: a structure has no layout of that length, or `layers` of the block name a layer that there is not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        around: Sequence[PreTrainedModel],
        structures: LayerStructures,
        max_seq_length: int | None = None,
        decoders: Sequence[PreTrainedModel] = (),
    ):
        self.model, self.layers, self._decoders = model, layers, list(decoders)
        self._holders = [model, *(outer for outer in around if type(outer.config) is type(model.config))]
        self._implementation = model.config._attn_implementation
        self._length = Length.of(model.config, max_seq_length)
        self._entries: dict[str, Any] = {} if max_seq_length is None else {MAX_SEQ_LENGTH_KEY: max_seq_length}
        self.not_saved: str | None = None
        """Why the structure cannot be saved with the model; None where it can."""
        name = type(model).__name__
        try:
            block: dict[str, Any] | None = structures.block()
        except ValueError as error:
            self.not_saved, block = str(error), None
        try:
            self._attentions = attention_of_each(layers, structures, self._length, name, shared=block is not None)
        except Unrepeatable as error:
            self.not_saved, block = str(error), None
            self._attentions = attention_of_each(layers, structures, self._length, name, shared=False)
        if block is not None:
            self._entries[BLOCK_KEY] = block
        self._learned = learned_of_each(layers, self._attentions)
        alike: dict[Attention, dict[str, nn.Module]] = {}
        for layer, attention in self._attentions.items():
            alike.setdefault(attention, {})[layer] = layers[layer]
        self.kinds = [self._kind(attention, those) for attention, those in alike.items()]

    def _kind(self, attention: Attention, layers: dict[str, nn.Module]) -> Kind:
        was = [f"{type(layer).__name__}, {self._implementation}" for layer in layers.values()]
        now = [f"{type(layer).__name__}, {NAME}" for layer in layers.values()]
        if isinstance(attention, LocalAttention):
            side = "before each" if any(map(is_causal, layers.values())) else "on each side"
            return Kind(layers, was, now, f"the model's own window, {attention.window} tokens {side}")
        if isinstance(attention, ChosenBlocks):
            return Kind(layers, was, now, f"the model's own choice of blocks, of {attention.block} keys")
        if isinstance(attention, StructuredAttention):
            what = describe(attention, [self._learned.get(layer) for layer in layers])
            return Kind(layers, was, now, what, attention=attention)
        return Kind(layers, was, was, NULL, sparse=False)

    def on(self) -> None:
        self._shared_config = give_encoder_its_config(self.model, self._decoders)
        configs = {id(holder.config): holder.config for holder in self._holders}.values()
        self._before = [(c, {key: vars(c)[key] for key in CONFIG_KEYS if key in vars(c)}) for c in configs]
        for config in configs:
            set_config(config, self._entries)
        _set_unchecked(self.model, NAME)
        self._hooks = activate(self.model, self.layers, self._attentions, self._learned)
        self._hooks += [layer.register_forward_hook(_check_is_switched) for layer in self.layers.values()]

    def off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers.values():
            del layer._ds_sparse
            take_learned(layer)
        take_distances(self.layers.values())
        for config, entries in self._before:
            set_config(config, entries)
        self.model.set_attn_implementation(self._implementation)
        if self._shared_config is not None:
            _exchange_config(self.model, self.model.config, self._shared_config)


def _check_is_switched(layer: nn.Module, arguments: tuple, output: Any) -> None:
    """Forward hook: nobody has switched the layer to another implementation since, with which it has run."""
    config: Any = layer.config
    attached, implementation = vars(layer).get("_ds_sparse"), config._attn_implementation
    if attached is not None and implementation != NAME:
        raise RuntimeError(
            f"layer {attached.name} ({type(layer).__name__}) ran without {NAME}: its attention implementation is "
            f"{implementation!r}. The model is not sparse; call undo() of what ds_sparse.sparsify returned to train it "
            "dense."
        )


def _settle(model: PreTrainedModel, one_by_one: bool = False) -> None:
    """Makes what has our name in a model sparse, and what stays dense beside it dense by name too.

    Args:
        one_by_one: the parts of the model were named, so each has to be sparse.
    """
    found = roles(model, {owner: layers for owner, layers in layers_by_model(model).items() if _has_name(owner)})
    if one_by_one and found.decoders:
        raise ValueError(why_not(found.decoders[0], layers_by_model(model)[found.decoders[0]]))
    for owner, layers in found.sparse.items():
        give_encoder_its_config(owner, found.decoders)
        config, name = owner.config, type(owner.config).__name__
        with torch.device("cpu"):  # Transformers makes models that it loads on the meta device
            attentions = attention_of_each(layers, _structures_or_none(config, layers), Length.of(config), name)
            activate(owner, layers, attentions, learned_of_each(layers, attentions))
    for decoder in found.decoders:
        others = [
            outer for outer in models_around(model, decoder) if getattr(outer.config, "is_encoder_decoder", False)
        ]
        for dense in (decoder, *others):
            dense.config._attn_implementation_internal = _accepted(dense, None)
    say_notices(
        f"{type(model).__name__}: {len(layers)} attention layers stay dense: {why}."
        for why, layers in found.dense.items()
    )


def _structures_or_none(config: PreTrainedConfig, layers: Mapping[str, nn.Module]) -> LayerStructures | None:
    """The structures that a config says; None where it says none of a model that chooses blocks itself in some layers.

    Raises:
        ValueError: as `structures_in`.
    """
    if getattr(config, BLOCK_KEY, None) is not None or not any(map(chosen_blocks_of, layers.values())):
        return structures_in(config)
    dense = sum(own_attention_of(layer) is None for layer in layers.values())
    if dense:
        say_notices(
            [
                f"{dense} of {len(layers)} attention layers stay dense: their model chooses no blocks for them, and "
                f"{type(config).__name__} has no {BLOCK_KEY}. ds_sparse.sparsify gives them a structure."
            ]
        )
    return None


def _has_name(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == NAME


def _is_being_made() -> bool:
    """Tells whether the constructor of a Transformers model calls this that another one contains: that one settles
    both."""
    frame: FrameType | None = sys._getframe(1)
    making = set()
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            making.add(id(frame.f_locals["self"]))
        frame = frame.f_back
    return len(making) > 1


_accepted = PreTrainedModel.get_correct_attn_implementation
_post_init = PreTrainedModel.post_init
_initialize_weights = PreTrainedModel._initialize_weights
_set_unchecked = PreTrainedModel.set_attn_implementation


@functools.wraps(_accepted)
def _accepted_where_used(self: PreTrainedModel, requested_attention: str | None, *more: Any, **named: Any) -> str:
    if requested_attention == NAME and not through_interface(self):  # its layers may not even be made by this name
        raise ValueError(why_not(self, {}))
    return _accepted(self, requested_attention, *more, **named)


@functools.wraps(_post_init)
def _post_init_and_check(self: PreTrainedModel) -> None:
    _post_init(self)
    named = [module for module in self.modules() if isinstance(module, PreTrainedModel) and _has_name(module)]
    if named and not _is_being_made():
        _settle(self)


@functools.wraps(_initialize_weights)
def _initialize_weights_and_learned(self: PreTrainedModel, module: nn.Module, *more: Any, **named: Any) -> None:
    done = getattr(module, "_is_hf_initialized", False)
    _initialize_weights(self, module, *more, **named)
    if isinstance(module, LearnedAttention) and not done:
        loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
        module.reset_parameters()
        for parameter, values in loaded:
            parameter.copy_(values)


@functools.wraps(_set_unchecked)
def _set_attn_implementation_and_check(
    self: PreTrainedModel, attn_implementation: str | dict, *more: Any, **named: Any
) -> None:
    configs = {id(module.config): module.config for module in self.modules() if isinstance(module, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        _set_unchecked(self, attn_implementation, *more, **named)
        if attn_implementation == NAME:
            for model in layers_by_model(self):
                model.config._attn_implementation_internal = NAME
        _settle(self, one_by_one=isinstance(attn_implementation, dict))
    except ValueError:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        raise


# Transformers takes a registered name for every model, also for one that never calls the function.
PreTrainedModel.get_correct_attn_implementation = _accepted_where_used
PreTrainedModel.post_init = _post_init_and_check
PreTrainedModel._initialize_weights = _initialize_weights_and_learned  # of what a loaded model has not
PreTrainedModel.set_attn_implementation = _set_attn_implementation_and_check
