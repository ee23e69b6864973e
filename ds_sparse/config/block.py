"""From a block to its structures, layer by layer, and back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from ..sparsity import SparsityConfig, sparsity_class, sparsity_modes
from ..sparsity._fields import class_defaults, json_fields, value_of
from ..sparsity.draws import Draws, draws
from ..tools.wording import counted, reason, show
from .file import BLOCK_KEY, LAYERS_KEY, Source, SparseAttentionConfigError, check_is_object, name_of
from .reading import DEFAULT_MODE, NONE, STRUCTURE_ERRORS, Choice, Reading

ANY_NUM_HEADS = 12
"""For a check of a block where no model is known: no key depends on the number of heads."""

_RANGE = r" *[0-9]{1,9}( *- *[0-9]{1,9})? *"
KEY_PATTERN = f"{_RANGE}(,{_RANGE})*"
"""A key of `layers`: layers and ranges of layers, counted from 0."""

_EXAMPLE = '{"0-5,7": {"mode": "dense"}, "8": null}'


@dataclass(frozen=True)
class LayerStructures:
    """The structures of a model's layers, and the block that says them: read once, and handed on.

    Attributes:
        others: of the layers that no entry names.
        entries: of each key of `layers` in the block's order, the structure; None is the model's own dense attention.
        choices: what the block says of `others`, by None, and of each entry; empty for a structure without a block.
    """

    others: SparsityConfig
    entries: Mapping[str, SparsityConfig | None] = field(default_factory=dict)
    choices: Mapping[str | None, Choice] = field(default_factory=dict)

    def of(self, layer: int) -> SparsityConfig | None:
        """The structure of a layer, counted from 0: that of the last entry that names it."""
        key = self._key_of(layer)
        return self.others if key is None else self.entries[key]

    def of_all(self, num_layers: int) -> list[SparsityConfig | None]:
        """The structures of a model's layers."""
        return [self.of(layer) for layer in range(num_layers)]

    def all(self) -> list[SparsityConfig]:
        """Every structure, once."""
        return [self.others, *(structure for structure in self.entries.values() if structure is not None)]

    def for_heads(self, num_heads: int) -> LayerStructures:
        """The structures for another number of heads, of what has been read; without a block themselves.

        Raises:
            SparseAttentionConfigError: a class cannot be made for so many.
        """
        made = {key: choice.make(num_heads) for key, choice in self.choices.items()}
        entries = {key: made.get(key) for key in self.entries}
        return replace(self, others=made.get(None, self.others), entries=entries)

    def block(self) -> dict[str, Any]:
        """The block that `read_block` makes these structures from, every key spelled out.

        Raises:
            ValueError: as `sparse_attention_block`.
        """
        block = self._spelled_out(None, self.others)
        if not self.entries:
            return block
        own = {key: structure and self._spelled_out(key, structure) for key, structure in self.entries.items()}
        return block | {LAYERS_KEY: {key: those and _difference(block, those) for key, those in own.items()}}

    def block_of(self, layer: int) -> dict[str, Any] | None:
        """The block of one layer alone, every key spelled out; None for a layer that stays dense.

        Raises:
            ValueError: as `sparse_attention_block`.
        """
        structure = self.of(layer)
        return None if structure is None else self._spelled_out(self._key_of(layer), structure)

    def _key_of(self, layer: int) -> str | None:
        named = [key for key in self.entries if any(layer in part for part in layers_of(key))]
        return named[-1] if named else None

    def _spelled_out(self, key: str | None, structure: SparsityConfig) -> dict[str, Any]:
        choice = self.choices.get(key)
        if choice is None:
            return sparse_attention_block(structure)
        block = {"mode": choice.mode} | copy.deepcopy(choice.values)
        return block if block.get("seed", 0) is not None else block | {"seed": value_of(structure, "seed")}


def parse_sparse_attention(
    block: Mapping[str, Any],
    num_heads: int,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    whole: bool = True,
    notices: list[str] | None = None,
) -> SparsityConfig:
    """Validates a block and makes its structure.

    Args:
        block: the `sparse_attention` object. A missing mode means "fixed".
        num_heads: attention heads of the model.
        source: what the block was loaded from; it names the file in every message.
        seq_len: tokens; when given, the layout must exist at this length, the last block of which may be short.
        whole: the layout must also fit into memory, as training needs it; False where rows of it are enough.
        notices: receives a sentence for each thing that is accepted but deserves a line, for rank 0 to print.

    Returns:
        The structure.

    Raises:
        SparseAttentionConfigError: with every mistake of the block; it has `layers`, which have structures of their
            own.
        ValueError: num_heads is no integer of 1 or more.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "bigbird", "block": 32, "num_random_blocks": 1, "seed": 0}
        >>> structure = ds_sparse.parse_sparse_attention(block, num_heads=4, seq_len=1024)
        >>> structure.make_layout(1024).shape
        torch.Size([4, 32, 32])
    """
    said: list[str] = []
    structures = read_block(block, num_heads, source=source, seq_len=seq_len, whole=whole, notices=said)
    if structures.entries:
        raise SparseAttentionConfigError(
            [
                f"{name_of(source)}: {BLOCK_KEY}.{LAYERS_KEY}: layers have structures of their own, and here all are "
                "to have one; use ds_sparse.parse_sparse_attention_layers or ds_sparse.get_sparse_attention_layers."
            ]
        )
    if notices is not None:
        notices += said
    return structures.others


