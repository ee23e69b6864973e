"""Output of commands: lines, in colour and below a bar where a person reads them, plain where they go elsewhere; and
sentences about what is wrong."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from .arguments import UsageError

BAR_AFTER = 2.0
"""Seconds that work takes before a bar is shown."""


def wrong(sentence: object, status: int = 1) -> int:
    """Prints a sentence, or an error's, to standard error, in red where a person reads it. Returns the exit status: 2
    for a `UsageError`."""
    Terminal(error=True).line(str(sentence), "red")
    return 2 if isinstance(sentence, UsageError) else status


class Terminal:
    """Standard output, or standard error. Colours and bars are rich's; without it, and in a pipe or file, lines are as
    they are given."""

    def __init__(self, error: bool = False) -> None:
        self._error, self._console = error, _console(error)

    def line(self, text: str, style: str = "") -> None:
        """Prints a line. style: as rich has it, such as 'bold' or 'red'."""
        if self._console is None:
            print(text, file=sys.stderr if self._error else sys.stdout, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, total: int | None, title: str) -> Iterator[Callable[[str], None]]:
        """Around work of so many steps, or of one that says nothing of itself; yields what says that one is done, and
        what comes. The bar comes after `BAR_AFTER` seconds and goes at the end."""
        if self._console is None or total == 0:
            yield lambda comes: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        counted = [MofNCompleteColumn()] if total else []
        columns = [TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeElapsedColumn()]
        # What counts its steps is drawn at these alone: no thread may run beside what is timed.
        bar = Progress(*columns, console=self._console, transient=True, auto_refresh=total is None)
        task = bar.add_task(title, total=total)
        timer = Timer(BAR_AFTER, bar.start)
        timer.daemon = True
        timer.start()
        try:
            yield lambda comes: bar.update(task, advance=1, description=comes, refresh=bar.live.is_started)
        finally:
            timer.cancel()
            timer.join()
            bar.stop()


def width(otherwise: int) -> int:
    """Columns of the terminal; `otherwise` where standard output is none."""
    is_one = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size((otherwise, 24)).columns if is_one else otherwise


def _console(error: bool) -> Any:
    stream = sys.stderr if error else sys.stdout
    if stream is None or not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=error)
