"""Python sources of the running interpreter: its standard library and the packages that are installed."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

HELD_OUT_ONE_IN = 20

SKIPPED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
"""Folders that repeat themselves, or that hold tables made by programs."""

INSTALLED = {"site-packages", "dist-packages"}


def documents(least_bytes: int) -> Iterator[str]:
    """Texts of all files of at least so many bytes, each once, in the order of their paths; the standard library
    first."""
    seen = set()
    for file in python_files():
        if file.stat().st_size >= least_bytes and (text := text_of(file)):
            key = hashlib.sha256(text.encode()).digest()
            if key not in seen:
                seen.add(key)
                yield text


def python_files() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    yield from files_below(Path(paths["stdlib"]), SKIPPED | INSTALLED)
    for folder in sorted({paths["purelib"], paths["platlib"]}):
        yield from files_below(Path(folder), SKIPPED)


def files_below(root: Path, skipped: Iterable[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - set(skipped))
        yield from (path for name in sorted(names) if name.endswith(".py") and (path := Path(folder, name)).is_file())


def text_of(file: Path) -> str:
    """Empty where the file cannot be read as UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_held_out(text: str, one_in: int = HELD_OUT_ONE_IN) -> bool:
    """About one document in so many; depends on the content alone, so it stays when others come or go."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) % one_in == 0
