"""Code that families of plain PyTorch models share: which of their layers get one structure, and its layouts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...modules.chosen_attention import refuse_options
from ...modules.code_names import functions_of, name_attention
from ...modules.structured_attention import StructuredAttention, whole_blocks
from ...ops.operands import check_attention_operands
from ...sparsity import SparsityConfig
from ...tools.wording import or_cannot_be_sparse
from ..report import NULL, Change, StayDense
from ..structures import Structures

BY_HAND = """write sparse attention, on query, key and value (batch, heads, tokens, head size):
    structure = ds_sparse.FixedSparsityConfig(num_heads=heads, block=64)
    self.attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=tokens)  # both in __init__
    context = self.attention.attend(query, key, value)  # in forward"""
"""Lines to write into attention that sparsify does not take."""


class Alike(NamedTuple):
    """Layers, by name, of one structure and one kind: their number of heads first, and what else is to be the same."""

    layers: dict[str, nn.Module]
    structure: SparsityConfig
    kind: tuple[Any, ...]

    def attention(self, model: nn.Module, max_seq_length: int | None) -> StructuredAttention:
        """Makes what computes in them, with a layout for so many tokens."""
        tokens = tokens_of_layout(model, max_seq_length)
        return StructuredAttention(self.structure, whole_blocks(tokens, self.structure.block))


def changes_by_structure(
    layers: Mapping[str, nn.Module],
    kinds: Mapping[str, tuple[Any, ...]],
    structures: Structures,
    change: Callable[[Alike], Change],
    cross_attention: Mapping[str, nn.Module] | None = None,
) -> list[Change]:
    """A change for layers that share what computes in them, and one for those that are to stay dense.

    Args:
        kinds: of those that can be sparse, by name.
        cross_attention: layers beside these that stay dense.
    """
    alike: dict[tuple[Any, ...], Alike] = {}
    left: dict[str, nn.Module] = {}
    for name, kind in kinds.items():
        structure = structures.of_layer(name, kind[0])
        if structure is None:
            left[name] = layers[name]
        else:
            alike.setdefault((id(structure), kind), Alike({}, structure, kind)).layers[name] = layers[name]
    kept = {NULL: left, "cross-attention, whose keys are of another sequence": cross_attention}
    return [*map(change, alike.values()), *(StayDense(those, why) for why, those in kept.items() if those)]


def cross_attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of PyTorch's decoders, by name, whose keys are of another sequence than their queries."""
    return {
        f"{name}.multihead_attn" if name else "multihead_attn": module.multihead_attn
        for name, module in model.named_modules()
        if isinstance(module, nn.TransformerDecoderLayer)
    }


def tokens_of_layout(model: nn.Module, max_seq_length: int | None) -> int:
    """Tokens that the layouts of a model are built for."""
    return longest_sequence(getattr(model, "config", None)) if max_seq_length is None else max_seq_length


def longest_sequence(config: Any) -> int:
    """Tokens that a layout is built for where none are asked for."""
    return getattr(config, "max_position_embeddings", None) or 2048


def refuse_head_size(name: str, layer: nn.Module, heads: int, head_size: int) -> None:
    """Raises ValueError where kernels do not take the heads of a layer."""
    x = torch.empty(1, heads, 1, head_size)
    with or_cannot_be_sparse(named(name, layer)):
        check_attention_operands(x, x, x)


def refuse_asked(name: str, layer: nn.Module, structure: SparsityConfig, **options: Any) -> None:
    """Raises ValueError where a layer asks for what its structure does not compute, such as dropout."""
    with or_cannot_be_sparse(named(name, layer)):
        refuse_options(structure, **options)


def named(name: str, layer: nn.Module) -> str:
    return f"attention layer {name or 'of the model itself'} ({type(layer).__name__})"


def refuse_methods_past_the_class(
    layers: Mapping[str, nn.Module], methods: Callable[[Any], Iterable[str]] = lambda kind: ("forward",)
) -> None:
    """Raises ValueError where a layer that is to be of another class would run as it was: by a method that was put on
    the layer, or by one of its own that something holds, such as a list of forward functions.

    Args:
        methods: the names of those that the other class has, by the class of a layer.
    """
    held = _held_methods(layers.values()) if layers else []
    for name, layer in layers.items():
        kind: Any = type(layer)
        what = named(name, layer)
        for method in methods(kind):
            if method in vars(layer):
                raise ValueError(
                    f"{what} would stay dense: its {method} was replaced, as hooks of accelerate do; call sparsify "
                    "before that."
                )
            attends = method == "forward" or name_attention(functions_of(kind)[method])
            if attends and any(bound.__self__ is layer and bound.__name__ == method for bound in held):
                raise ValueError(
                    f"{what} would stay dense: something holds its method {method}, which runs as it is; have that "
                    "hold and call the layer, or call sparsify before the method is taken from it."
                )


def _held_methods(layers: Iterable[nn.Module]) -> list[MethodType]:
    """The methods of layers that something holds, but for what torch.compile(layer) keeps to show and does not run."""
    held = [x for x in gc.get_referrers(*layers) if isinstance(x, MethodType)]
    around = [x for x in gc.get_referrers(*held) if isinstance(x, dict)] if held else []
    return [x for x in held if not any(those.get("_torchdynamo_orig_callable") is x for those in around)]
