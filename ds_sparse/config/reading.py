"""One pass over a block, which finds all its mistakes."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..sparsity import SparsityConfig, SparsityWarning, sparsity_class, sparsity_modes
from ..sparsity._fields import build, json_fields, json_model
from ..sparsity._registry import loaded_classes
from ..sparsity.declarations import Rule, rule_fields
from ..tools.block_sizes import rounded_up
from ..tools.random_numbers import random_numbers_kept
from ..tools.wording import did_you_mean, hint_of_text, list_modes, one_of, reason, show, show_key
from .file import BLOCK_KEY, LAYERS_KEY, SparseAttentionConfigError

DEFAULT_MODE = "fixed"

NONE = "None[, ]*"
"""Text that is read as null where a key takes null and not this text."""

Foreign = dict[str, tuple[list[str], Any]]
"""Keys that only other modes have."""

_OF_YOUR_OWN = (
    " One of your own is known after @ds_sparse.register_sparsity, or through the entry-point group ds_sparse.sparsity."
)

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
"""Errors that the code of a user's structure may raise; the reader makes a sentence of them."""


class Choice(NamedTuple):
    """A class that a block names, and its values.

    Attributes:
        at: where the block stands, for errors.
        values: of all its keys.
        given: the keys of which the constructor gets the value; it has the defaults of the others itself.
    """

    at: str
    mode: str
    cls: type[SparsityConfig]
    values: dict[str, Any]
    given: frozenset[str]

    def make(self, num_heads: int) -> SparsityConfig:
        """The structure for so many heads.

        Raises:
            SparseAttentionConfigError: the class cannot be made for them.
        """
        reading = Reading(self.at, whole=False)
        structure = reading.build(self, num_heads)
        if structure is None:
            raise SparseAttentionConfigError(reading.mistakes) from reading.cause
        return structure


