"""Layouts as pictures: text for a terminal, .png and .svg files, a page for a browser. A layout need not exist whole to
be drawn."""

from .page import PAGES, Sheet, page_text, save_page
from .pictures import PICTURES, draw, require_drawable, save_drawing, takes_ascii_only

__all__ = [
    "PAGES",
    "PICTURES",
    "Sheet",
    "draw",
    "page_text",
    "require_drawable",
    "save_drawing",
    "save_page",
    "takes_ascii_only",
]
