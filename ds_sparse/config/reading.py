"""Reads a DeepSpeed JSON, takes the `sparse_attention` block out, validates it, and hands back the rest.

DeepSpeed refuses the block since 0.19.7, so it never sees it. Keys, defaults and the meaning of a missing mode are
those of DeepSpeed's own documentation of the block.
"""

from __future__ import annotations

import base64
import copy
import difflib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import hjson
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .sparsity import SparsityConfig, SparsityWarning, sparsity_class, sparsity_modes
from .sparsity._base import Rule, rule_fields
from .sparsity._fields import build, json_fields, json_model
from .sparsity._registry import loaded_classes
from .sparsity.draws import random_numbers_kept
from .wording import did_you_mean, hint_of_text, list_modes, one_of, printable, reason, show, show_key

Source = str | os.PathLike[str] | Mapping[str, Any]

BLOCK_KEY = "sparse_attention"
DEFAULT_MODE = "fixed"

_ALSO_OF_OTHERS = ("seed", "causal", "strict_causal", "attention")
"""Keys of a block that a program may have for itself at the top level of its JSON."""

_OF_YOUR_OWN = (
    " One of your own is known after @ds_sparse.register_sparsity, or through the entry-point group ds_sparse.sparsity."
)

ANY_NUM_HEADS = 12
"""For a check of a block where no model is known: no key depends on the number of heads."""

STRUCTURE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the code of a user's structure may raise; the reader makes a sentence of it."""


class SparseAttentionConfigError(ValueError):
    """Everything that is wrong with a configuration, one sentence each in `mistakes`."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class LoadedConfig(NamedTuple):
    deepspeed: dict[str, Any]
    """The configuration without the block: what DeepSpeed gets."""
    block: dict[str, Any] | None
    """The `sparse_attention` block, not yet validated; None when there is none."""


def load_config(config: Source) -> LoadedConfig:
    """Reads a configuration as DeepSpeed does: a path to an hjson file, a dict, or such a file's text in base64.

    Raises:
        SparseAttentionConfigError: the file cannot be read or parsed, has a key twice, or the block is no object.
        TypeError: none of the three.
    """
    if not isinstance(config, str | os.PathLike | Mapping):
        raise TypeError(f"A DeepSpeed config is a path, a dict or a base64 string, got {type(config).__name__}.")
    source = _name(config)
    if isinstance(config, Mapping):
        return _without_block(dict(config), source)
    return parse_config(_read(config), source)


def parse_config(raw: bytes, source: str) -> LoadedConfig:
    """`load_config` of a file's content; `source` names it in every message.

    Raises:
        SparseAttentionConfigError: as `load_config`.
    """
    return _without_block(_parse(raw, source), source)


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
        seq_len: tokens; when given, the layout must exist at this length.
        whole: the layout must also fit into memory, as training needs it; False where rows of it are enough.
        notices: receives a sentence for each thing that is accepted but deserves a line, for rank 0 to print.

    Raises:
        SparseAttentionConfigError: with every mistake of the block.
    """
    name = _name(source)
    _check_is_object(block, name)
    reading = _Reading(f"{name}: {BLOCK_KEY}", whole)
    structure = reading.read(block, num_heads, seq_len)
    if structure is None or reading.mistakes:
        raise SparseAttentionConfigError(reading.mistakes) from reading.cause
    if notices is not None:
        notices += reading.notices
    return structure