class Reading:
    """One pass over a block, gathering mistakes and notices."""

    def __init__(self, at: str, whole: bool) -> None:
        self.at = at
        self.whole = whole
        self.mistakes: list[str] = []
        self.notices: list[str] = []
        self.cause: Exception | None = None

    def take(self, other: Reading) -> None:
        """Takes over the mistakes and notices of a reading of a part, but for those that were found here already."""
        for own, more in ((self.mistakes, other.mistakes), (self.notices, other.notices)):
            said = {sentence.removeprefix(self.at) for sentence in own}
            own += [sentence for sentence in more if sentence.removeprefix(other.at) not in said]
        self.cause = self.cause or other.cause

    def read(
        self, block: Mapping[str, Any], num_heads: int, seq_len: int | None
    ) -> tuple[Choice, SparsityConfig] | None:
        """Reads a block, and makes its structure for so many heads; None where there is a mistake."""
        given = {key: _with_integers(value) for key, value in block.items()}
        mode = given.pop("mode", DEFAULT_MODE)
        fields_of = {name: json_fields(known) for name, known in loaded_classes().items()}
        cls = self._class_of(mode)
        if cls is None:
            # The mode is a mistake of its own; the keys are still held to the first mode that has them.
            fields = {key: field for other in reversed(fields_of.values()) for key, field in other.items()}
        else:
            fields = json_fields(cls)

        foreign = foreign_keys(fields, fields_of)
        given = {key: self._null_for_none(key, value, fields, foreign) for key, value in given.items()}
        self._check_keys(given, mode, fields, fields_of, foreign)
        values, invalid = self._check_values(given, fields)
        size = values.get("block")
        if seq_len is not None and size is not None and seq_len % size:
            self.notices.append(
                f"{self.at}.block: {seq_len} tokens end in a short block of {seq_len % size}. Fused attention takes "
                f"any length; SparseSelfAttention, MatMul and Softmax want a multiple of {size}, such as "
                f"{rounded_up(seq_len, size)}."
            )
        if cls is None:
            return None
        broken = self._check_rules((*cls.rules, *cls.json_rules), given, values)
        if not invalid and not broken:
            choice = Choice(self.at, mode, cls, values, frozenset(given) | frozenset(cls.json_defaults))
            structure = self.build(choice, num_heads)
            if structure is not None and seq_len is not None:
                self._try_layout(structure, mode, given, values, seq_len)
            return None if structure is None else (choice, structure)
        if seq_len is not None:
            self._check_length_rules(cls, given, values, seq_len)
        return None

    def _null_for_none(self, key: str, value: Any, fields: dict[str, FieldInfo], foreign: Foreign) -> Any:
        # DeepSpeed's documentation shows Python's None, which hjson reads as text, with the comma that follows it.
        if not isinstance(value, str) or not re.fullmatch(NONE, value):
            return value
        if (key in fields and _takes(key, fields[key], value)) or (key in foreign and foreign[key][1] == value):
            return value
        self.notices.append(f"{self.at}.{key}: None is read as null, which is how JSON spells it.")
        return None

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
        foreign: Foreign,
    ) -> None:
        for key, value in given.items():
            if key in fields:
                continue
            if key in foreign:
                owners, default = foreign[key]
                if _same(value, default):
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
                known = ["mode", LAYERS_KEY, *fields, *foreign]
                who = f"Mode {show(mode)} knows" if mode in fields_of else "The modes that are known take"
                hint = did_you_mean(key, known) or f" {who} {', '.join(['mode', *fields])}."
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
            wanted = describe(schema) or message
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
        values = values | {"blocks": rounded_up(seq_len, values["block"]) // values["block"]}
        return self._check_rules(cls.length_rules, given, values, f" at a sequence length of {seq_len}")

    def build(self, choice: Choice, num_heads: int) -> SparsityConfig | None:
        """The structure of what a block says; None where its class does not take that."""
        mode, cls = choice.mode, choice.cls
        values = {key: copy.deepcopy(value) for key, value in choice.values.items() if key in choice.given}
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
        cls, whole = type(structure), rounded_up(seq_len, structure.block)
        try:
            with random_numbers_kept():
                if self.whole:
                    structure.make_bool_layout(whole)
                else:
                    structure.make_rows(whole).maker(0)(range(1))
            cautions = list(structure.cautions_at(whole // structure.block))
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


def foreign_keys(fields: dict[str, FieldInfo], fields_of: dict[str, dict[str, FieldInfo]]) -> Foreign:
    """Keys that only other modes have, with those modes and the documented default (that of the first of them)."""
    foreign: Foreign = {}
    for mode, others in fields_of.items():
        for key, field in others.items():
            if key not in fields and not field.is_required():
                foreign.setdefault(key, ([], field.get_default(call_default_factory=True)))[0].append(mode)
    return foreign


def _with_integers(value: Any) -> Any:
    """JSON has one kind of number: 2.0 is 2, as for a schema, and as hjson reads it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(part) for key, part in value.items()}
    return type(value)(map(_with_integers, value)) if type(value) in (list, tuple) else value


def _takes(key: str, field: FieldInfo, value: Any) -> bool:
    try:
        json_model("block", {key: field}).model_validate({key: value})
    except ValidationError:
        return False
    return True


def _same(value: Any, default: Any) -> bool:
    """Compares values as they stand in a file, where 1 is not true."""
    return json.dumps(value, default=repr) == json.dumps(_with_integers(default), default=repr)


def describe(schema: Mapping[str, Any]) -> str | None:
    """Says in words what a value may be, from its JSON schema; None for a schema that we have no words for."""
    if "enum" in schema:
        return one_of(schema["enum"])
    if "anyOf" in schema:
        parts = [describe(part) for part in schema["anyOf"]]
        return " or ".join(filter(None, parts)) if all(parts) else None
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case "string":
            return "a string"
        case "integer" | "number" as kind:
            least = f" of at least {schema['minimum']}" if "minimum" in schema else ""
            least = f" above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else least
            most = f" of at most {schema['maximum']}" if "maximum" in schema else ""
            return f"{'an integer' if kind == 'integer' else 'a number'}{least}{' and' if least and most else ''}{most}"
        case "array":
            items = describe(schema.get("items", {}))
            size = " of at least one" if schema.get("minItems") else ""
            return f"a list{size}, each {items}" if items else None
    return None
