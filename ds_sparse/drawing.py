"""Layouts as pictures: text for a terminal, .png and .svg files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .layout import as_bool_layout, density, distinct_heads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = " ░▒▓█"


def draw(layout: Tensor, block: int, columns: int = 64) -> str:
    """The layout as text for a terminal: one picture for each distinct head, its density, a legend.

    Up to `columns` block columns a character is one block wide and two blocks high (half-block characters); above,
    a character stands for a cell of several blocks and its shade for the share of them that is live.

    Args:
        layout: (H, R, C) or (R, C), bool or 0/1 integers.
        block: tokens in a block, for the legend.
        columns: widest picture, in characters.
    """
    layout = as_bool_layout(layout).cpu()
    heads, rows, cols = layout.shape
    lines = []
    for group in distinct_heads(layout):
        name = "all heads" if len(group) == heads else _name_heads(group)
        lines.append(f"{name}: {rows} x {cols} blocks of {block} tokens, density {density(layout[group[0]]):.1%}")
        lines += _half_blocks(layout[group[0]]) if cols <= columns else _shades(layout[group[0]], columns)
    if cols <= columns:
        lines.append("█ live block, blank: no block; rows are queries, columns keys")
    else:
        cell = -(-cols // columns)
        lines.append(
            f"one character = {2 * cell} x {cell} blocks; ░ ▒ ▓ █ share of live blocks up to 25, 50, 75, 100 %, "
            "blank: none; rows are queries, columns keys"
        )
    return "\n".join(lines)


def save_drawing(layout: Tensor, block: int, path: str | os.PathLike[str], title: str = "") -> None:
    """Writes the layout as a picture, one panel for each distinct head, axes in tokens.

    The ending of `path` picks the format: .png or .svg. Needs matplotlib. Live blocks are dark; layouts of more than
    512 blocks are averaged down and the grey is the share of live blocks.

    Raises:
        ValueError: another ending.
        ImportError: matplotlib is not installed.
    """
    if os.path.splitext(path)[1].lower() not in (".png", ".svg"):
        raise ValueError(f"A layout is drawn as .png or .svg, got {os.fspath(path)!r}.")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Drawing a layout to a file needs matplotlib: pip install matplotlib.") from error

    figure = _figure(as_bool_layout(layout).cpu(), block, title)
    with matplotlib.rc_context({"svg.hashsalt": "ds_sparse"}):
        # A fixed salt and no date: the same layout gives the same file.
        figure.savefig(path, dpi=150, metadata={"Date": None} if os.fspath(path).lower().endswith(".svg") else None)


def _figure(layout: Tensor, block: int, title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = distinct_heads(layout)
    across = min(len(groups), 4)
    down = -(-len(groups) // across)
    figure = Figure(figsize=(3.6 * across, 3.8 * down + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    rows, cols = layout.shape[1:]
    for place, group in enumerate(groups):
        axes = figure.add_subplot(down, across, place + 1)
        cell = max(1, -(-max(rows, cols) // 512))
        axes.imshow(
            _live_share(layout[group[0]], cell, cell).numpy(),
            cmap="Greys",
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(0, cols * block, rows * block, 0),
        )
        name = "all heads" if len(group) == layout.shape[0] else _name_heads(group)
        axes.set_title(f"{name}, density {density(layout[group[0]]):.1%}", fontsize=9)
        axes.set_xlabel("key token", fontsize=8)
        axes.set_ylabel("query token", fontsize=8)
        axes.tick_params(labelsize=7)
    figure.suptitle(f"{title + ': ' if title else ''}dark = live block of {block} x {block} tokens", fontsize=10)
    return figure


def _name_heads(group: list[int]) -> str:
    return f"head {group[0]}" if len(group) == 1 else "heads " + ", ".join(str(head) for head in group)


def _half_blocks(picture: Tensor) -> list[str]:
    if picture.shape[0] % 2:
        picture = torch.cat([picture, picture.new_zeros(1, picture.shape[1])])
    upper, lower = picture[0::2].int(), picture[1::2].int()
    return ["".join(" ▀▄█"[code] for code in row).rstrip() for row in (upper + 2 * lower).tolist()]


def _shades(picture: Tensor, columns: int) -> list[str]:
    cell = -(-picture.shape[1] // columns)
    # ceil: a single live block in a cell still shows.
    level = (_live_share(picture, 2 * cell, cell) * (len(_SHADES) - 1)).ceil().int()
    return ["".join(_SHADES[code] for code in row).rstrip() for row in level.tolist()]


def _live_share(picture: Tensor, cell_rows: int, cell_columns: int) -> Tensor:
    """(R, C) bool -> float, share of live blocks in each cell; cells at the edge count only the blocks they hold."""
    return torch.nn.functional.avg_pool2d(
        picture.float()[None], (cell_rows, cell_columns), ceil_mode=True, count_include_pad=False
    )[0]
