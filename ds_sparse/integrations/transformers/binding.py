"""State of ours on a layer of a Transformers model: the structure that its config says, with its layouts."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...config import BLOCK_KEY, LAYERS_KEY, LayerStructures, SparseAttentionConfigError, read_block
from ...config.block import beyond, layers_of
from ...modules.chosen_attention import LEARNED, LearnedAttention, learned_attention, refuse_options
from ...modules.chosen_blocks import ChosenBlocks
from ...modules.dense_attention import dense_attention
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...sparsity import SparsityConfig, adds_parameters
from ...sparsity.declarations import declared_value
from ...sparsity.draws import Draws, draws, why_unrepeatable
from ...tools.wording import or_cannot_be_sparse, show
from ..transformers_family import NAME

MAX_SEQ_LENGTH_KEY = f"{BLOCK_KEY}_max_seq_length"
CONFIG_KEYS = (BLOCK_KEY, MAX_SEQ_LENGTH_KEY)
"""Keys that we write to a config."""


FIRST_LENGTH = 2048
"""Tokens that the layout of a model without a longest sequence is first built for; it doubles with the batch."""

OwnAttention = LocalAttention | ChosenBlocks
"""The attention of a layer that takes no structure: the model gives it a window, or chooses its blocks."""

Attention = StructuredAttention | OwnAttention | Callable[..., torch.Tensor]
"""The attention of a layer: blocks of a structure, one of its own, or `dense_attention`."""


class Refused(ValueError):
    """The attention or the mask function was called for what it does not compute."""


class OtherKeys(Refused):
    """It was called for the keys of another sequence than that of the queries."""


class Call(NamedTuple):
    """A layer's call of the attention function: operands (B, H, T, D) and options, by our names."""

    layer: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scale: float | None
    dropout_p: float
    sinks: torch.Tensor | None
    position_bias: torch.Tensor | None
    causal: bool
    chosen: torch.Tensor | None = None
    softcap: float = 0.0


class Window(NamedTuple):
    """The window of a layer, as a trial has seen it.

    Attributes:
        asked: the `sliding_window` that the layer asks the attention for.
        local: what computes it; None where the layer's mask hides nothing by distance.
    """

    asked: int | None = None
    local: LocalAttention | None = None


@dataclass
class Attached:
    """State that the attention function keeps on a layer."""

    block: dict[str, Any] | None  # what the config said when `attention` was made; None: a structure that has no block
    length: Length
    attention: Attention
    name: str = ""
    number: int | None = None  # of the layer, among the attention layers of its model; None: not known
    window: Window = field(default_factory=Window)

    def __post_init__(self):
        self.block = copy.deepcopy(self.block)  # the config's own may be edited in place


_made: weakref.WeakValueDictionary[tuple, StructuredAttention] = weakref.WeakValueDictionary()
"""Attentions that layers which say the same share."""


def attach(
    config: PreTrainedConfig,
    layers: Mapping[str, nn.Module],
    attentions: Mapping[str, Attention],
    learned: Mapping[str, LearnedAttention],
) -> None:
    """Gives the attention layers of a model, which has this config, what computes in each, and the modules of
    `learned_of_each`."""
    block, length = getattr(config, BLOCK_KEY, None), Length.of(config)
    for number, (name, layer) in enumerate(layers.items()):
        vars(layer)["_ds_sparse"] = Attached(block, length, attentions[name], name, number, window_of(layer))
        take_learned(layer)
        if name in learned:
            layer.add_module(LEARNED, learned[name])
    give_distances(layers.values())


def learned_of_each(
    layers: Mapping[str, nn.Module], attentions: Mapping[str, Attention]
) -> dict[str, LearnedAttention]:
    """Makes the modules with the parameters that structures add to layers, by name, on their device and of their dtype.
    Parameters that a layer has already are taken over where their shapes are the same.

    Raises:
        ValueError: a structure that does not fit its layer; parameters of which each rank has a part.
    """
    return {
        name: _learned_of(name, layer, getattr(attentions[name], "sparsity_config", None))
        for name, layer in layers.items()
        if adds_parameters(getattr(attentions[name], "sparsity_config", None))
    }


