"""Longformer as RoBERTa: a window on blocks instead of one on tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...ranks import say
from .converter import Block, Converter, Weights, attention_layers


class LongformerConverter(Converter):
    source, target = "Longformer", "Roberta"
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )
    own_keys = ("attention_window", "onnx_export")

    def weights(self, model: PreTrainedModel) -> Weights:
        say_what_is_left_out(attention_layers(model))
        return {key: weight for key, weight in model.state_dict().items() if "_global." not in key}

    def structure(self, model: PreTrainedModel) -> Block:
        sides = [layer.one_sided_attn_window_size for layer in attention_layers(model)]
        # The head that makes a token global by itself: the first one.
        global_blocks = [0] if type(model).__name__.endswith("ForSequenceClassification") else []
        return windows(sides, self.longest(model), global_blocks)


def say_what_is_left_out(layers: Sequence[Any]) -> None:
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


def windows(sides: Sequence[int], tokens: int, global_blocks: list[int]) -> Block:
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
