"""A page that shows layouts in a browser: one file, which asks for nothing from a network."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from ..layout import LayoutRows
from ..picture import head_name
from ..tools.random_numbers import random_numbers_kept
from .changes import Changes
from .pictures import require_drawable, writing
from .walk import LARGEST, walks

PAGES = (".html",)
"""Endings of the files that `save_page` writes."""

_PROGRAM = ("rows.js", "tiles.js", "picture.js", "pane.js", "operation.js")
"""Scripts of the page, in the folder browser, each of which uses those before."""

_MOST = 64 << 20
"""Characters of the layouts in a page, which a browser still opens."""


@dataclass(frozen=True)
class Sheet:
    """A layout of a page.

    Attributes:
        file: of which it is.
        name: what it is called in the page.
        rows: its block rows, which need not exist whole.
        block: tokens in a block.
        num_heads: of the model, where all may share a layout.
        causal: later tokens are masked inside live blocks, so that kernels leave out the blocks above the diagonal.
        head: the one head to show; None: all.
        about: keys and values of its block, to be listed.
    """

    file: str
    name: str
    rows: LayoutRows
    block: int
    num_heads: int
    causal: bool = False
    head: int | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


def save_page(sheets: Sequence[Sheet], path: str | os.PathLike[str], title: str, notes: Sequence[str] = ()) -> None:
    """Writes the page that `page_text` makes.

    Args:
        path: the file, which ends in .html.

    Raises:
        ValueError: another ending, or a path that no file can be written to; as `page_text`.
    """
    require_drawable(path, PAGES)
    text = page_text(sheets, title, notes)
    with writing(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)


@random_numbers_kept()
def page_text(sheets: Sequence[Sheet], title: str, notes: Sequence[str] = ()) -> str:
    """A page with layouts to look into: at any zoom, a head at a time or all, one beside another, with the tiles that
    kernels walk.

    Args:
        sheets: the layouts, the first two of which stand beside each other at first if they are of different files.
        title: of the page.
        notes: sentences to be listed.

    Raises:
        ValueError: layouts of too many runs of live blocks, or of several sequences in a sheet; no such head.
    """
    made, size = [], 0
    for sheet in sheets:
        made.append(_contents(sheet))
        size += sum(len(head["changes"]) for head in made[-1]["heads"])
        if size > _MOST:
            raise ValueError(
                f"The layouts take more than {_MOST >> 20} MiB, too much for a browser. Draw one head, one layer, or a "
                "shorter sequence."
            )
    parts = {
        "{title}": html.escape(title),
        "/* css */": _part("page.css"),
        "/* js */": "\n".join(map(_part, _PROGRAM)),
        # No "<", so that nothing in it ends the element that it is in.
        "{data}": json.dumps({"sheets": made, "notes": list(notes)}, default=repr).replace("<", "\\u003c"),
    }
    return re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], _part("page.html"))


def _part(name: str) -> str:
    return files(__package__).joinpath("browser", name).read_text(encoding="utf-8")


def _contents(sheet: Sheet) -> dict[str, Any]:
    """The data of a layout that the page's program reads."""
    if sheet.rows.sequences > 1:
        raise ValueError(
            "A sheet is a layout that all sequences share, and this one has layouts of "
            f"{sheet.rows.sequences}; give each sequence a sheet of its own."
        )
    whole = sheet.rows.rows <= LARGEST
    heads: dict[str, dict[str, Any]] = {}
    for h in sheet.rows.asked(sheet.head):
        parts: list[Tensor] = []
        changes = Changes.of(_kept(sheet.rows, h, parts) if whole else sheet.rows.pieces(h))
        packed = _packed(changes.packed())
        if packed in heads:
            heads[packed]["numbers"].append(h)
            continue
        walked = _walks(torch.cat(parts), sheet) if whole else []
        heads[packed] = {"numbers": [h], "changes": packed, "live": changes.live, "walks": walked}
    for head in heads.values():
        head["name"] = head_name(head["numbers"], sheet.rows, sheet.head)
        if len(head["numbers"]) == sheet.rows.heads or sheet.head is not None:
            head["numbers"] = list(range(sheet.num_heads)) if sheet.head is None else [sheet.head]
    return {
        "file": sheet.file,
        "name": sheet.name,
        "blocks": sheet.rows.rows,
        "block": sheet.block,
        "causal": sheet.causal,
        "about": dict(sheet.about),
        "heads": list(heads.values()),
        "noTiles": "" if whole else f"Tiles are shown for up to {LARGEST:,} blocks a side: use a larger block.",
    }


def _kept(rows: LayoutRows, h: int, parts: list[Tensor]) -> Iterator[tuple[range, Tensor]]:
    """The pieces of a head, each of which is appended to `parts` as well: what is random is drawn once."""
    for piece, live in rows.pieces(h):
        parts.append(live)
        yield piece, live


def _walks(live: Tensor, sheet: Sheet) -> list[dict[str, Any]]:
    found = walks(live.tril() if sheet.causal else live, sheet.block)
    return [asdict(walk) | {"lines": _packed(walk.lines.astype("<i4").tobytes())} for walk in found]


def _packed(numbers: bytes) -> str:
    return base64.b64encode(zlib.compress(numbers, 9)).decode("ascii")
