"""Modules of `examples`, which import each other by plain names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDERS = [str(Path(__file__).parents[2] / "examples" / name) for name in ("bing_bert", "gpt_neox")]


def example(name: str) -> Any:
    """A module of the examples.

    Raises:
        ImportError: it needs a package that is not installed.
    """
    sys.path += [folder for folder in FOLDERS if folder not in sys.path]
    return importlib.import_module(name)
