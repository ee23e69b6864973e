"""Making a Transformers model sparse, and dense again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...config import BLOCK_KEY, sparse_attention_block
from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...sparsity import SparsityConfig
from ..pretrained import NAME
from .binding import (
    CONFIG_KEYS,
    MAX_SEQ_LENGTH_KEY,
    Attached,
    check_is_repeated,
    local_attention_of,
    positions_of,
    set_config,
    tokens_of,
)
from .causal import say_what_is_cut
from .doors import set_unchecked


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
        structure: for the model's number of heads, with a seed where it draws blocks.
        max_seq_length: tokens that the layout is built for; by default those of the config.

    Raises:
        ValueError: the structure has no layout of that length, or no length is known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, nn.Module],
        around: Sequence[PreTrainedModel],
        structure: SparsityConfig,
        max_seq_length: int | None = None,
    ):
        self.model, self.layers = model, layers
        self._holders = [model, *(outer for outer in around if type(outer.config) is type(model.config))]
        self._implementation = model.config._attn_implementation
        self.was = [f"{type(layer).__name__}, {self._implementation}" for layer in layers.values()]
        self.now = [f"{type(layer).__name__}, {NAME}{_own_window(layer)}" for layer in layers.values()]
        tokens = positions_of(model.config) if max_seq_length is None else max_seq_length
        self.attention = StructuredAttention(structure, whole_blocks(tokens, structure.block))
        self._entries: dict[str, Any] = {} if max_seq_length is None else {MAX_SEQ_LENGTH_KEY: max_seq_length}
        self.not_saved: str | None = None
        """Why the structure cannot be saved with the model; None where it can."""
        try:
            self._entries[BLOCK_KEY] = _reproducible_block(self.attention)
        except ValueError as error:
            self.not_saved = str(error)

    def on(self) -> None:
        configs = {id(holder.config): holder.config for holder in self._holders}.values()
        self._before = [(c, {key: vars(c)[key] for key in CONFIG_KEYS if key in vars(c)}) for c in configs]
        for config in configs:
            set_config(config, self._entries)
        set_unchecked(self.model, NAME)
        config = self.model.config
        block, tokens = getattr(config, BLOCK_KEY, None), tokens_of(config)
        self._hooks = []
        for name, layer in self.layers.items():
            vars(layer)["_ds_sparse"] = Attached(block, tokens, local_attention_of(layer) or self.attention, name)
            self._hooks.append(layer.register_forward_hook(_check_is_switched))
        say_what_is_cut(self.model, self.layers)

    def off(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self.layers.values():
            del layer._ds_sparse
        for config, entries in self._before:
            set_config(config, entries)
        self.model.set_attn_implementation(self._implementation)


def _own_window(layer: nn.Module) -> str:
    local = local_attention_of(layer)
    return "" if local is None else f", its own window of {local.window + 1} tokens"


def _reproducible_block(attention: StructuredAttention) -> dict[str, Any]:
    """The block that makes this layout again. Raises ValueError where there is none."""
    block = sparse_attention_block(attention.sparsity_config)
    check_is_repeated(attention)
    return block


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