def sparse_attention_block(structure: SparsityConfig) -> dict[str, Any]:
    """The block that `parse_sparse_attention` makes this structure from, every key spelled out.

    Raises:
        ValueError: a class without a mode (`register_sparsity` gives it one), or whose values are not those that it was
            made from.
    """
    cls = type(structure)
    what = f"{cls.__qualname__} cannot be written as a sparse_attention block"
    mode = _mode_of(cls)
    if mode is None:
        raise ValueError(f'{what}: it has no mode; decorate it with @ds_sparse.register_sparsity("its name").')
    keys = json_fields(cls)
    block = {"mode": mode} | {key: copy.deepcopy(getattr(structure, key, None)) for key in keys}
    try:
        again = parse_sparse_attention(json.loads(json.dumps(block)), structure.num_heads, source=cls.__qualname__)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {reason(error)}") from error
    changed = [key for key in keys if getattr(again, key, None) != block[key]]
    if changed:
        raise ValueError(
            f"{what}: made again from it, it has another {', '.join(changed)}. Keep each argument of its __init__ in "
            "an attribute of the same name."
        )
    return block


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a DeepSpeed file, for its `sparse_attention` block; other keys are left to DeepSpeed.

    Made from the declared fields of every mode that is loaded. A key of another mode is admitted at its default, as the
    reader does. Conditions between fields are the reader's alone.
    """
    fields_of = {mode: json_fields(cls) for mode, cls in loaded_classes().items()}
    definitions = {}
    for mode, fields in fields_of.items():
        schema = json_model(mode, fields).model_json_schema()
        foreign = {
            key: {
                "const": default,
                "description": f"Belongs to {list_modes(owners)}; ignored, and only at its default.",
            }
            for key, (owners, default) in _foreign_keys(fields, fields_of).items()
        }
        for entry in schema["properties"].values():
            entry.pop("title", None)
        definitions |= schema.pop("$defs", {})
        definitions[mode] = {
            **schema,
            "description": _summary(loaded_classes()[mode]),
            "properties": {"mode": {"const": mode}} | schema["properties"] | foreign,
        }
    choices = [
        {
            "if": {"properties": {"mode": {"const": mode}}, "required": [] if mode == DEFAULT_MODE else ["mode"]},
            "then": {"$ref": f"#/$defs/{mode}"},
        }
        for mode in fields_of
    ]
    mode_entry = {"enum": list(fields_of), "default": DEFAULT_MODE, "description": "The sparsity structure."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "DeepSpeed configuration with a sparse_attention block",
        "type": "object",
        "properties": {BLOCK_KEY: {"type": "object", "properties": {"mode": mode_entry}, "allOf": choices}},
        "$defs": definitions,
    }


def _mode_of(cls: type[SparsityConfig]) -> str | None:
    for mode in sparsity_modes():
        try:
            if sparsity_class(mode) is cls:
                return mode
        except STRUCTURE_ERRORS:  # an entry point that does not load names some other class
            continue
    return None


def _summary(cls: type[SparsityConfig]) -> str:
    return " ".join((cls.__doc__ or cls.__name__).split("\n\n")[0].split())


def _name(source: Source) -> str:
    """What to call a configuration in a message."""
    if isinstance(source, Mapping):
        return "the config dict"
    name = os.fspath(source)
    return printable(name) if os.path.exists(name) or _from_base64(name) is None else "the base64 config"


def _from_base64(text: str) -> bytes | None:
    try:
        decoded = base64.urlsafe_b64decode(text)
    except ValueError:
        return None
    # Nearly any word decodes to something; a configuration is an object.
    return decoded if decoded.lstrip().startswith(b"{") else None


def _read(config: str | os.PathLike[str]) -> bytes:
    path = os.fspath(config)
    if not os.path.exists(path):
        decoded = _from_base64(path)
        if decoded is None:
            raise SparseAttentionConfigError([f"{path}: no such file, and not a DeepSpeed config in base64 either."])
        return decoded
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SparseAttentionConfigError([f"{path}: cannot be read: {error.strerror}."]) from error


def _parse(raw: bytes, source: str) -> dict[str, Any]:
    twice: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return dict(pairs)

    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SparseAttentionConfigError(
            [f"{source}: not UTF-8 text (byte {error.start}): save it as UTF-8."]
        ) from error
    try:
        content = hjson.loads(text, object_pairs_hook=collect)
    except (ValueError, OverflowError) as error:
        raise SparseAttentionConfigError([f"{source}: not valid JSON: {_why_not_json(text, error)}."]) from error
    except RecursionError as error:
        raise SparseAttentionConfigError([f"{source}: not a DeepSpeed config: nested too deeply to read."]) from error
    if twice:
        raise SparseAttentionConfigError(
            [f"{source}: {show_key(key)}: given twice in one object; keep one." for key in twice]
        )
    if not isinstance(content, dict):
        raise SparseAttentionConfigError([f"{source}: a DeepSpeed config is an object {{...}}, got {show(content)}."])
    if not content and "{" not in text:
        raise SparseAttentionConfigError(
            [f'{source}: holds nothing; a DeepSpeed config is an object such as {{"train_batch_size": 8}}.']
        )
    return content


def _why_not_json(text: str, error: Exception) -> str:
    """What Python's reader of strict JSON says, which is nearer to the mistake: hjson takes a word that it does not know
    for text up to the end of its line, and then misses what stands there. hjson's own where the file has comments."""
    if isinstance(error, OverflowError):
        return "a number beyond all bounds"
    if any(line.lstrip().startswith(("#", "//", "/*")) for line in text.splitlines()):
        return reason(error)
    constants: list[str] = []
    try:
        json.loads(text, parse_constant=constants.append)
    except (ValueError, RecursionError) as stricter:
        return reason(stricter) if isinstance(stricter, ValueError) else reason(error)
    return f"JSON has no {constants[0]}; write a number" if constants else reason(error)


