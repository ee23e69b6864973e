"""Whether a picture can be written, before it takes the time to draw it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..wording import listed


def require_writable(path: str | os.PathLike[str], endings: Sequence[str]) -> None:
    """Raises ValueError where the path has none of these endings, or no file can be written to it."""
    name = os.fspath(path)
    folder = os.path.dirname(name) or "."
    if os.path.splitext(name)[1].lower() not in endings:
        raise ValueError(f"A layout is drawn as {listed(endings, 'or')}, got {name!r}.")
    if not os.path.isdir(folder):
        raise ValueError(f"{name} cannot be written: there is no folder {folder}. Make it first.")
    if os.path.isdir(name):
        raise ValueError(f"{name} cannot be written: it is a folder.")
    if not os.access(name if os.path.exists(name) else folder, os.W_OK):
        raise ValueError(f"{name} cannot be written: permission denied.")