def _learned_of(name: str, layer: nn.Module, structure: Any) -> LearnedAttention:
    with or_cannot_be_sparse(named({name: layer})):
        made = learned_attention(structure, *seen_operands[layer], causal=is_causal(layer), like=layer)
    before = vars(layer)["_modules"].get(LEARNED)
    if before is not None and _shapes(before) == _shapes(made):
        made.load_state_dict(before.state_dict(keep_vars=True), assign=True)
    if not any(parameter.is_meta for parameter in made.parameters()):
        for module in made.modules():
            vars(module)["_is_hf_initialized"] = True  # else models around this one would draw the parameters anew
    return made


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def take_learned(layer: nn.Module) -> None:
    """Takes the module with parameters of a structure from a layer, if it has one."""
    if LEARNED in vars(layer)["_modules"]:
        delattr(layer, LEARNED)


def attention_of_each(
    layers: Mapping[str, nn.Module],
    structures: LayerStructures | None,
    length: Length,
    model: str,
    shared: bool = True,
) -> dict[str, Attention]:
    """Makes what computes in each attention layer of a model of this name.

    Args:
        structures: None leaves the layers dense that have no attention of their own.
        shared: with the layers of other models that say the same; the structures then have a block.

    Raises:
        ValueError: a structure has no layout of that length; `layers` of the block name a layer that there is not, or
            layers alone that take no structure; a layer that asks for what its structure does not compute.
    """
    if structures is None:
        return {name: own_attention_of(layer) or dense_attention for name, layer in layers.items()}
    _check_entries(structures.entries, list(layers.values()), model)
    made: dict[int, StructuredAttention] = {}
    attentions: dict[str, Attention] = {}
    for number, (name, layer) in enumerate(layers.items()):
        own, structure = own_attention_of(layer), structures.of(number)
        asked = seen_options.get(layer, {})
        with or_cannot_be_sparse(named({name: layer})):
            if own is None:
                refuse_options(structure, **asked | {"causal": is_causal(layer)})
        if own is None and structure is not None and id(structure) not in made:
            block = structures.block_of(number) if shared else None
            made[id(structure)] = _attention_on(structure, block, length)
        attentions[name] = own or (dense_attention if structure is None else made[id(structure)])
    return attentions


def structures_in(config: PreTrainedConfig) -> LayerStructures:
    """The structures that the config of a model says.

    Raises:
        ValueError: it says none; they are wrong.
    """
    of: Any = config
    block = getattr(config, BLOCK_KEY, None)
    if block is None:
        raise ValueError(
            f"{type(config).__name__} has no {BLOCK_KEY}; set it before the model takes the name {NAME}, as in "
            f'config.{BLOCK_KEY} = {{"mode": "fixed", "block": 16}}, or call ds_sparse.sparsify, which does.'
        )
    return read_block(block, of.num_attention_heads, source=type(config).__name__)


def attached_to(layer: nn.Module) -> Attached:
    """State on a layer, made from its config when it is first used or the config has changed since."""
    config: Any = layer.config
    attached: Attached | None = vars(layer).get("_ds_sparse")
    block = getattr(config, BLOCK_KEY, None)
    if attached is not None and attached.block == block and (block is None or attached.length == Length.of(config)):
        return attached
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"config.{BLOCK_KEY} has changed since the model was made sparse, and torch.compile cannot trace what "
            "makes a layout of it; call the model once before."
        )
    structures, length = structures_in(config), Length.of(config)
    if any(map(adds_parameters, structures.all())) or LEARNED in vars(layer)["_modules"]:
        raise ValueError(
            f"config.{BLOCK_KEY} has changed, or was never read, and the structure that it says or said adds "
            f'parameters to layers; call model.set_attn_implementation("{NAME}") before the optimizer is made.'
        )
    name, number = (attached.name, attached.number) if attached is not None else ("", None)
    if structures.entries and number is None:
        raise ValueError(
            f"config.{BLOCK_KEY} has structures by layer, and {type(layer).__name__} does not know which layer it is; "
            f'call model.set_attn_implementation("{NAME}"), which numbers them.'
        )
    structure, attention = structures.of(number or 0), own_attention_of(layer) or dense_attention
    if structure is not None and attention is dense_attention:
        attention = _attention_on(structure, structures.block_of(number or 0), length)
    attached = vars(layer)["_ds_sparse"] = Attached(block, length, attention, name, number, window_of(layer))
    return attached


