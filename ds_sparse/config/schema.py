"""The JSON schema of a DeepSpeed file, for its block."""

from __future__ import annotations

from typing import Any

from ..sparsity import SparsityConfig
from ..sparsity._fields import json_fields, json_model
from ..sparsity._registry import loaded_classes
from ..tools.wording import list_modes
from .block import KEY_PATTERN
from .file import BLOCK_KEY, LAYERS_KEY
from .reading import DEFAULT_MODE, NONE, foreign_keys

_NONE = {"type": "string", "pattern": f"^{NONE}$", "description": "Python's None, read as null."}


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a DeepSpeed file, for its `sparse_attention` block; other keys are left to DeepSpeed.

    Made from the declared fields of every mode that is loaded. A key of another mode is admitted at its default, as the
    reader does. Conditions between fields are the reader's alone.
    """
    fields_of = {mode: json_fields(cls) for mode, cls in loaded_classes().items()}
    definitions: dict[str, Any] = {}
    required: dict[str, dict[str, list[str]]] = {}
    for mode, fields in fields_of.items():
        schema = json_model(mode, fields).model_json_schema()
        foreign = {
            key: {
                **({"const": default} if default is not None else {"anyOf": [{"const": None}, _NONE]}),
                "description": f"Belongs to {list_modes(owners)}; ignored, and only at its default.",
            }
            for key, (owners, default) in foreign_keys(fields, fields_of).items()
        }
        for entry in schema["properties"].values():
            entry.pop("title", None)
            if {"type": "null"} in entry.get("anyOf", ()):
                entry["anyOf"].append(_NONE)
        definitions |= schema.pop("$defs", {})
        required[mode] = {"required": schema.pop("required")} if "required" in schema else {}
        by_layer = {} if LAYERS_KEY in fields else {LAYERS_KEY: _layers(mode)}
        definitions[mode] = {
            **schema,
            "description": summary(loaded_classes()[mode]),
            "properties": {"mode": {"const": mode}} | schema["properties"] | foreign | by_layer,
        }
    choices = [
        {
            "if": {"properties": {"mode": {"const": mode}}, "required": [] if mode == DEFAULT_MODE else ["mode"]},
            "then": {"$ref": f"#/$defs/{mode}", **required[mode]},
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


def _layers(mode: str) -> dict[str, Any]:
    """The schema of `layers` in a block of this mode, which an entry without one has too."""
    entry = {
        "type": "object",
        "properties": {LAYERS_KEY: False},
        "if": {"required": ["mode"]},
        "then": {"$ref": f"#/properties/{BLOCK_KEY}"},
        "else": {"$ref": f"#/$defs/{mode}"},
    }
    return {
        "type": "object",
        "description": "Layers and ranges of layers, counted from 0, with what differs from this block, or null for "
        "layers that stay dense; later entries win.",
        "propertyNames": {"pattern": f"^{KEY_PATTERN}$"},
        "additionalProperties": {"anyOf": [entry, {"type": "null"}, _NONE]},
    }


def summary(cls: type[SparsityConfig]) -> str:
    """Describes a structure by the first sentence of its class's docstring."""
    return " ".join((cls.__doc__ or cls.__name__).split("\n\n")[0].split())
