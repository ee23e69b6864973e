"""Layouts in cells: the share of live blocks in each, of heads that are equal together; and as an image in HTML, which
notebooks show."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .layout import ROWS_AT_ONCE, LayoutRows, RowMaker
from .tools.random_numbers import random_numbers_kept
from .tools.torch_settings import cpu_threads
from .tools.wording import in_ranges

CELLS = 512
"""Most cells along a side of a picture in a file."""

MOST_CELLS = 2**28
"""Blocks or pairs that a notebook counts unasked: a second."""

MOST_IMAGES = 12
"""Images of heads that differ in a notebook; the others are counted."""


@runtime_checkable
class Drawable(Protocol):
    """What `ds_sparse.draw` takes beside layouts: structures and indices."""

    def rows_to_draw(self) -> tuple[LayoutRows, int]:
        """The layout, and the tokens in a block.

        Raises:
            ValueError: there is none.
        """
        ...


@runtime_checkable
class DrawableOfAnyLength(Protocol):
    """A structure, which makes the layout of so many tokens."""

    def make_rows(self, seq_len: int) -> LayoutRows: ...

    def rows_to_draw(self, tokens: int | None = None) -> tuple[LayoutRows, int]:
        """As of `Drawable`."""
        ...


def in_notebook(to_draw: Callable[[], tuple[LayoutRows | Tensor, int]], title: str) -> str | None:
    """Text and a picture below it; None, for which a notebook takes the text alone, where there is no layout, or one of
    more than `MOST_CELLS`: whoever wants that picture calls `ds_sparse.draw`.

    Args:
        to_draw: gives the layout, and the tokens in a block, or raises.
    """
    try:
        layout, block = to_draw()
        rows = layout if isinstance(layout, LayoutRows) else LayoutRows.of(layout)
        return None if rows.heads * rows.rows * rows.columns > MOST_CELLS else html_of(rows, block, title)
    except (ValueError, RuntimeError, MemoryError):
        return None


@dataclass(frozen=True)
class Panel:
    """Heads with one layout: the share of live blocks in each cell (float, cell rows x cell columns), and in all."""

    heads: list[int]
    shares: Tensor
    density: float


def html_of(layout: LayoutRows | Tensor, block: int, title: str = "", head: int | None = None) -> str:
    """The layout as HTML: an image for each distinct head, dark where blocks are live, and a caption.

    Args:
        title: text in front of it.
        head: the one head to show; None: all.
    """
    rows = layout if isinstance(layout, LayoutRows) else LayoutRows.of(layout)
    cell = max(cell_of(rows, CELLS), -(-rows.rows // CELLS))
    panels = panels_of(rows, (cell, cell), head)
    unit = f"blocks of {block} tokens" if block > 1 else "tokens"
    figures = "".join(
        f'<figure style="display:inline-block;margin:4px"><img style="width:{240 if len(panels) > 1 else 360}px;'
        f'image-rendering:pixelated;border:1px solid #888" src="data:image/png;base64,{_png(panel.shares)}">'
        f"<figcaption>{head_name(panel.heads, rows, head)}, density {panel.density:.1%}</figcaption></figure>"
        for panel in panels[:MOST_IMAGES]
    )
    more = f"<p>and {len(panels) - MOST_IMAGES} other layouts</p>" if len(panels) > MOST_IMAGES else ""
    first = f"<pre>{html.escape(title)}</pre>" if title else ""
    return (
        f"<div>{first}{figures}{more}<p>{rows.rows} x {rows.columns} {unit}; rows are queries, columns keys</p></div>"
    )


def _png(shares: Tensor) -> str:
    """Shares as a grey image, black where all is live, in base64; what is live at all is not white."""
    dark = (shares * 255).ceil().to(torch.uint8).numpy()
    lines = np.pad(255 - dark, ((0, 0), (1, 0))).tobytes()  # before each line its filter, which is none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", dark.shape[1], dark.shape[0], 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines, 9)), chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode("ascii")


@random_numbers_kept()
def cell_of(rows: LayoutRows, width: int) -> int:
    """Block columns in a character of a picture of this width. Of a pattern that repeats itself they are whole periods,
    or a part of one that divides it: else columns of equal characters would have unequal shares of it, and their shades
    would make stripes that the layout has not."""
    least = -(-rows.columns // max(1, width))
    period = _period(rows, 4 * least) if least > 1 else 1
    return next((cell for cell in range(least, 4 * least + 1) if 0 in (cell % period, period % cell)), least)


def _period(rows: LayoutRows, most: int) -> int:
    """Block columns after which what the last rows see far before them repeats itself, `most` at most; 1 if it does
    not."""
    number = min(ROWS_AT_ONCE, max(1, rows.rows // 4))
    last = rows.maker(0)(range(rows.rows - number, rows.rows))
    _, kinds = last[:, rows.columns // 8 : rows.columns // 2].unique(dim=1, return_inverse=True)
    periods = range(1, min(most, len(kinds) // 2) + 1)
    return next((period for period in periods if torch.equal(kinds[period:], kinds[:-period])), 1)


@random_numbers_kept()
def panels_of(rows: LayoutRows, cell: tuple[int, int], head: int | None = None) -> list[Panel]:
    """One for each distinct head of those asked for, in cells of so many rows and columns; those at the edge count only
    the blocks they hold. Of each head no more than ROWS_AT_ONCE rows exist at a time."""
    heads = rows.asked(head)
    makers = {h: rows.maker(h) for h in heads}
    cells = [-(-size // along) for size, along in zip((rows.rows, rows.columns), cell, strict=True)]
    groups = [(heads, torch.zeros(cells, dtype=torch.int64))]
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


def head_name(heads: Sequence[int], rows: LayoutRows, asked: int | None) -> str:
    """The heads of one picture; or the one that was asked for."""
    if len(heads) == len(rows.asked(asked)):
        return "all heads" if asked is None else f"head {asked}"
    if rows.sequences == 1:
        return _numbered("head", heads)
    sequences: dict[str, list[int]] = {}
    for sequence, members in groupby(heads, lambda head: head // rows.heads_of_sequence):
        numbers = [head % rows.heads_of_sequence for head in members] if asked is None else [asked]
        shared = asked is None and rows.heads_of_sequence == 1
        sequences.setdefault("" if shared else f", {_numbered('head', numbers)}", []).append(sequence)
    return "; ".join(_numbered("sequence", numbers) + name for name, numbers in sequences.items())


def _numbered(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {in_ranges(numbers)}"
