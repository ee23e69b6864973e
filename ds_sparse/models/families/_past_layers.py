"""Models that compute nn.MultiheadAttention from its weights, without a call of the module, which would stay dense."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import multi_head_attention_forward
from torch.utils._pytree import tree_leaves

from ...modules.code_names import functions_of, names_in
from ..fake_copy import fake_copy, made_up_inputs
from ..in_trial import in_trial

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def refuse_computed_past(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raises ValueError where a model computes one of these layers from its weights: where the code of a class around
    it names PyTorch's function for that, or a trial shows it, if the model runs on made-up inputs."""
    if not layers:
        return
    for module in model.modules():
        kind: Any = type(module)
        functions = [function for those in functions_of(kind).values() for function in those]
        if any(multi_head_attention_forward.__name__ in names_in(function) for function in functions):
            inside = set(module.modules())
            by = f"{kind.__name__} calls {multi_head_attention_forward.__name__}"
            _refuse(next((name for name, layer in layers.items() if layer in inside), None), by)
    _refuse(_computed_past(model, layers), f"a trial of {type(model).__name__} had it computed without a call of it")


def _refuse(name: str | None, why: str) -> None:
    if name is not None:
        raise ValueError(
            f"attention layer {name or 'of the model itself'} (MultiheadAttention) would stay dense: {why}, from its "
            'weights. Call the layer itself, or keep it dense, by null in "layers" of the block.'
        )


def _computed_past(model: nn.Module, layers: Mapping[str, nn.Module]) -> str | None:
    """The first layer whose weights are in the output of a model although its forward takes them out of it."""
    for dtype, shape in made_up_inputs(model):
        try:
            return in_trial(model, functools.partial(_reached, model, layers, dtype, shape))
        except Exception:  # noqa: BLE001  code that is not ours, on inputs that it may not expect
            continue
    return None


@torch.enable_grad()
def _reached(
    model: nn.Module, layers: Mapping[str, nn.Module], dtype: torch.dtype, shape: tuple[int, ...]
) -> str | None:
    double = fake_copy(model)
    twins = dict(zip(model.modules(), double.modules(), strict=True))
    weights = {name: _watched_weights(twins[layer]) for name, layer in layers.items()}
    of_model = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    output = double(torch.zeros(shape, dtype=dtype if dtype == torch.int64 else of_model))
    sums = [x.sum() for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
    return next((name for name, those in weights.items() if sums and _reaches(those, sum(sums))), None)


def _watched_weights(twin: Any) -> list[nn.Parameter]:
    """The projections of a layer in a trial, the only ones with gradients, and not in what its forward returns."""
    twin.forward = lambda query, *_, **__: (torch.zeros_like(query), None)
    twin._qkv_same_embed_dim = False  # as in SparseMultiheadAttention
    found = [weight for weight in (getattr(twin, name) for name in _WEIGHTS) if weight is not None]
    return [weight.requires_grad_() for weight in found]


def _reaches(weights: list[nn.Parameter], total: Any) -> bool:
    return any(grad is not None for grad in torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True))
