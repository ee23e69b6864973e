"""From a structure's class to the fields that its JSON block takes: one declaration for Python, JSON and the schema."""

from __future__ import annotations

import copy
import inspect
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.fields import FieldInfo

from ._base import SparsityConfig
from .declarations import DEFAULTS, declare, declared_value


def json_fields(cls: type[SparsityConfig]) -> dict[str, FieldInfo]:
    """Key to field for everything a block of this structure may hold besides `mode`.

    The fields of a `@declared` class; of a plain `__init__` its parameters, with their annotations and defaults.
    `seed`, `causal` and `strict_causal` are among them, unless a base class declares that its constructor does not take
    them. `num_heads` is not: it comes from the model.
    """
    fields = _class_fields(cls)
    for name, default in cls.json_defaults.items():
        fields[name] = _with_default(fields[name], default)
    return fields


def class_defaults(cls: type[SparsityConfig]) -> dict[str, Any]:
    """The same keys, of those that need not be given, with what Python's constructor takes: not JSON's defaults."""
    fields = _class_fields(cls).items()
    return {name: field.get_default(call_default_factory=True) for name, field in fields if not field.is_required()}


def json_model(title: str, fields: dict[str, FieldInfo]) -> type[BaseModel]:
    """A strict pydantic model of these fields: it validates the values and gives the JSON schema."""
    config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
    definitions: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    return create_model(title, __config__=config, **definitions)


def build(cls: type[SparsityConfig], num_heads: int, values: dict[str, Any]) -> SparsityConfig:
    """Makes the structure from validated values; those that its own `__init__` does not take, ours, are declared."""
    taken = _constructor_fields(cls.__mro__)
    structure = cls(num_heads=num_heads, **{name: value for name, value in values.items() if name in taken})
    for name, value in values.items():
        if name not in taken and value != DEFAULTS[name]:
            declare(structure, name, value)
    return structure


def value_of(structure: SparsityConfig, name: str) -> Any:
    """The value of one of the keys of its block; `build` makes it again from these."""
    if name in DEFAULTS and name not in _constructor_fields(type(structure).__mro__):
        return declared_value(structure, name)
    return getattr(structure, name, None)


def _class_fields(cls: type[SparsityConfig]) -> dict[str, FieldInfo]:
    fields = _constructor_fields(cls.__mro__)
    declared: Any = cls  # what is no field of its constructor
    left_out = {name for name, field in declared.__pydantic_fields__.items() if field.init is False}
    fields |= {name: field for name, field in _keyword_only_fields().items() if name not in {*fields, *left_out}}
    fields.pop("num_heads", None)
    return fields


def _keyword_only_fields() -> dict[str, FieldInfo]:
    return {name: field for name, field in vars(SparsityConfig)["__pydantic_fields__"].items() if field.kw_only}


def _constructor_fields(mro: tuple[type, ...]) -> dict[str, FieldInfo]:
    place = next(place for place, cls in enumerate(mro) if "__init__" in vars(cls))
    owner = mro[place]
    if owner is object:
        return {}
    if "__pydantic_fields__" in vars(owner):
        return {name: field for name, field in vars(owner)["__pydantic_fields__"].items() if field.init is not False}

    inherited = _constructor_fields(mro[place + 1 :])
    init = vars(owner)["__init__"]
    hints = get_type_hints(init, include_extras=True)
    fields: dict[str, FieldInfo] = {}
    for name, parameter in list(inspect.signature(init).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            fields |= {name: field for name, field in inherited.items() if name not in fields}
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            fields[name] = _parameter_field(parameter, hints.get(name), inherited.get(name))
    return fields


def _parameter_field(parameter: inspect.Parameter, hint: Any, inherited: FieldInfo | None) -> FieldInfo:
    required = parameter.default is parameter.empty
    if hint is None and inherited is not None:
        return _with_default(inherited, ... if required else parameter.default)
    if hint is None:
        # Without an annotation the default says the type.
        hint = Any if required or parameter.default is None else type(parameter.default)
    return FieldInfo.from_annotation(hint) if required else FieldInfo.from_annotated_attribute(hint, parameter.default)


def _with_default(field: FieldInfo, default: Any) -> FieldInfo:
    field = copy.copy(field)
    field.default = default
    return field
