"""Making a Transformers model sparse, and dense again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...config import BLOCK_KEY, LayerStructures, block_of_layer, layer_structures_block
from ...models.report import NULL, Kind, describe
from ...modules.dense_attention import dense_attention
from ...modules.local_attention import LocalAttention
from ...modules.structured_attention import StructuredAttention
from ..pretrained import NAME
from .binding import (
    CONFIG_KEYS,
    MAX_SEQ_LENGTH_KEY,
    Attached,
    Attention,
    Length,
    Unrepeatable,
    attention_on,
    check_entries,
    local_attention_of,
    set_config,
    window_of,
)
from .causal import is_causal, say_what_is_cut
from .distances import give_distances, take_distances
from .doors import set_unchecked
from .packing import watch
from .roles import give_back, give_encoder_its_config


def give_own_configs(model: nn.Module) -> None:
    """Puts copies in the place of the configs in a model: one made by `BertModel(config)` holds its caller's, which
    other models may hold too. What is one config in the model stays one."""
    holders = [module for module in model.modules() if isinstance(vars(module).get("config"), PreTrainedConfig)]
    for module, config in zip(holders, copy.deepcopy([module.config for module in holders]), strict=True):
        module.config = config


class Switch:
    """A Transformers model that `on` makes sparse and `off` dense again.

    Args:
        model: the innermost PreTrainedModel around the layers.
        layers: its attention layers by name.
        around: the Transformers models around it, whose configs are saved; of these, a config of the same class gets
            the structure too (T5's encoder may have a copy).
        structures: for the model's number of heads, with a seed where they draw blocks.
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
        check_entries(structures.entries, list(layers.values()), type(model).__name__)
        block = self._written(structures)
        try:
            attentions = self._attention_of_each(structures, block)
        except Unrepeatable as error:
            self.not_saved, block = str(error), None
            attentions = self._attention_of_each(structures, block)
        if block is not None:
            self._entries[BLOCK_KEY] = block
        self._attentions = dict(zip(layers, attentions, strict=True))
        self.kinds = self._kinds()

    def _written(self, structures: LayerStructures) -> dict[str, Any] | None:
        try:
            return layer_structures_block(structures)
        except ValueError as error:
            self.not_saved = str(error)
            return None

    def _attention_of_each(self, structures: LayerStructures, block: dict[str, Any] | None) -> list[Attention]:
        made: dict[int, Attention] = {}
        attentions: list[Attention] = []
        for number, layer in enumerate(self.layers.values()):
            local, structure = local_attention_of(layer), structures.of(number)
            if local is None and structure is not None and id(structure) not in made:
                own = None if block is None else block_of_layer(block, number)
                made[id(structure)] = attention_on(structure, own, self._length)
            attentions.append(local or (dense_attention if structure is None else made[id(structure)]))
        return attentions

    def _kinds(self) -> list[Kind]:
        alike: dict[LocalAttention | int, dict[str, nn.Module]] = {}
        for name, attention in self._attentions.items():
            alike.setdefault(attention if isinstance(attention, LocalAttention) else id(attention), {})[name] = (
                self.layers[name]
            )
        return [self._kind(layers) for layers in alike.values()]

    def _kind(self, layers: dict[str, nn.Module]) -> Kind:
        attention = self._attentions[next(iter(layers))]
        was = [f"{type(layer).__name__}, {self._implementation}" for layer in layers.values()]
        now = [f"{type(layer).__name__}, {NAME}" for layer in layers.values()]
        if isinstance(attention, LocalAttention):
            side = "before each" if any(map(is_causal, layers.values())) else "on each side"
            return Kind(layers, was, now, f"the model's own window, {attention.window} tokens {side}")
        if isinstance(attention, StructuredAttention):
            return Kind(layers, was, now, describe(attention))
        return Kind(layers, was, was, NULL, sparse=False)

    def on(self) -> None:
        self._shared_config = give_encoder_its_config(self.model, self._decoders)
        configs = {id(holder.config): holder.config for holder in self._holders}.values()
        self._before = [(c, {key: vars(c)[key] for key in CONFIG_KEYS if key in vars(c)}) for c in configs]
        for config in configs:
            set_config(config, self._entries)
        set_unchecked(self.model, NAME)
        config = self.model.config
        block, length = getattr(config, BLOCK_KEY, None), Length.of(config)
        self._hooks = watch(self.model)
        for number, (name, layer) in enumerate(self.layers.items()):
            vars(layer)["_ds_sparse"] = Attached(block, length, self._attentions[name], name, number, window_of(layer))
            self._hooks.append(layer.register_forward_hook(_check_is_switched))
        give_distances(self.layers.values())
        say_what_is_cut(self.model, self.layers)

    def off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers.values():
            del layer._ds_sparse
        take_distances(self.layers.values())
        for config, entries in self._before:
            set_config(config, entries)
        self.model.set_attn_implementation(self._implementation)
        if self._shared_config is not None:
            give_back(self.model, self._shared_config)


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
