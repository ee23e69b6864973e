"""Layouts as pictures: text for a terminal, .png and .svg files."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

import torch
from torch import Tensor

from ..layout import LayoutRows
from ..picture import CELLS, Drawable, DrawableOfAnyLength, Panel, cell_of, head_name, html_of, panels_of
from ..tools.arguments import UsageError
from ..tools.extras import optional_imports
from ..tools.files import require_writable
from ..tools.wording import listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg")
"""Endings of the files that `save_drawing` writes."""


@dataclass(frozen=True)
class Characters:
    """Characters of a picture in a terminal: `shades` from none to all blocks of a cell; `halves` for two blocks,
    one over the other: neither, the upper, the lower, both."""

    shades: str
    halves: str
    halves_legend: str


UNICODE = Characters(" ░▒▓█", " ▀▄█", "█ live block, blank: no block")
ASCII = Characters(" .:+#", " '.#", "' upper block live, . lower block live, # both, blank: none")


class Picture(str):
    """A layout as text, which a terminal shows, and as HTML, which a notebook shows."""

    _repr_html_: Callable[[], str]

    def __repr__(self) -> str:
        return str(self)


def draw(
    what: Drawable | Tensor | LayoutRows,
    block: int | None = None,
    columns: int = 64,
    head: int | None = None,
    ascii: bool | None = None,
    stretch: bool = False,
    tokens: int | None = None,
) -> Picture:
    """A structure, an index or a layout as a picture: text for a terminal, and an image in a notebook.

    One picture of all heads that are equal, small ones beside each other of those that differ, their density, a legend.
    Up to `columns` block columns a character is one block wide and two blocks high; above, a character stands for a
    cell of several blocks and its shade for the share of them that is live.

    Args:
        what: a structure; an index; a layout, (R, C), (H, R, C) or (B, H or 1, R, C), bool or 0/1 integers, or what
            `SparsityConfig.make_rows` returns.
        block: tokens in a block of a layout, for the legend; 1, the default, of a layout of single tokens. Structures
            and indices have their own.
        columns: width of all pictures in characters; the legend may be wider.
        head: draw this head alone, of each sequence; of a layout that all heads share, this.
        ascii: ASCII characters only. None: if standard output takes no others.
        stretch: a picture of all heads makes blocks as large as `columns` have room for.
        tokens: of a structure's layout, rounded up to whole blocks; 2048 by default.

    Returns:
        The text, a str, with `_repr_html_`.

    Raises:
        ValueError: a structure without a layout of that length, or that chooses its blocks in each call; no such head;
            `block` beside a structure or an index, `tokens` beside an index or a layout.
        TypeError: none of these.

    Examples:
        >>> import ds_sparse
        >>> structure = ds_sparse.LocalSlidingWindowSparsityConfig(num_heads=4, block=16, causal=True)
        >>> ds_sparse.draw(structure, tokens=128, ascii=True)
        all heads: 8 x 8 blocks of 16 tokens, density 23.4%
        #.
         '#.
           '#.
             '#.
        ' upper block live, . lower block live, # both, blank: none; rows are queries, columns keys
    """
    rows, block = _rows_of(what, block, tokens)
    characters = ASCII if (takes_ascii_only(sys.stdout) if ascii is None else ascii) else UNICODE
    full = cell_of(rows, columns)
    panels = panels_of(rows, (2 * full, full) if full > 1 else (1, 1), head)
    unit = "block" if block > 1 else "pair"
    size = f"{rows.rows} x {rows.columns} {f'blocks of {block} ' if block > 1 else ''}tokens"
    if len(panels) == 1:
        cell, lines = full, [f"{head_name(panels[0].heads, rows, head)}: {size}, density {panels[0].density:.1%}"]
        lines += _text(panels[0], full, characters, max(1, columns // rows.columns) if stretch else 1)
    else:
        across = min(len(panels), max(1, (columns + 2) // 16))
        width = (columns + 2) // across - 2
        cell = cell_of(rows, width)
        if cell != full:
            panels = panels_of(rows, (2 * cell, cell), head)
        names = [head_name(panel.heads, rows, head) for panel in panels]
        lines = [size, *_beside_each_other(panels, names, cell, across, width, characters)]
    if cell == 1:
        legend = characters.halves_legend.replace("block", unit)
    else:
        legend = (
            f"one character = {2 * cell} x {cell} {unit}s; {' '.join(characters.shades[1:])} share of live {unit}s up "
            "to 25, 50, 75, 100 %, blank: none"
        )
    picture = Picture("\n".join([*lines, f"{legend}; rows are queries, columns keys"]))
    picture._repr_html_ = partial(html_of, rows, block, head=head)
    return picture


def _rows_of(what: Drawable | Tensor | LayoutRows, block: int | None, tokens: int | None) -> tuple[LayoutRows, int]:
    """The layout to draw, and the tokens in a block."""
    is_structure = isinstance(what, DrawableOfAnyLength)
    kind = "a structure" if is_structure else "an index" if isinstance(what, Drawable) else "a layout"
    if tokens is not None and not is_structure:
        raise ValueError(f"tokens is {tokens} beside {kind}, which has its length; leave tokens out.")
    if block is not None and kind != "a layout":
        instead = f"for {block} tokens give tokens={block}" if is_structure else "leave block out"
        raise ValueError(f"block is {block} beside {kind}, which has its own; {instead}.")
    if isinstance(what, DrawableOfAnyLength):
        return what.rows_to_draw(tokens)
    if isinstance(what, Drawable):
        return what.rows_to_draw()
    return what if isinstance(what, LayoutRows) else LayoutRows.of(what), block or 1


def save_drawing(
    layout: Tensor | LayoutRows,
    block: int,
    path: str | os.PathLike[str],
    title: str = "",
    head: int | None = None,
) -> None:
    """Writes the layout as a picture, one panel for each distinct head, axes in tokens.

    The ending of `path` picks the format: .png or .svg. Needs matplotlib. Live blocks are dark; layouts of more than
    512 blocks are averaged down and the grey is the share of live blocks. layout, block and head are those of `draw`.

    Raises:
        ValueError: another ending, or a path that no file can be written to; no such head.
        ImportError: matplotlib is not installed.
    """
    require_drawable(path, PICTURES)
    with optional_imports():
        import matplotlib

    figure = _figure(layout if isinstance(layout, LayoutRows) else LayoutRows.of(layout), block, title, head)
    svg = os.fspath(path).lower().endswith(".svg")
    with writing(path), matplotlib.rc_context({"svg.hashsalt": "ds_sparse"}):
        # A fixed salt and no date: the same layout gives the same file. Tight: as large as what is in it.
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Date": None} if svg else None)


def require_drawable(path: str | os.PathLike[str], endings: Sequence[str], force: bool = True) -> None:
    """Raises ValueError where the path has none of these endings, or, as `require_writable`, where no file can be
    written to it."""
    name = os.fspath(path)
    if os.path.splitext(name)[1].lower() not in endings:
        raise UsageError(f"A layout is drawn as {listed(endings, 'or')}, got {name!r}.")
    require_writable(path, force)


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises ValueError, with the name of the file, where what it is around cannot write."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{os.fspath(path)} cannot be written: {error.strerror or error}.") from error


def takes_ascii_only(stream: TextIO) -> bool:
    """True where a stream's encoding, or a terminal in the locale "C", has no characters but those of ASCII."""
    try:
        (UNICODE.shades + UNICODE.halves).encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1":
        return False
    # In the locale "C" Python writes UTF-8 all the same, and sets LC_CTYPE to C.UTF-8 for its children.
    ctype = os.environ.get("LC_CTYPE")
    named = os.environ.get("LC_ALL") or (ctype if ctype not in ("C.UTF-8", "C.utf8", "UTF-8") else None)
    return (named or os.environ.get("LANG")) in ("C", "POSIX")


