"""Which of the Transformers models in a model become sparse, and which stay dense beside them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ..pretrained import models_around
from .acceptance import OfDecoder, self_attention, why_not

ACROSS = "cross-attention: its keys are of another sequence than its queries"
"""Why a layer of a sparse model stays dense."""


class Roles(NamedTuple):
    """The attention layers in a model.

    Attributes:
        sparse: those that become sparse, by the innermost Transformers model around them and by name.
        dense: those that stay dense, by why.
        decoders: the Transformers models that stay dense.
    """

    sparse: dict[PreTrainedModel, dict[str, nn.Module]]
    dense: dict[str, dict[str, nn.Module]]
    decoders: list[PreTrainedModel]


def roles(model: nn.Module, layers_of: Mapping[PreTrainedModel, Mapping[str, nn.Module]]) -> Roles:
    """What each of the Transformers models in a model becomes. A decoder, or a causal tower, stays dense beside an
    encoder.

    Raises:
        ValueError: one cannot be sparse, or none would be.
    """
    reasons = {owner: why_not(owner, layers, models_around(model, owner)) for owner, layers in layers_of.items()}
    given = [reason for reason in reasons.values() if reason is not None]
    refused = [reason for reason in given if not isinstance(reason, OfDecoder)]
    sparse = {owner: self_attention(layers) for owner, layers in layers_of.items() if reasons[owner] is None}
    if refused or (layers_of and not sparse):
        raise ValueError((refused or given)[0])
    decoders = [owner for owner, reason in reasons.items() if isinstance(reason, OfDecoder)]
    dense: dict[str, dict[str, nn.Module]] = {}
    for owner in decoders:
        dense.setdefault(_why_dense(owner, layers_of[owner]), {}).update(layers_of[owner])
    for owner, of_owner in sparse.items():
        across = {name: layer for name, layer in layers_of[owner].items() if name not in of_owner}
        if across:
            dense.setdefault(ACROSS, {}).update(across)
    return Roles(sparse, dense, decoders)


def give_encoder_its_config(encoder: PreTrainedModel, decoders: list[PreTrainedModel]) -> PreTrainedModel | None:
    """Puts a copy of its config into an encoder whose decoder has the same one, as in BART, so that each has an
    attention implementation of its own. Returns the config that it had, None where nothing was done."""
    config = encoder.config
    if all(decoder.config is not config for decoder in decoders):
        return None
    _exchange_config(encoder, config, copy.deepcopy(config))
    return config


def give_back(encoder: PreTrainedModel, config: Any) -> None:
    """Undoes `give_encoder_its_config`."""
    _exchange_config(encoder, encoder.config, config)


def _exchange_config(model: PreTrainedModel, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _why_dense(decoder: PreTrainedModel, layers: Mapping[str, nn.Module]) -> str:
    crosses = any(
        getattr(layer, "is_decoder", False) and not getattr(layer, "is_causal", False) for layer in layers.values()
    )
    return f"{type(decoder).__name__} is causal{', and has cross-attention' if crosses else ''}"
