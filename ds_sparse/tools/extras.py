"""Packages that the core does without: which extra of ds_sparse brings each, and the sentence where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "deepspeed": "deepspeed",
    "psutil": "deepspeed",
    "transformers": "transformers",
    "matplotlib": "plot",
    "datasets": "train",
    "tokenizers": "train",
    "tqdm": "train",
    "accelerate": "transformers",
    "shtab": "terminal",
}
"""Package to the extra that brings it."""


@contextmanager
def optional_imports() -> Iterator[None]:
    """Around imports of packages that extras bring.

        with optional_imports():
            import deepspeed

    Raises:
        ImportError: a package of `EXTRAS` is not installed; the sentence says with which command it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ImportError(
            f"This part of ds_sparse needs {package}, which is not installed: "
            f"pip install 'ds_sparse[{EXTRAS[package]}]'.",
            name=package,
        ) from error