def parse_sparse_attention_layers(
    block: Mapping[str, Any],
    num_heads: int,
    num_layers: int,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    notices: list[str] | None = None,
) -> list[SparsityConfig | None]:
    """Validates a block and makes the structure of each layer, also where the block has no `layers`.

    Args:
        block, num_heads, source, seq_len, notices: as in `parse_sparse_attention`.
        num_layers: attention layers of the model.

    Returns:
        A structure a layer, the same object where they are of one entry; None for a layer that stays dense.

    Raises:
        SparseAttentionConfigError: with every mistake of the block; an entry names a layer that there is not.
        ValueError: num_heads is no integer of 1 or more.

    Examples:
        >>> import ds_sparse
        >>> block = {"mode": "fixed", "block": 32, "layers": {"0-1": {"num_local_blocks": 8}, "3": None}}
        >>> first, *_, last = ds_sparse.parse_sparse_attention_layers(block, num_heads=4, num_layers=4)
        >>> first.block, first.num_local_blocks, last
        (32, 8, None)
    """
    read = read_block(block, num_heads, source=source, seq_len=seq_len, notices=notices, num_layers=num_layers)
    return read.of_all(num_layers)


def read_block(
    block: Mapping[str, Any],
    num_heads: int = ANY_NUM_HEADS,
    *,
    source: Source = "the config",
    seq_len: int | None = None,
    whole: bool = True,
    notices: list[str] | None = None,
    num_layers: int | None = None,
) -> LayerStructures:
    """Validates a block and makes its structures, where the number of layers, or of heads, may not be known.

    Raises:
        SparseAttentionConfigError, ValueError: as `parse_sparse_attention_layers`.
    """
    if not isinstance(num_heads, Integral) or num_heads < 1:
        raise ValueError(
            f"num_heads is {num_heads!r}; it has to be the number of attention heads of the model, an integer of 1 or "
            "more."
        )
    name = name_of(source)
    check_is_object(block, name)
    reading = Reading(f"{name}: {BLOCK_KEY}", whole)
    by_layer = _has_layers(block)
    alone = {key: value for key, value in block.items() if key != LAYERS_KEY or not by_layer}
    read = {None: reading.read(alone, num_heads, seq_len)}
    entries = _read_entries(reading, alone, block[LAYERS_KEY], num_heads, seq_len, num_layers) if by_layer else {}
    choices = {key: found[0] for key, found in (read | entries).items() if found is not None}
    others = read[None]
    if others is None or reading.mistakes:
        raise SparseAttentionConfigError(reading.mistakes) from reading.cause
    if notices is not None:
        notices += reading.notices
    return LayerStructures(others[1], {key: found and found[1] for key, found in entries.items()}, choices)


def _read_entries(
    others: Reading, alone: Mapping[str, Any], entries: Any, num_heads: int, seq_len: int | None, num_layers: int | None
) -> dict[str, tuple[Choice, SparsityConfig] | None]:
    """Reads the `layers` of a block, whose other keys `others` has read. Mistakes and notices go there too, each
    once."""
    at = f"{others.at}.{LAYERS_KEY}"
    if not isinstance(entries, Mapping):
        others.mistakes.append(f"{at}: got {show(entries)}; wanted an object of layers, such as {_EXAMPLE}.")
        return {}
    wrong = {key: _wrong_entry(key, entry) for key, entry in entries.items()}
    others.mistakes += [f"{at}.{show(key)}: {sentence}" for key, sentence in wrong.items() if sentence]
    right = [key for key, sentence in wrong.items() if sentence is None]
    read: dict[str, tuple[Choice, SparsityConfig] | None] = {}
    for key in right:
        if _is_null(entries[key]):
            read[key] = None
            continue
        reading = Reading(f"{at}.{show(key)}", others.whole)
        read[key] = reading.read(_merged(alone, entries[key]), num_heads, seq_len)
        others.take(reading)
    if num_layers is not None:
        others.mistakes += [f"{at}.{sentence}" for sentence in beyond(right, num_layers)]
    return read


def _wrong_entry(key: Any, entry: Any) -> str | None:
    if not isinstance(key, str) or not re.fullmatch(KEY_PATTERN, key):
        return f"a key names layers in the digits 0 to 9, counted from 0, such as {show('0-5,7')}."
    if any(int(first) > int(last) for first, last in re.findall(r"(\d+) *- *(\d+)", key)):
        return "a range that ends before it begins; write the smaller number first."
    if not isinstance(entry, Mapping) and not _is_null(entry):
        return f"got {show(entry)}; wanted an object with the keys that differ from the block, or null for dense."
    if isinstance(entry, Mapping) and LAYERS_KEY in entry:
        return f"{LAYERS_KEY} inside {LAYERS_KEY}; an entry has the keys of a mode."
    return None


