"""Layouts as pictures: text for a terminal, .png and .svg files."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

import numpy as np
import torch
from torch import Tensor

from ..layout import ROWS_AT_ONCE, LayoutRows, RowMaker
from ..tools.extras import optional_imports
from ..tools.torch_settings import cpu_threads
from ..tools.wording import in_ranges, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg")
"""Endings of the files that `save_drawing` writes."""

CELLS = 512
"""Most cells along a side of a picture in a file."""


@dataclass(frozen=True)
class Characters:
    """Characters of a picture in a terminal: `shades` from none to all blocks of a cell; `halves` for two blocks,
    one over the other: neither, the upper, the lower, both."""

    shades: str
    halves: str
    halves_legend: str


UNICODE = Characters(" ░▒▓█", " ▀▄█", "█ live block, blank: no block")
ASCII = Characters(" .:+#", " '.#", "' upper block live, . lower block live, # both, blank: none")


@dataclass(frozen=True)
class Panel:
    """Heads with one layout: the share of live blocks in each cell (float, cell rows x cell columns), and in all."""

    heads: list[int]
    shares: Tensor
    density: float


def draw(
    layout: Tensor | LayoutRows, block: int, columns: int = 64, head: int | None = None, ascii: bool | None = None
) -> str:
    """The layout as text for a terminal: one picture of all heads that are equal, small ones beside each other of those
    that differ, their density, a legend.

    Up to `columns` block columns a character is one block wide and two blocks high; above, a character stands for a
    cell of several blocks and its shade for the share of them that is live.

    Args:
        layout: (H, R, C) or (R, C), bool or 0/1 integers, or `SparsityConfig.make_rows`.
        block: tokens in a block, for the legend; 1 of a layout of single tokens.
        columns: width of all in characters.
        head: draw this head alone; of a layout that all heads share, this.
        ascii: ASCII characters only. None: if standard output takes no others.
    """
    rows = layout if isinstance(layout, LayoutRows) else LayoutRows.of(layout)
    characters = ASCII if (takes_ascii_only(sys.stdout) if ascii is None else ascii) else UNICODE
    full = _cell(rows, columns)
    panels = _panels(rows, (2 * full, full) if full > 1 else (1, 1), head)
    unit = "block" if block > 1 else "pair"
    size = f"{rows.rows} x {rows.columns} {f'blocks of {block} ' if block > 1 else ''}tokens"
    if len(panels) == 1:
        cell, lines = full, [f"{head_name(panels[0].heads, rows.heads, head)}: {size}, density {panels[0].density:.1%}"]
        lines += _text(panels[0], full, characters)
    else:
        across = min(len(panels), max(1, (columns + 2) // 16))
        width = (columns + 2) // across - 2
        cell = _cell(rows, width)
        if cell != full:
            panels = _panels(rows, (2 * cell, cell))
        lines = [size, *_beside_each_other(panels, rows, cell, across, width, characters)]
    if cell == 1:
        legend = characters.halves_legend.replace("block", unit)
    else:
        legend = (
            f"one character = {2 * cell} x {cell} {unit}s; {' '.join(characters.shades[1:])} share of live {unit}s up "
            "to 25, 50, 75, 100 %, blank: none"
        )
    return "\n".join([*lines, f"{legend}; rows are queries, columns keys"])


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
        ValueError: another ending, or a path that no file can be written to.
        ImportError: matplotlib is not installed.
    """
    require_writable(path, PICTURES)
    with optional_imports():
        import matplotlib

    figure = _figure(layout if isinstance(layout, LayoutRows) else LayoutRows.of(layout), block, title, head)
    svg = os.fspath(path).lower().endswith(".svg")
    with writing(path), matplotlib.rc_context({"svg.hashsalt": "ds_sparse"}):
        # A fixed salt and no date: the same layout gives the same file. Tight: as large as what is in it.
        figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Date": None} if svg else None)


def require_writable(path: str | os.PathLike[str], endings: Sequence[str]) -> None:
    """Raises ValueError where the path has none of these endings, or no file can be written to it."""
    name = os.fspath(path)
    folder = os.path.dirname(name) or "."
    if os.path.splitext(name)[1].lower() not in endings:
        raise ValueError(f"A layout is drawn as {listed(endings, 'or')}, got {name!r}.")
    if not os.path.isdir(folder):
        raise ValueError(f"{name} cannot be written: there is no folder {folder}. Make it first.")
    if os.path.isdir(name):
        raise ValueError(f"{name} cannot be written: it is a folder.")
    if not os.access(name if os.path.exists(name) else folder, os.W_OK):
        raise ValueError(f"{name} cannot be written: permission denied.")


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


