"""Formulas of the site: LaTeX in, MathML out, when the site is built. Browsers show MathML without scripts or fonts."""

from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: dict, md: Any, **_: Any) -> str:
    """A fenced block of the language `math`, which GitHub shows as a formula too."""
    return f'<div class="{css_class}">{convert(source, display="block")}</div>'