def _without_block(content: dict[str, Any], source: str) -> LoadedConfig:
    if BLOCK_KEY not in content:
        _check_is_not_elsewhere(content, source)
        return LoadedConfig(content, None)
    block = content.pop(BLOCK_KEY)
    _check_is_object(block, source)
    return LoadedConfig(content, dict(block))


def _check_is_not_elsewhere(content: Mapping[str, Any], source: str) -> None:
    """Raises SparseAttentionConfigError where a file without the block was meant to have it."""
    for key in difflib.get_close_matches(BLOCK_KEY, [key for key in content if isinstance(key, str)], cutoff=0.8):
        raise SparseAttentionConfigError([f'{source}: {show_key(key)}: unknown key. Did you mean "{BLOCK_KEY}"?'])
    for path in _paths_to_block(content):
        raise SparseAttentionConfigError(
            [f"{source}: {path}: the block is nested, where nothing reads it; put it at the top level of the file."]
        )
    own = {key for cls in loaded_classes().values() for key in json_fields(cls)} - set(_ALSO_OF_OTHERS)
    found = [key for key in content if key in own or (key == "mode" and content[key] in sparsity_modes())]
    if found:
        sentence = (
            f"{source}: {', '.join(found)}: of a {BLOCK_KEY} block, but at the top level, where nothing reads it; put "
            f'it into one: "{BLOCK_KEY}": {{{show(found[0])}: {show(content[found[0]])}, ...}}.'
        )
        raise SparseAttentionConfigError([sentence])


def _paths_to_block(content: Mapping[str, Any], above: str = "", deep: int = 8) -> Iterator[str]:
    for key, value in content.items():
        path = f"{above}{show_key(key)}"
        if above and key == BLOCK_KEY:
            yield path
        elif isinstance(value, Mapping) and deep:
            yield from _paths_to_block(value, f"{path}.", deep - 1)


def _check_is_object(block: Any, source: str) -> None:
    if not isinstance(block, Mapping):
        raise SparseAttentionConfigError(
            [f"{source}: {BLOCK_KEY}: got {show(block)}; wanted an object {{...}}. For dense training remove the key."]
        )