def _cell(rows: LayoutRows, width: int) -> int:
    """Block columns in a character of a picture of this width. Of a pattern that repeats itself they are whole periods,
    or a part of one that divides it: else columns of equal characters would have unequal shares of it, and their shades
    would make stripes that the layout has not."""
    least = -(-rows.columns // max(1, width))
    period = _period(rows, 4 * least) if least > 1 else 1
    return next((cell for cell in range(least, 2 * least) if 0 in (cell % period, period % cell)), least)


def _period(rows: LayoutRows, most: int) -> int:
    """Block columns after which what the last rows see far before them repeats itself, `most` at most; 1 if it does
    not."""
    last = rows.maker(0)(range(max(0, rows.rows - ROWS_AT_ONCE), rows.rows))
    _, kinds = last[:, rows.columns // 8 : rows.columns // 2].unique(dim=1, return_inverse=True)
    periods = range(1, min(most, len(kinds) // 2) + 1)
    return next((period for period in periods if torch.equal(kinds[period:], kinds[:-period])), 1)


def _panels(rows: LayoutRows, cell: tuple[int, int], head: int | None = None) -> list[Panel]:
    """One for each distinct head, or of one head, in cells of so many rows and columns; those at the edge count only
    the blocks they hold. Of each head no more than ROWS_AT_ONCE rows exist at a time."""
    heads = range(rows.heads) if head is None else [head if rows.heads > 1 else 0]
    makers = {h: rows.maker(h) for h in heads}
    cells = [-(-size // along) for size, along in zip((rows.rows, rows.columns), cell, strict=True)]
    groups = [(list(heads), torch.zeros(cells, dtype=torch.int64))]
    with cpu_threads(1):  # a piece of rows is so small that threads wait for each other longer than they work
        for start in range(0, rows.rows, ROWS_AT_ONCE):
            piece = range(start, min(start + ROWS_AT_ONCE, rows.rows))
            groups = [part for members, counts in groups for part in _split(members, counts, makers, piece, cell)]
    heights, widths = (
        torch.tensor([min(along, size - place) for place in range(0, size, along)])
        for size, along in zip((rows.rows, rows.columns), cell, strict=True)
    )
    return [
        Panel(members, counts / (heights[:, None] * widths), counts.sum().item() / (rows.rows * rows.columns))
        for members, counts in sorted(groups, key=lambda group: group[0])
    ]


def _split(
    members: list[int], counts: Tensor, makers: dict[int, RowMaker], piece: range, cell: tuple[int, int]
) -> Iterator[tuple[list[int], Tensor]]:
    """The heads of a group that are equal in a piece of rows too, and their counts of live blocks up to here."""
    parts: list[tuple[Tensor, list[int]]] = []
    for h in members:
        live = makers[h](piece)
        for other, equal in parts:
            if np.array_equal(live.numpy(), other.numpy()):  # five times as fast as torch.equal of bools
                equal.append(h)
                break
        else:
            parts.append((live, [h]))
    for live, equal in parts:
        yield equal, _counted(counts.clone(), live.view(torch.uint8), piece, cell)


def _counted(counts: Tensor, live: Tensor, piece: range, cell: tuple[int, int]) -> Tensor:
    height, width = cell
    place = piece.start
    while place < piece.stop:
        end = min(place - place % height + height, piece.stop)
        of_columns = live[place - piece.start : end - piece.start].sum(0, dtype=torch.uint8)
        padded = torch.nn.functional.pad(of_columns, (0, -len(of_columns) % width))
        counts[place // height] += padded.unflatten(0, (-1, width)).sum(1)
        place = end
    return counts


def head_name(heads: Sequence[int], of: int, asked: int | None) -> str:
    """The heads of one picture, of a layout of so many; or the one that was asked for."""
    if asked is not None:
        return f"head {asked}"
    if len(heads) == of:
        return "all heads"
    return f"head{'s' * (len(heads) > 1)} {in_ranges(heads)}"


def _text(panel: Panel, cell: int, characters: Characters) -> list[str]:
    if cell == 1:
        live = torch.nn.functional.pad(panel.shares.int(), (0, 0, 0, panel.shares.shape[0] % 2))
        codes, of = live[0::2] + 2 * live[1::2], characters.halves
    else:
        # ceil: a single live block in a cell still shows.
        codes, of = (panel.shares * (len(characters.shades) - 1)).ceil().int(), characters.shades
    return ["".join(of[code] for code in row).rstrip() for row in codes.tolist()]


def _beside_each_other(
    panels: list[Panel], rows: LayoutRows, cell: int, across: int, width: int, characters: Characters
) -> Iterator[str]:
    for first in range(0, len(panels), across):
        in_line = panels[first : first + across]
        names = [textwrap.wrap(head_name(panel.heads, rows.heads, None), max(width, 8)) for panel in in_line]
        captions = [[*name, f"density {panel.density:.1%}"] for name, panel in zip(names, in_line, strict=True)]
        pictures = [_text(panel, cell, characters) for panel in in_line]
        for lines in (captions, pictures):
            for parts in zip_longest(*lines, fillvalue=""):
                yield "  ".join(f"{part:{width}}" for part in parts).rstrip()


def _figure(rows: LayoutRows, block: int, title: str, head: int | None) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cell = max(_cell(rows, CELLS), -(-rows.rows // CELLS))
    panels = _panels(rows, (cell, cell), head)
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
        name = "\n".join(textwrap.wrap(head_name(panel.heads, rows.heads, head), int(12 * side)))
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
