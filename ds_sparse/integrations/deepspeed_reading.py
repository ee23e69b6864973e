"""Has DeepSpeed's own classes read a configuration: what they raise, what they log, which keys they look up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, KeysView, Mapping
from types import ModuleType
from typing import Any

from ..config import STRUCTURE_ERRORS
from ..extras import optional_imports
from ..wording import cut, reason

LONGEST = 240
"""Characters of what DeepSpeed says."""


def import_deepspeed() -> ModuleType:
    """DeepSpeed, without the lines that it logs when it is imported (where it finds no GPU, say)."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with optional_imports():
            import deepspeed
    finally:
        logging.disable(before)
    return deepspeed


class Asked(dict):
    """A configuration that keeps which keys were looked up, in itself and in the objects below."""

    def __init__(self, content: Mapping[Any, Any]):
        super().__init__({key: Asked(value) if isinstance(value, dict) else value for key, value in content.items()})
        self.asked: set[Any] = set()
        self.read = False
        """Whether a value was taken by its key, and not only all of them at once."""
        self.handed_on = False
        """Whether it was copied for what reads it later."""

    def __copy__(self) -> Asked:
        self.handed_on = True
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add(key)
        self.read = True
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        self.read = True
        return super().get(key, default)

    def keys(self) -> KeysView[Any]:  # type: ignore[override]  # dict's own kind cannot be made
        return KeysView(self)


def read(config: dict[str, Any]) -> tuple[Exception | None, list[str]]:
    """What DeepSpeed raises for a configuration, and what it warns of. Over a shape that it does not expect it trips by
    any error."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    raised = None
    with logged() as records:
        try:
            DeepSpeedConfig(config)
        except (*STRUCTURE_ERRORS, DeepSpeedConfigError) as error:
            raised = error
    return raised, [record.getMessage() for record in records]


@contextlib.contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Keeps what DeepSpeed logs, in place of printing it."""
    from deepspeed.utils import logger

    records: list[logging.LogRecord] = []
    collector: Any = logging.Handler(logging.WARNING)
    collector.emit = records.append
    handlers, logger.handlers = logger.handlers, [collector]
    try:
        yield records
    finally:
        logger.handlers = handlers


def in_words(error: Exception) -> str:
    """What an error of DeepSpeed's says, as the end of a sentence."""
    text = reason(error)
    kind = f"{type(error).__name__}: "
    # An assertion or an error of DeepSpeed's own says it in words.
    text = text.removeprefix(kind) if type(error).__name__ in ("AssertionError", "DeepSpeedConfigError") else text
    return f"{cut(text, LONGEST).rstrip('.')}."
