"""Relative positions of T5's kind as a bias by distance: a layer that makes a matrix of tokens by tokens of its table
of biases, for itself and for the layers behind it, makes what the table has for each distance instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..pretrained import NAME

_MAKER = "compute_bias"
"""The method of a layer of Transformers that makes the matrix."""

_TAKES = ["self", "query_length", "key_length", "device", "past_seen_tokens"]


def makes_positions(layer: nn.Module) -> bool:
    """Whether a layer makes a matrix of relative positions, in the way of T5."""
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
