"""LED as BART: Longformer's windows on blocks in the encoder, the decoder as it is."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from ...ranks import say
from .converter import Block, Converter, Weights
from .longformer import say_what_is_left_out, windows

_NAMES = {
    **{f".longformer_self_attn.{name}.": f".{name[0]}_proj." for name in ("query", "key", "value")},
    ".self_attn.output.": ".self_attn.out_proj.",
}
"""What names in LED's encoder become."""

_RESERVED = 2
"""Rows in front of BART's tables of positions, which no token has."""


class LEDConverter(Converter):
    source, target = "LED", "Bart"
    heads = ("Model", "ForConditionalGeneration", "ForQuestionAnswering")
    own_keys = ("attention_window", "max_encoder_position_embeddings", "max_decoder_position_embeddings")

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        converted = super().convert(model)
        if model.can_generate():
            converted.generation_config = copy.deepcopy(model.generation_config)
        return converted

    def weights(self, model: PreTrainedModel) -> Weights:
        say_what_is_left_out(_attention_layers(model))
        weights = {}
        for key, weight in model.state_dict().items():
            if "_global." in key:
                continue
            for name, new_name in _NAMES.items():
                key = key.replace(name, new_name)
            weights[key] = self._positions(key, weight, model) if "embed_positions." in key else weight
        return weights

    def structure(self, model: PreTrainedModel) -> Block:
        sides = [layer.one_sided_attn_window_size for layer in _attention_layers(model)]
        return windows(sides, self.longest(model), global_blocks=[])

    def longest(self, model: PreTrainedModel) -> int:
        """The longer of both tables of positions: BART has one length for both."""
        config: Any = model.config
        return max(config.max_encoder_position_embeddings, config.max_decoder_position_embeddings)

    def _config(self, cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
        made: Any = super()._config(cls, config)
        own: Any = config
        made.max_position_embeddings = max(own.max_encoder_position_embeddings, own.max_decoder_position_embeddings)
        made.forced_eos_token_id = getattr(own, "forced_eos_token_id", None)  # BART's own default is a token
        return made

    def _positions(self, key: str, weight: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
        """A table of positions as BART has it, where it is shorter repeated as `ds_sparse adapt` does."""
        tokens, longest = len(weight), self.longest(model)
        if tokens < longest:
            side = "decoder" if "decoder." in key else "encoder"
            say(f"the {side}'s {tokens} positions are repeated up to {longest}, as BART has as many on both sides.")
            weight = weight[torch.arange(longest, device=weight.device) % tokens]
        return pad(weight, (0, 0, _RESERVED, 0))


def _attention_layers(model: PreTrainedModel) -> list[Any]:
    """What computes attention in each layer of the encoder."""
    base: Any = model.base_model
    return [layer.self_attn.longformer_self_attn for layer in base.encoder.layers]