def _attention_on(structure: SparsityConfig, block: dict[str, Any] | None, length: Length) -> StructuredAttention:
    """The attention that layers of any model share which say this block; without a block a new one.

    Raises:
        ValueError: the structure has no layout of this length.
        Unrepeatable: ranks would draw other blocks, and so would the model when it is loaded.
    """
    tokens = whole_blocks(length.tokens, structure.block)
    key = (type(structure), json.dumps(block, sort_keys=True), structure.num_heads, tokens, length.doubles)
    attention = None if block is None else _made.get(key)
    if attention is None:
        attention = StructuredAttention(structure, tokens, doubles=length.doubles, gives_learned=True)
        how = None if block is None else draws(structure, attention.max_seq_length)
        if how is Draws.UNREPEATABLY:
            raise Unrepeatable(why_unrepeatable(structure))
        if how is Draws.BY_SEED and declared_value(structure, "seed") is None:
            raise Unrepeatable(
                f"{type(structure).__name__} has random blocks and no seed, so they would differ between ranks and "
                f'after loading; add one to config.{BLOCK_KEY}, such as "seed": 0.'
            )
        if block is not None:
            _made[key] = attention
    return attention


seen_causal: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that do not say so themselves, and were seen in a trial to ask for causal attention, as those of CLIP's
text model do."""

seen_windows: weakref.WeakKeyDictionary[nn.Module, Window] = weakref.WeakKeyDictionary()
"""Windows that a trial has seen: what a layer and its config say of one need not be what it asks for."""

seen_operands: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The number of key heads and the size of heads that a layer had in a trial."""

seen_options: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The options that a layer gave its attention in a trial, as in training: numbers, and True in the place of tensors
and modules."""

seen_across: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that were seen in a trial to attend to another sequence than that of their queries, as where a learned
query gathers a picture into one token."""


def is_causal(layer: nn.Module) -> bool:
    """Tells whether a layer's tokens see none after them, as its model says."""
    if layer in seen_causal:
        return True
    config: Any = getattr(layer, "config", None)
    return bool(getattr(layer, "is_causal", False)) and getattr(config, "is_causal", True)


def window_of(layer: nn.Module) -> Window:
    """The window of a layer, that of the original where it is a copy; of a layer that sees all, or was never tried, one
    without an attention of its own."""
    attached: Attached | None = vars(layer).get("_ds_sparse")
    return seen_windows.get(layer, Window() if attached is None else attached.window)


def chosen_blocks_of(layer: nn.Module) -> ChosenBlocks | None:
    """The attention of a layer whose indexer chooses blocks, and says how many keys one has; None for another."""
    block = getattr(getattr(layer, "indexer", None), "block_size", None)
    return None if block is None else ChosenBlocks(block)


def own_attention_of(layer: nn.Module) -> OwnAttention | None:
    """The attention of a layer that takes no structure; None for a layer that does."""
    return chosen_blocks_of(layer) or window_of(layer).local


def _check_entries(entries: Iterable[str], layers: Sequence[nn.Module], model: str) -> None:
    """Raises ValueError where the `layers` of a block name a layer that there is not, or layers alone that take no
    structure."""
    entries = list(entries)
    wrong = beyond(entries, len(layers), model)
    owning = {number: own for number, layer in enumerate(layers) if (own := own_attention_of(layer)) is not None}
    for key in () if wrong else entries:
        numbers = [number for part in layers_of(key) for number in part]
        if all(isinstance(owning.get(number), LocalAttention) for number in numbers):
            wrong.append(f"{show(key)}: local layers of {model}, which keep the window that the model gives them.")
        elif all(number in owning for number in numbers):
            wrong.append(f"{show(key)}: layers of {model} whose blocks the model chooses itself.")
    if wrong:
        raise SparseAttentionConfigError([f"{BLOCK_KEY}.{LAYERS_KEY}.{sentence}" for sentence in wrong])


