"""Output of commands: lines, in colour and below a bar where a person reads them, plain where they go elsewhere; and
sentences about what is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wrong(sentence: object, status: int = 1) -> int:
    """Prints a sentence, or an error's, to standard error. Returns the exit status."""
    print(sentence, file=sys.stderr)
    return status


class Terminal:
    """Standard output. Colours and bars are rich's; without it, and in a pipe or file, lines are as they are given."""

    def __init__(self) -> None:
        self._console = _console()

    def line(self, text: str, style: str = "") -> None:
        """Prints a line. style: as rich has it, such as 'bold' or 'red'."""
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int, title: str) -> Iterator[Callable[[str], None]]:
        """Around work of so many steps; yields what says that one is done, and what comes."""
        if self._console is None:
            yield lambda comes: None
            return
        from rich.progress import Progress

        with Progress(console=self._console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda comes: bar.update(task, advance=1, description=comes)


def _console() -> Any:
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console()
