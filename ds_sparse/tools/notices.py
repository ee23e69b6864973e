"""Notices of a block: what the reader accepts and a user should know."""

from __future__ import annotations

from collections.abc import Iterable

from .ranks import say
from .wording import BLOCK_KEY

_said: set[str] = set()


def say_notices(notices: Iterable[str]) -> None:
    """Prints each notice on rank 0, once a process: a block is read several times, from its file and as a dict."""
    for notice in notices:
        about = notice.partition(f": {BLOCK_KEY}.")[2] or notice
        if about not in _said:
            _said.add(about)
            say(notice)
