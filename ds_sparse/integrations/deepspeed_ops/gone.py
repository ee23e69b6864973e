"""Names of DeepSpeed's kernels, to which nothing of ours corresponds."""

from __future__ import annotations

from typing import Any, NoReturn


class Gone:
    """Stands under an old name that can be imported, and says at its first use what to use instead.

    Raises:
        AttributeError, TypeError: on any use, with that sentence.
    """

    def __init__(self, name: str, instead: str):
        self._sentence = f"{name} was part of DeepSpeed's Triton kernels; ds_sparse has its own. Use {instead}."

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self.__dict__.get("_sentence", name))

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise TypeError(self._sentence)

    def __repr__(self) -> str:
        return f"<{self._sentence}>"
