"""Which of the Transformers models in a model become sparse, and which stay dense beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
        decoders: the Transformers models that stay dense, which have cross-attention.
    """

    sparse: dict[PreTrainedModel, dict[str, nn.Module]]
    dense: dict[str, dict[str, nn.Module]]
    decoders: list[PreTrainedModel]


def roles(model: nn.Module, layers_of: Mapping[PreTrainedModel, Mapping[str, nn.Module]]) -> Roles:
    """What each of the Transformers models in a model becomes. A decoder with cross-attention stays dense beside its
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
        dense.setdefault(f"{type(owner).__name__} has cross-attention", {}).update(layers_of[owner])
    for owner, of_owner in sparse.items():
        across = {name: layer for name, layer in layers_of[owner].items() if name not in of_owner}
        if across:
            dense.setdefault(ACROSS, {}).update(across)
    return Roles(sparse, dense, decoders)
