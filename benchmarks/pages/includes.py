"""Extends Markdown by what pages include of results and code, when the site is built.

A line `<!-- made: MAKER [WORD...] -->` is replaced by what a function of MAKERS returns for its words.
"""

import re
from collections.abc import Callable

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

from . import claims, gains, keys, plans, tables, training

MARK = re.compile(r"<!-- made: (\w+)((?: \S+)*) -->")

MAKERS: dict[str, Callable[..., str]] = {
    "claims": claims.claims,
    "gain": gains.shown,
    "keys": keys.table,
    "losses": training.picture,
    "measured": plans.measured,
    "measured_on_several": plans.measured_on_several,
    "predicted": plans.predicted,
    "table": tables.table,
    "texts": tables.texts,
    "training": tables.training,
}


class Includes(Preprocessor):
    """Replaces marks before anything else reads the page."""

    def run(self, lines: list[str]) -> list[str]:
        return [made for line in lines for made in expanded(line).split("\n")]


def expanded(line: str) -> str:
    """The text that a line stands for."""
    found = MARK.fullmatch(line)
    return line if found is None else MAKERS[found[1]](*found[2].split())


class IncludesExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(Includes(md), "includes", 31)  # before fenced blocks, after snippets


def makeExtension(**options: object) -> Extension:
    return IncludesExtension(**options)