def _text(panel: Panel, cell: int, characters: Characters, times: int = 1) -> list[str]:
    """The lines of a picture, whose single blocks are so many characters wide, and as high."""
    if cell == 1:
        live = panel.shares.int().repeat_interleave(times, 0).repeat_interleave(times, 1)
        live = torch.nn.functional.pad(live, (0, 0, 0, len(live) % 2))
        codes, of = live[0::2] + 2 * live[1::2], characters.halves
    else:
        # ceil: a single live block in a cell still shows.
        codes, of = (panel.shares * (len(characters.shades) - 1)).ceil().int(), characters.shades
    return ["".join(of[code] for code in row).rstrip() for row in codes.tolist()]


def _beside_each_other(
    panels: list[Panel], names: list[str], cell: int, across: int, width: int, characters: Characters
) -> Iterator[str]:
    for first in range(0, len(panels), across):
        in_line = panels[first : first + across]
        captions = [
            [*textwrap.wrap(name, max(width, 8)), f"density {panel.density:.1%}"]
            for name, panel in zip(names[first : first + across], in_line, strict=True)
        ]
        pictures = [_text(panel, cell, characters) for panel in in_line]
        for lines in (captions, pictures):
            for parts in zip_longest(*lines, fillvalue=""):
                yield "  ".join(f"{part:{width}}" for part in parts).rstrip()


def _figure(rows: LayoutRows, block: int, title: str, head: int | None) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cell = max(cell_of(rows, CELLS), -(-rows.rows // CELLS))
    panels = panels_of(rows, (cell, cell), head)
    across = min(len(panels), 6)
    down = -(-len(panels) // across)
    side = 4.2 if across == 1 else 3.2 if across < 4 else 2.2
    # Compressed: panels are squares, and leave their space between them to the titles.
    figure = Figure(figsize=(side * across, (side + 0.3) * down + 0.4), layout="compressed")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(down, across, place + 1)
        axes.imshow(
            panel.shares.numpy(),
            cmap="Greys",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(0, rows.columns * block, rows.rows * block, 0),
        )
        between = ", " if across == 1 else "\n"
        name = "\n".join(textwrap.wrap(head_name(panel.heads, rows, head), int(12 * side)))
        axes.set_title(f"{name}{between}density {panel.density:.1%}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.locator_params(nbins=8 if across == 1 else 2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda tokens, place: f"{tokens:,.0f}")
        if place // across == down - 1 or place + across >= len(panels):
            axes.set_xlabel("key token", fontsize=8)
        if place % across == 0:
            axes.set_ylabel("query token", fontsize=8)
    dark = f"live block of {block} x {block} tokens" if block > 1 else "live pair of tokens"
    lines = [*textwrap.wrap(title, int(12 * side * across)), f"dark = {dark}"]
    figure.suptitle("\n".join(lines), fontsize=10)
    return figure