class Unrepeatable(ValueError):
    """A structure that draws blocks at random and without a seed that repeats them."""


class Length(NamedTuple):
    """How long the layouts of a model are.

    Attributes:
        tokens: not yet in whole blocks.
        doubles: whether a longer batch gets a layout twice as long, as the model has no longest sequence.
    """

    tokens: int
    doubles: bool

    @classmethod
    def of(cls, config: PreTrainedConfig, max_seq_length: int | None = None) -> Length:
        """`max_seq_length`, else what the config says."""
        said = max_seq_length if max_seq_length is not None else getattr(config, MAX_SEQ_LENGTH_KEY, None)
        tokens = said if said is not None else getattr(config, "max_position_embeddings", None)
        return cls(FIRST_LENGTH if tokens is None else tokens, doubles=tokens is None)


def structure_of(layer: nn.Module) -> SparsityConfig | None:
    """The structure of a layer whose config has `attn_implementation="ds_sparse"`; None for a layer with a window or
    chosen blocks of the model's own, and for one that stays dense."""
    return getattr(attached_to(layer).attention, "sparsity_config", None)


def number_of(layer: nn.Module) -> int:
    """The number of a layer whose config has `attn_implementation="ds_sparse"`, among the attention layers of its
    model."""
    return attached_to(layer).number or 0


def set_config(config: PreTrainedConfig, entries: dict[str, Any]) -> None:
    for key in CONFIG_KEYS:
        if key in entries:
            setattr(config, key, entries[key])
        elif key in vars(config):
            delattr(config, key)


def which(module: nn.Module) -> str:
    attached = vars(module).get("_ds_sparse")
    return named({attached.name: module}) if attached is not None and attached.name else type(module).__name__


def named(layers: Mapping[str, nn.Module]) -> str:
    layer, module = next(iter(layers.items()))
    return f"layer {layer} ({type(module).__name__})"


_MAKER = "compute_bias"
"""The method of a layer of Transformers that makes the matrix."""

_TAKES = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


def makes_positions(layer: nn.Module) -> bool:
    """Tells whether a layer makes a matrix of relative positions, in the way of T5."""
    make: Any = getattr(type(layer), _MAKER, None)
    return callable(make) and list(inspect.signature(make).parameters) == _TAKES


def give_distances(layers: Iterable[nn.Module]) -> None:
    """Has attention layers that become sparse make biases by distance, while their config has our name."""
    for layer in layers:
        if makes_positions(layer) and _MAKER not in vars(layer):
            vars(layer)[_MAKER] = functools.partial(_make, layer)


def take_distances(layers: Iterable[nn.Module]) -> None:
    """Undoes `give_distances`."""
    for layer in layers:
        made = vars(layer).get(_MAKER)
        if isinstance(made, functools.partial) and made.func is _make:
            del vars(layer)[_MAKER]


def of_distances(position_bias: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
    """The bias by distance, (H, 2T - 1), that a layer was given as its positions, (1, H, 1, 2T - 1); None where it was
    given something else: a matrix has T rows."""
    if position_bias is None or position_bias.shape[-2:] != (1, 2 * tokens - 1) or len(position_bias) != 1:
        return None
    return position_bias[0, :, 0]


def _make(
    layer: Any,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: Any = 0,
) -> torch.Tensor:
    """`compute_bias`: (1, H, 1, 2T - 1) of T tokens, from the distance -(T - 1) to T - 1; what it was made for by its
    class where the layer is no longer sparse, or the keys are not those of the queries."""
    make = functools.partial(getattr(type(layer), _MAKER), layer)
    ours = layer.config._attn_implementation == NAME and query_length == key_length
    if not ours or not isinstance(past_seen_tokens, int) or past_seen_tokens != 0:
        return make(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
    # One query, in the middle of twice as many keys, has all distances.
    return make(1, 2 * key_length - 1, device=device, past_seen_tokens=key_length - 1)