class _Reading:
    """One pass over a block, gathering mistakes and notices."""

    def __init__(self, at: str, whole: bool) -> None:
        self.at = at
        self.whole = whole
        self.mistakes: list[str] = []
        self.notices: list[str] = []
        self.cause: Exception | None = None

    def read(self, block: Mapping[str, Any], num_heads: int, seq_len: int | None) -> SparsityConfig | None:
        given = {key: self._null_for_none(key, value) for key, value in block.items()}
        mode = given.pop("mode", DEFAULT_MODE)
        fields_of = {name: json_fields(known) for name, known in loaded_classes().items()}
        cls = self._class_of(mode)
        if cls is None:
            # The mode is a mistake of its own; the keys are still held to the first mode that has them.
            fields = {key: field for other in reversed(fields_of.values()) for key, field in other.items()}
        else:
            fields = json_fields(cls)

        self._check_keys(given, mode, fields, fields_of)
        values, invalid = self._check_values(given, fields)
        size = values.get("block")
        if seq_len is not None and size is not None and seq_len % size:
            self.mistakes.append(
                f"{self.at}.block: got {size}; the sequence length {seq_len} is not a multiple of it. "
                f"Use a length such as {-(-seq_len // size) * size}, or another block."
            )
            seq_len = None
        if cls is None:
            return None
        broken = self._check_rules((*cls.rules, *cls.json_rules), given, values)
        if not invalid and not broken:
            chosen = {key: value for key, value in values.items() if key in given or key in cls.json_defaults}
            structure = self._build(cls, mode, num_heads, chosen)
            if structure is not None and seq_len is not None:
                self._try_layout(structure, mode, given, values, seq_len)
            return structure
        if seq_len is not None:
            self._check_length_rules(cls, given, values, seq_len)
        return None

    def _null_for_none(self, key: str, value: Any) -> Any:
        # DeepSpeed's documentation shows Python's None, which hjson reads as text, with the comma that follows it.
        if isinstance(value, str) and value.rstrip(", ") == "None":
            self.notices.append(f"{self.at}.{key}: None is read as null, which is how JSON spells it.")
            return None
        return value

    def _class_of(self, mode: Any) -> type[SparsityConfig] | None:
        modes = sparsity_modes()
        if mode not in modes:
            hint = did_you_mean(mode, modes) or hint_of_text(mode) or (_OF_YOUR_OWN if isinstance(mode, str) else "")
            self.mistakes.append(f"{self.at}.mode: got {show(mode)}; wanted {one_of(modes)}.{hint}")
            return None
        try:
            cls = sparsity_class(mode)
            json_model(mode, json_fields(cls))
        except STRUCTURE_ERRORS as error:
            self.cause = error
            self.mistakes.append(f"{self.at}.mode: got {show(mode)}, whose class does not load: {reason(error)}")
            return None
        return cls

    def _check_keys(
        self,
        given: dict[str, Any],
        mode: Any,
        fields: dict[str, FieldInfo],
        fields_of: dict[str, dict[str, FieldInfo]],
    ) -> None:
        foreign = _foreign_keys(fields, fields_of)
        for key, value in given.items():
            if key in fields:
                continue
            if key in foreign:
                owners, default = foreign[key]
                if show(value) == show(default):
                    self.notices.append(
                        f"{self.at}.{key}: belongs to {list_modes(owners)}; at its default {show(default)} it is "
                        "ignored."
                    )
                else:
                    self.mistakes.append(
                        f"{self.at}.{key}: got {show(value)}, but mode {show(mode)} has no such key; it belongs to "
                        f"{list_modes(owners)}. Remove it or change the mode."
                    )
            elif key == "":
                self.mistakes.append(f'{self.at}."": an empty key (given {show(value)}); name it, or remove it.')
            elif key == BLOCK_KEY:
                self.mistakes.append(f"{self.at}.{key}: a block inside the block; put its keys into the outer one.")
            elif key in fields_of and isinstance(value, Mapping):
                self.mistakes.append(
                    f'{self.at}.{key}: a mode, not a key; write "mode": {show(key)} and put its keys beside that.'
                )
            elif key == "num_heads":
                self.mistakes.append(
                    f"{self.at}.num_heads: got {show(value)}; the model says how many heads. Remove it."
                )
            else:
                known = ["mode", *fields, *foreign]
                hint = did_you_mean(key, known) or f" Mode {show(mode)} knows {', '.join(['mode', *fields])}."
                self.mistakes.append(f"{self.at}.{show_key(key)}: unknown key (given {show(value)}).{hint}")

    def _check_values(self, given: dict[str, Any], fields: dict[str, FieldInfo]) -> tuple[dict[str, Any], set[str]]:
        """Values of all valid fields, given or default, and the names of the invalid ones."""
        model = json_model("block", fields)
        own = {key: value for key, value in given.items() if key in fields}
        invalid: dict[str, str] = {}
        try:
            valid = model.model_validate(own)
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                invalid.setdefault(str(detail["loc"][0]), detail["msg"])
            defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            values = {key: value for key, value in (defaults | own).items() if key not in invalid}
        else:
            values = {key: getattr(valid, key) for key in fields}
        for key, message in invalid.items():
            schema = json_model("block", {key: fields[key]}).model_json_schema()["properties"][key]
            wanted = _describe(schema) or message
            self.mistakes.append(
                f"{self.at}.{key}: got {show(own[key])}; wanted {wanted}.{hint_of_text(own[key])}"
                if key in own
                else f"{self.at}.{key}: missing; wanted {wanted}."
            )
        return values, set(invalid)

    def _check_rules(
        self, rules: tuple[Rule, ...], given: dict[str, Any], values: dict[str, Any], length: str = ""
    ) -> list[str]:
        """The sentences of the broken rules, of those whose fields are all valid."""
        broken = []
        for rule in rules:
            names = rule_fields(rule)
            if not all(name in values for name in names):
                continue
            sentence = rule(**{name: values[name] for name in names})
            if sentence:
                broken.append(sentence)
                # Named after a key that is in the file, so that there is something to look at.
                key, *others = sorted((name for name in names if name != "blocks"), key=lambda name: name not in given)
                beside = ", ".join(f"{name} {show(values[name])}" for name in others)
                beside = f" with {beside}" if beside else ""
                self.mistakes.append(f"{self.at}.{key}: got {show(values[key])}{beside}{length}. {sentence}")
        return broken

    def _check_length_rules(
        self, cls: type[SparsityConfig], given: dict[str, Any], values: dict[str, Any], seq_len: int
    ) -> list[str]:
        if "block" not in values:
            return []
        values = values | {"blocks": seq_len // values["block"]}
        return self._check_rules(cls.length_rules, given, values, f" at a sequence length of {seq_len}")

    def _build(
        self, cls: type[SparsityConfig], mode: str, num_heads: int, values: dict[str, Any]
    ) -> SparsityConfig | None:
        try:
            with warnings.catch_warnings():
                # The cautions of the structure become notices.
                warnings.simplefilter("ignore", SparsityWarning)
                structure = build(cls, num_heads, values)
            cautions = list(structure.cautions())
        except ValidationError as error:
            # A subclass with an __init__ of its own handed a wrong value on.
            self.cause = error
            for detail in error.errors(include_url=False):
                self.mistakes.append(
                    f"{self.at}.mode: got {show(mode)}, whose class {cls.__name__} set {show(detail['input'])}; "
                    f"{detail['msg']}."
                )
            return None
        except STRUCTURE_ERRORS as error:
            self.cause = error
            self.mistakes.append(
                f"{self.at}.mode: got {show(mode)}, whose class {cls.__name__} cannot be made from this block: "
                f"{reason(error)}"
            )
            return None
        self._note(cautions)
        return structure

    def _try_layout(
        self, structure: SparsityConfig, mode: str, given: dict[str, Any], values: dict[str, Any], seq_len: int
    ) -> None:
        cls = type(structure)
        try:
            with random_numbers_kept():
                if self.whole:
                    structure.make_bool_layout(seq_len)
                else:
                    structure.make_rows(seq_len).maker(0)(range(1))
            cautions = list(structure.cautions_at(seq_len // structure.block))
        except STRUCTURE_ERRORS as error:
            self.cause = error
            # The length rules only explain a failure: a subclass may have replaced the step that needs them.
            if str(error) not in self._check_length_rules(cls, given, values, seq_len):
                key, value = ("block", structure.block) if isinstance(error, MemoryError) else ("mode", mode)
                self.mistakes.append(
                    f"{self.at}.{key}: got {show(value)}, but {cls.__name__} has no layout at a sequence length of "
                    f"{seq_len}: {reason(error)}"
                )
        else:
            self._note(cautions)

    def _note(self, cautions: list[tuple[str, str]]) -> None:
        self.notices += [f"{self.at}.{option}: {sentence}" for option, sentence in cautions]


def _foreign_keys(
    fields: dict[str, FieldInfo], fields_of: dict[str, dict[str, FieldInfo]]
) -> dict[str, tuple[list[str], Any]]:
    """Keys that only other modes have, with those modes and the documented default (that of the first of them)."""
    foreign: dict[str, tuple[list[str], Any]] = {}
    for mode, others in fields_of.items():
        for key, field in others.items():
            if key not in fields and not field.is_required():
                foreign.setdefault(key, ([], field.get_default(call_default_factory=True)))[0].append(mode)
    return foreign


def _describe(schema: Mapping[str, Any]) -> str | None:
    """What a value may be, in words, from its JSON schema; None for a schema that we have no words for."""
    if "enum" in schema:
        return one_of(schema["enum"])
    if "anyOf" in schema:
        parts = [_describe(part) for part in schema["anyOf"]]
        return " or ".join(parts) if all(parts) else None
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            return "a string"
        case "integer" | "number" as kind:
            least = f" of at least {schema['minimum']}" if "minimum" in schema else ""
            most = f" of at most {schema['maximum']}" if "maximum" in schema else ""
            return f"{'an integer' if kind == 'integer' else 'a number'}{least}{' and' if least and most else ''}{most}"
        case "array":
            items = _describe(schema.get("items", {}))
            size = " of at least one" if schema.get("minItems") else ""
            return f"a list{size}, each {items}" if items else None
    return None
