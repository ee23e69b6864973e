"""Structures by layer: what the `layers` of a block say, and the blocks that single layers get from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..sparsity import SparsityConfig, sparsity_class, sparsity_modes
from ..sparsity._fields import json_fields
from ..wording import show
from .file import LAYERS_KEY
from .reading import DEFAULT_MODE, NONE, STRUCTURE_ERRORS, Reading

_RANGE = r" *[0-9]{1,9}( *- *[0-9]{1,9})? *"
KEY_PATTERN = f"{_RANGE}(,{_RANGE})*"
"""A key of `layers`: layers and ranges of layers, counted from 0."""

_EXAMPLE = '{"0-5,7": {"mode": "dense"}, "8": null}'


@dataclass(frozen=True)
class LayerStructures:
    """The structures that a block gives to the layers of a model.

    Attributes:
        others: of the layers that no entry names.
        entries: of each key of `layers` in the block's order, the structure; None is the model's own dense attention.
    """

    others: SparsityConfig
    entries: Mapping[str, SparsityConfig | None]

    def of(self, layer: int) -> SparsityConfig | None:
        """The structure of a layer, counted from 0: that of the last entry that names it."""
        named = [structure for key, structure in self.entries.items() if names(key, layer)]
        return named[-1] if named else self.others

    def of_all(self, num_layers: int) -> list[SparsityConfig | None]:
        """The structures of a model's layers."""
        return [self.of(layer) for layer in range(num_layers)]


def layers_of(key: str) -> list[range]:
    """The layers that a key of `layers` names."""
    ends = [[int(end) for end in part.split("-")] for part in key.split(",")]
    return [range(pair[0], pair[-1] + 1) for pair in ends]


def names(key: str, layer: int) -> bool:
    """Whether a key of `layers` names a layer."""
    return any(layer in part for part in layers_of(key))


def has_layers(block: Mapping[str, Any]) -> bool:
    """Whether a block has `layers`; those of a structure that has a field of this name are its own."""
    return LAYERS_KEY in block and LAYERS_KEY not in _fields_of(block.get("mode", DEFAULT_MODE))


def layer_entries(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `layers` of a block that is right."""
    return block[LAYERS_KEY] if has_layers(block) else {}


def block_of_layer(block: Mapping[str, Any], layer: int) -> dict[str, Any] | None:
    """The block of one layer alone, from a block that is right; None where it is null, dense by the model's own
    attention."""
    entries = layer_entries(block)
    if not entries:
        return dict(block)
    alone = {key: value for key, value in block.items() if key != LAYERS_KEY}
    named = [entry for key, entry in entries.items() if names(key, layer)]
    if not named:
        return alone
    return None if is_null(named[-1]) else merged(alone, named[-1])


def seed_of(block: Mapping[str, Any]) -> int | None:
    """The seed that a block has for what draws blocks: its own, or the first that an entry has."""
    seeds = [part.get("seed") for part in (block, *layer_entries(block).values()) if isinstance(part, Mapping)]
    return next((seed for seed in seeds if seed is not None), None)


def merged(block: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A block with the differences of an entry. With another mode, keys that this mode does not have stay behind."""
    mode, other = block.get("mode", DEFAULT_MODE), entry.get("mode", block.get("mode", DEFAULT_MODE))
    kept = dict(block) if other == mode else {key: block[key] for key in block if key in _fields_of(other)}
    return {**kept, **entry}


def is_null(entry: Any) -> bool:
    """Whether an entry is null, or Python's None, which hjson reads as text."""
    return entry is None or (isinstance(entry, str) and re.fullmatch(NONE, entry) is not None)


def beyond(keys: Iterable[str], num_layers: int, model: str = "the model") -> list[str]:
    """A sentence for each key that names a layer which a model does not have."""
    last = {key: max(part[-1] for part in layers_of(key)) for key in keys}
    count = f"{num_layers} attention layer{'s' if num_layers > 1 else ''}, 0 to {num_layers - 1}"
    return [
        f"{show(key)}: names layer {layer}, and {model} has {count}."
        for key, layer in last.items()
        if layer >= num_layers
    ]


def read_layers(
    others: Reading, block: Mapping[str, Any], num_heads: int, seq_len: int | None, num_layers: int | None
) -> dict[str, SparsityConfig | None]:
    """Reads the `layers` of a block, whose other keys `others` has read. Mistakes and notices go there too, each
    once.

    Args:
        num_layers: of the model; None where it is not known.
    """
    entries, at = block.get(LAYERS_KEY), f"{others.at}.{LAYERS_KEY}"
    if not isinstance(entries, Mapping):
        others.mistakes.append(f"{at}: got {show(entries)}; wanted an object of layers, such as {_EXAMPLE}.")
        return {}
    alone = {key: value for key, value in block.items() if key != LAYERS_KEY}
    wrong = {key: _wrong_entry(key, entry) for key, entry in entries.items()}
    others.mistakes += [f"{at}.{show(key)}: {sentence}" for key, sentence in wrong.items() if sentence]
    right = [key for key, sentence in wrong.items() if sentence is None]
    structures: dict[str, SparsityConfig | None] = {}
    for key in right:
        if is_null(entries[key]):
            structures[key] = None
            continue
        reading = Reading(f"{at}.{show(key)}", others.whole)
        structures[key] = reading.read(merged(alone, entries[key]), num_heads, seq_len)
        others.take(reading)
    if num_layers is not None:
        others.mistakes += [f"{at}.{sentence}" for sentence in beyond(right, num_layers)]
    return structures


def _wrong_entry(key: Any, entry: Any) -> str | None:
    if not isinstance(key, str) or not re.fullmatch(KEY_PATTERN, key):
        return f"a key names layers in the digits 0 to 9, counted from 0, such as {show('0-5,7')}."
    if any(int(first) > int(last) for first, last in re.findall(r"(\d+) *- *(\d+)", key)):
        return "a range that ends before it begins; write the smaller number first."
    if not isinstance(entry, Mapping) and not is_null(entry):
        return f"got {show(entry)}; wanted an object with the keys that differ from the block, or null for dense."
    if isinstance(entry, Mapping) and LAYERS_KEY in entry:
        return f"{LAYERS_KEY} inside {LAYERS_KEY}; an entry has the keys of a mode."
    return None


def _fields_of(mode: Any) -> Mapping[str, Any]:
    if mode not in sparsity_modes():
        return {}
    try:
        return json_fields(sparsity_class(mode))
    except STRUCTURE_ERRORS:  # which the reader says
        return {}
