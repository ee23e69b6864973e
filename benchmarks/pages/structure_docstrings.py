"""Docstrings of structures on the site: with their fields, as help() shows them. mkdocstrings reads sources alone."""

from importlib import import_module
from typing import Any

import griffe


class StructureDocstrings(griffe.Extension):
    """Gives each class under `@declared` the docstring that it has in Python."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None and any(str(decorator.value) == "declared" for decorator in cls.decorators):
            cls.docstring.value = getattr(import_module(cls.module.path), cls.name).__doc__
