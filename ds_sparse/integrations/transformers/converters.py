"""Converters: from a model of a family that computes its attention itself, the same one of BERT's family or BART."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from ...models.position_table import position_table, reserved_rows
from ...tools.block_sizes import BLOCK_SIZES
from ...tools.ranks import say
from ...tools.wording import listed

_LED_NAMES = {
    **{f".longformer_self_attn.{name}.": f".{name[0]}_proj." for name in ("query", "key", "value")},
    ".self_attn.output.": ".self_attn.out_proj.",
}
"""Names in LED's encoder, and those in BART's."""

_RESERVED = 2
"""Rows in front of BART's tables of positions, which no token has."""

Weights = dict[str, torch.Tensor]
Block = dict[str, Any]

_OF_THE_CLASS = ("model_type", "architectures", "transformers_version", "dtype")
"""Keys of a config that say what it is of."""


class Converter(ABC):
    """A family of models, and that on Transformers' attention interface which has its weights.

    Attributes:
        source, target: the names of both, in front of those of their classes.
        heads: names of classes, behind those of both families, that compute alike.
        own_keys: what only the source's config has.
    """

    source: ClassVar[str]
    target: ClassVar[str]
    heads: ClassVar[tuple[str, ...]]
    own_keys: ClassVar[tuple[str, ...]]

    @abstractmethod
    def weights(self, model: PreTrainedModel) -> Weights:
        """The state dict, but for the name of the base model in its keys, as the target has it. What is left out is
        said.

        Raises:
            ValueError: a model that the target cannot be equal to.
        """

    @abstractmethod
    def structure(self, model: PreTrainedModel) -> Block:
        """The block of the structure nearest to the model's own, at its longest sequence.

        Raises:
            ValueError: the model's own has blocks of a size that structures do not have.
        """

    def longest(self, model: PreTrainedModel) -> int:
        """Tokens of the longest sequence, for which the layout is built."""
        table: Any = position_table(model.base_model)
        return table.num_embeddings - reserved_rows(table)

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model of the target, dense, in eval mode and with weights of its own.

        Raises:
            ValueError: a head that the target does not have; as `weights`.
        """
        name = type(model).__name__
        if name.removeprefix(self.source) not in self.heads:
            raise ValueError(
                f"{name} has a head that {self.target} does not have; convert its base model (save that of "
                f"model.{model.base_model_prefix}), or one of {', '.join(self.source + head for head in self.heads)}."
            )
        cls = getattr(transformers, name.replace(self.source, self.target))
        converted = cls(self._config(cls, model)).to(model.dtype)
        there, here = f"{model.base_model_prefix}.", f"{converted.base_model_prefix}."
        weights = {
            here + key.removeprefix(there) if key.startswith(there) else key: weight
            for key, weight in self.weights(model).items()
        }
        missing, unexpected = converted.load_state_dict(weights, strict=False)
        if missing:
            raise ValueError(f"{name} lacks {', '.join(missing)}, which {cls.__name__} has; it cannot be converted.")
        if unexpected:
            say(f"left out, as {cls.__name__} does not have it: {', '.join(unexpected)}.")
        return converted.eval()

    def _config(self, cls: type[PreTrainedModel], model: PreTrainedModel) -> PreTrainedConfig:
        left_out = {*self.own_keys, *_OF_THE_CLASS}
        return cls.config_class(**{key: value for key, value in model.config.to_dict().items() if key not in left_out})


class BigBirdConverter(Converter):
    source, target = "BigBird", "Bert"
    heads = ("Model", "ForPreTraining", "ForMaskedLM", "ForTokenClassification", "ForMultipleChoice")
    own_keys = ("attention_type", "block_size", "num_random_blocks", "use_bias", "rescale_embeddings")

    def weights(self, model: PreTrainedModel) -> Weights:
        config: Any = model.config
        if config.rescale_embeddings:
            raise ValueError(
                f"{type(model).__name__} has config.rescale_embeddings, and no BERT scales its word embeddings; it "
                "cannot be converted."
            )
        weights = {key.replace("pooler.", "pooler.dense."): weight for key, weight in model.state_dict().items()}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear) and layer.bias is None and name.endswith((".query", ".key", ".value")):
                weights[f"{name}.bias"] = layer.weight.new_zeros(layer.out_features)
        return weights

    def structure(self, model: PreTrainedModel) -> Block:
        config: Any = model.config
        if config.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"{type(model).__name__} has config.block_size {config.block_size}, and blocks have "
                f"{listed(BLOCK_SIZES, 'or')} tokens; give a structure with one of them (sparsity_config, or --config)."
            )
        random_blocks, blocks = config.num_random_blocks, -(-self.longest(model) // config.block_size)
        # Up to so many blocks Transformers attends to all.
        if config.attention_type == "original_full" or blocks <= 5 + 2 * random_blocks:
            return {"mode": "dense", "block": config.block_size}
        structure: Block = {"mode": "transformers_bigbird", "block": config.block_size}
        structure |= {"num_random_blocks": random_blocks, "seed": 0}
        by_layer = {str(layer): {"seed": layer} for layer in range(1, config.num_hidden_layers)}
        return structure | ({"layers": by_layer} if by_layer else {})


class LongformerConverter(Converter):
    source: ClassVar[str] = "Longformer"
    target: ClassVar[str] = "Roberta"
    heads: ClassVar[tuple[str, ...]] = (
        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
        "ForMultipleChoice",
    )  # fmt: skip
    own_keys: ClassVar[tuple[str, ...]] = ("attention_window", "onnx_export")

    def weights(self, model: PreTrainedModel) -> Weights:
        _say_what_is_left_out(self._layers(model))
        return {key: weight for key, weight in model.state_dict().items() if "_global." not in key}

    def structure(self, model: PreTrainedModel) -> Block:
        sides = [layer.one_sided_attn_window_size for layer in self._layers(model)]
        # The head that makes a token global by itself: the first one.
        global_blocks = [0] if type(model).__name__.endswith("ForSequenceClassification") else []
        return _windows(sides, self.longest(model), global_blocks)

    def _layers(self, model: PreTrainedModel) -> list[Any]:
        """The modules that compute attention, of each layer of the encoder."""
        base: Any = model.base_model
        return [layer.attention.self for layer in base.encoder.layer]


class LEDConverter(LongformerConverter):
    source, target = "LED", "Bart"
    heads = ("Model", "ForConditionalGeneration", "ForQuestionAnswering")
    own_keys = ("attention_window", "max_encoder_position_embeddings", "max_decoder_position_embeddings")

    def convert(self, model: PreTrainedModel) -> PreTrainedModel:
        converted = super().convert(model)
        if model.can_generate():
            converted.generation_config = copy.deepcopy(model.generation_config)
        return converted

    def weights(self, model: PreTrainedModel) -> Weights:
        weights = {}
        for key, weight in super().weights(model).items():
            for name, new_name in _LED_NAMES.items():
                key = key.replace(name, new_name)
            weights[key] = self._positions(key, weight, model) if "embed_positions." in key else weight
        return weights

    def longest(self, model: PreTrainedModel) -> int:
        """The longer of both tables of positions: BART has one length for both."""
        config: Any = model.config
        return max(config.max_encoder_position_embeddings, config.max_decoder_position_embeddings)

    def _config(self, cls: type[PreTrainedModel], model: PreTrainedModel) -> PreTrainedConfig:
        made: Any = super()._config(cls, model)
        made.max_position_embeddings = self.longest(model)
        # BART's own default is a token.
        made.forced_eos_token_id = getattr(model.config, "forced_eos_token_id", None)
        return made

    def _positions(self, key: str, weight: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
        """A table of positions as BART has it, where it is shorter repeated as `ds_sparse adapt` does."""
        tokens, longest = len(weight), self.longest(model)
        if tokens < longest:
            side = "decoder" if "decoder." in key else "encoder"
            say(f"the {side}'s {tokens} positions are repeated up to {longest}, as BART has as many on both sides.")
            weight = weight[torch.arange(longest, device=weight.device) % tokens]
        return pad(weight, (0, 0, _RESERVED, 0))

    def _layers(self, model: PreTrainedModel) -> list[Any]:
        base: Any = model.base_model
        return [layer.self_attn.longformer_self_attn for layer in base.encoder.layers]


def _say_what_is_left_out(layers: Sequence[Any]) -> None:
    """Prints by how much the projections of global tokens differ from those of all, in these attention layers, and what
    that means for outputs."""
    apart = max(
        (own - common).abs().max().item()
        for layer in layers
        for kind in ("query", "key", "value")
        for own, common in zip(
            getattr(layer, f"{kind}_global").parameters(), getattr(layer, kind).parameters(), strict=True
        )
    )
    if apart:
        how = f"which differ from those of all tokens by up to {apart:.3g}"
        so = (
            "Sequences without global tokens lose nothing by it. With some, which heads for classification, questions "
            "and choices make by themselves, outputs differ from the original's until the model is trained further."
        )
    else:
        how, so = "equal to those of all tokens", "Nothing is lost by it."
    say(f"the projections of global tokens, {how}, are left out. {so}")


def _windows(sides: Sequence[int], tokens: int, global_blocks: list[int]) -> Block:
    """The block for layers that see so many tokens on each side, rounded up to whole blocks."""
    block = next((block for block in (64, 32, 16) if all(side % block == 0 for side in sides)), 16)
    layers_of: defaultdict[int, list[str]] = defaultdict(list)
    for layer, side in enumerate(sides):
        layers_of[2 * -(-side // block) + 1].append(str(layer))
    (width, _), *others = sorted(layers_of.items(), key=lambda entry: len(entry[1]), reverse=True)
    blocks = -(-tokens // block)
    by_layer = {",".join(layers): _window(width, blocks, global_blocks) for width, layers in others}
    structure = {"block": block} | _window(width, blocks, global_blocks)
    return structure | ({"layers": by_layer} if by_layer else {})


def _window(width: int, blocks: int, global_blocks: list[int]) -> Block:
    if width > blocks:  # it is wider than a row
        return {"mode": "dense"}
    return {"mode": "bslongformer", "num_sliding_window_blocks": width, "global_block_indices": global_blocks}


CONVERTERS = {"longformer": LongformerConverter(), "big_bird": BigBirdConverter(), "led": LEDConverter()}
"""By the model_type of a config."""