def _has_layers(block: Mapping[str, Any]) -> bool:
    """Tells whether a block has `layers`; those of a structure that has a field of this name are its own."""
    return LAYERS_KEY in block and LAYERS_KEY not in _fields_of(block.get("mode", DEFAULT_MODE))


def layer_entries(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `layers` of a block that is right."""
    return block[LAYERS_KEY] if _has_layers(block) else {}


def seed_of(block: Mapping[str, Any]) -> int | None:
    """The seed that a block has for what draws blocks: its own, or the first that an entry has."""
    seeds = [part.get("seed") for part in (block, *layer_entries(block).values()) if isinstance(part, Mapping)]
    return next((seed for seed in seeds if seed is not None), None)


def layers_of(key: str) -> list[range]:
    """The layers that a key of `layers` names."""
    ends = [[int(end) for end in part.split("-")] for part in key.split(",")]
    return [range(pair[0], pair[-1] + 1) for pair in ends]


def beyond(keys: Iterable[str], num_layers: int, model: str = "the model") -> list[str]:
    """A sentence for each key that names a layer which a model does not have."""
    last = {key: max(part[-1] for part in layers_of(key)) for key in keys}
    count = f"{counted(num_layers, 'attention layer')}, 0 to {num_layers - 1}"
    return [
        f"{show(key)}: names layer {layer}, and {model} has {count}."
        for key, layer in last.items()
        if layer >= num_layers
    ]


def _merged(block: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A block with the differences of an entry. With another mode, keys that this mode does not have stay behind."""
    mode, other = block.get("mode", DEFAULT_MODE), entry.get("mode", block.get("mode", DEFAULT_MODE))
    kept = dict(block) if other == mode else {key: block[key] for key in block if key in _fields_of(other)}
    return {**kept, **entry}


def _difference(block: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in own.items() if key not in block or block[key] != value}


def _is_null(entry: Any) -> bool:
    """Tells whether an entry is null, or Python's None, which hjson reads as text."""
    return entry is None or (isinstance(entry, str) and re.fullmatch(NONE, entry) is not None)


def _fields_of(mode: Any) -> Mapping[str, Any]:
    try:
        return json_fields(sparsity_class(mode)) if mode in sparsity_modes() else {}
    except STRUCTURE_ERRORS:  # which the reader says
        return {}


def sparse_attention_block(structure: SparsityConfig) -> dict[str, Any]:
    """The block that `parse_sparse_attention` makes this structure from, every key spelled out.

    Raises:
        ValueError: a class without a mode (`register_sparsity` gives it one), or whose values are not those that it was
            made from.
    """
    cls = type(structure)
    what = f"{cls.__qualname__} cannot be written as a sparse_attention block"
    mode = mode_of(cls)
    if mode is None:
        raise ValueError(f'{what}: it has no mode; decorate it with @ds_sparse.register_sparsity("its name").')
    keys = json_fields(cls)
    block = {"mode": mode} | {key: copy.deepcopy(value_of(structure, key)) for key in keys}
    try:
        again = parse_sparse_attention(json.loads(json.dumps(block)), structure.num_heads, source=cls.__qualname__)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {reason(error)}") from error
    changed = [key for key in keys if value_of(again, key) != block[key]]
    if changed:
        raise ValueError(
            f"{what}: made again from it, it has another {', '.join(changed)}. Keep each argument of its __init__ in "
            "an attribute of the same name."
        )
    return block


def mode_of(cls: type[SparsityConfig]) -> str | None:
    """The mode by which a block names a class; None where it has none."""
    for mode in sparsity_modes():
        try:
            if sparsity_class(mode) is cls:
                return mode
        except STRUCTURE_ERRORS:  # an entry point that does not load names some other class
            continue
    return None


def example_block(
    mode: str,
    given: Mapping[str, Any] | None = None,
    *,
    num_heads: int = ANY_NUM_HEADS,
    seq_len: int | None = None,
    source: Source = "the options",
) -> dict[str, Any]:
    """A block of a mode with all its keys. Those that are not given have the defaults of the mode's class, which draws
    random blocks where JSON's defaults draw none; then the seed is 0, so that each run has the same.

    Args:
        mode: a known one.
        given: keys that are to have other values.
        seq_len: tokens; when given, the layout must exist at this length, though it need not fit into memory.

    Returns:
        The block, which `parse_sparse_attention` takes.

    Raises:
        SparseAttentionConfigError: with every mistake of what is given, or a key is missing that has no default.
    """
    block = {"mode": mode, **copy.deepcopy(class_defaults(sparsity_class(mode))), **(given or {})}
    structure = parse_sparse_attention(block, num_heads, source=source, seq_len=seq_len, whole=False)
    if block.get("seed") is None and draws(structure) is Draws.BY_SEED:
        block["seed"] = 0
    return block
