"""Converter: from a model of a family that computes its attention itself, the same one of BERT's family or BART."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ...models.position_table import position_table, reserved_rows
from ...ranks import say

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
        converted = cls(self._config(cls, model.config)).to(model.dtype)
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

    def _config(self, cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
        left_out = {*self.own_keys, *_OF_THE_CLASS}
        return cls.config_class(**{key: value for key, value in config.to_dict().items() if key not in left_out})


def attention_layers(model: PreTrainedModel) -> list[Any]:
    """What computes attention in each layer."""
    base: Any = model.base_model
    return [layer.attention.self for layer in base.encoder.layer]
