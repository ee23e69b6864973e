"""The code on pages: fenced blocks with their language and title."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Snippet(NamedTuple):
    language: str
    title: str | None
    code: str
    line: int
    """The first line of code, counted from 1."""


def fenced(page: Path) -> list[Snippet]:
    """The fenced blocks of a page, in their order."""
    text = page.read_text()
    found = re.finditer(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [Snippet(m[1], m[2], m[3], text.count("\n", 0, m.start(3)) + 1) for m in found]


def run_python(page: Path, names: dict[str, object]) -> None:
    """Runs the Python blocks of a page, in one namespace; those with a title are files, and not run. An error names the
    page and its line."""
    for snippet in fenced(page):
        if snippet.language == "python" and snippet.title is None:
            exec(compile("\n" * (snippet.line - 1) + snippet.code, str(page), "exec"), names)
