"""The docstring of a structure's class: its fields are described where they are declared, and nowhere else."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

_WIDTH = 112


def with_fields(docstring: str, fields: Mapping[str, FieldInfo]) -> str:
    """A docstring with a section of the constructor's arguments, before its sections on errors and examples. One that
    has such a section stays as it is.

    Args:
        docstring: the class's own.
        fields: by name, as `__pydantic_fields__` has them.
    """
    text = inspect.cleandoc(docstring)
    if re.search(r"^Args:$", text, re.MULTILINE):
        return text
    in_order = sorted(fields.items(), key=lambda item: bool(item[1].kw_only))
    entries = [_entry(name, field) for name, field in in_order if field.init is not False]
    later = re.search(r"^(Raises|Examples):$", text, re.MULTILINE)
    place = len(text) if later is None else later.start()
    return "\n\n".join([text[:place].rstrip(), "\n".join(["Args:", *entries]), text[place:]]).rstrip()


def _entry(name: str, field: FieldInfo) -> str:
    sentences = [field.description or "", *_choices(field)]
    if not field.is_required():
        sentences.append(f"Default: {field.get_default(call_default_factory=True)!r}.")
    text = f"{name}: {' '.join(sentence for sentence in sentences if sentence)}"
    return textwrap.fill(text, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False)


def _choices(field: FieldInfo) -> list[str]:
    """A sentence with the values that a field takes, where these are a few."""
    values: Any = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    more = field.json_schema_extra
    if isinstance(more, Mapping):
        values = more.get("enum", values)
    return [f"One of {', '.join(map(repr, values))}."] if values else []
