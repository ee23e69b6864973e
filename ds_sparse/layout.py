"""What a layout is: which blocks of the attention matrix exist.

A layout is a bool tensor (H, R, C): H heads, or 1 when all heads are equal; R block rows (queries), C block columns
(keys). True means that the block of `block` x `block` scores is computed, False that it does not exist.
The block layout comes from OpenAI's blocksparse kernels and from DeepSpeed sparse attention, which kept it as an int64
tensor with one copy a head.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SHADES = " ░▒▓█"


def as_bool_layout(layout: Tensor) -> Tensor:
    """Checks a layout and returns it as bool (H, R, C).

    Args:
        layout: (H, R, C) or (R, C), bool or any integer type with values 0 and 1; (R, C) becomes (1, R, C).

    Raises:
        TypeError: not a tensor, or neither bool nor integer.
        ValueError: not 2-D or 3-D, an empty dimension, or a value other than 0 and 1.
    """
    layout = with_heads(layout)
    check_values(layout)
    return layout.bool()


def with_heads(layout: Tensor) -> Tensor:
    """`as_bool_layout` without a look at the values, which would wait for the device: (H, R, C) of the given dtype."""
    if not isinstance(layout, Tensor):
        raise TypeError(f"A layout is a torch tensor of 0s and 1s, got {type(layout).__name__}.")
    if layout.dtype is not torch.bool and layout.dtype not in _INTEGERS:
        raise TypeError(f"A layout is bool or integer, got {layout.dtype}; convert it with layout != 0.")
    if layout.dim() not in (2, 3):
        raise ValueError(
            "A layout has shape (block rows, block columns) or (heads, block rows, block columns), "
            f"got {tuple(layout.shape)}."
        )
    if 0 in layout.shape:
        raise ValueError(f"A layout needs at least one head, row and column, got {tuple(layout.shape)}.")
    return layout if layout.dim() == 3 else layout.unsqueeze(0)


def check_values(layout: Tensor) -> None:
    """Raises ValueError where an integer layout holds anything but 0 and 1."""
    if layout.dtype is torch.bool:
        return
    low, high = (int(bound) for bound in torch.aminmax(layout))
    if low < 0 or high > 1:
        raise ValueError(f"A layout holds only 0 and 1, got values from {low} to {high}; convert it with layout != 0.")


def share_equal_heads(layout: Tensor) -> Tensor:
    """(H, R, C) -> (1, R, C) when all heads are equal, else the layout itself."""
    if layout.shape[0] > 1 and bool((layout[1:] == layout[:1]).all()):
        return layout[:1]
    return layout


def distinct_heads(layout: Tensor) -> list[list[int]]:
    """Heads grouped by equal layout, in order of first appearance: `[[0, 2], [1, 3]]`."""
    groups: list[list[int]] = []
    for head in range(layout.shape[0]):
        for group in groups:
            if torch.equal(layout[group[0]], layout[head]):
                group.append(head)
                break
        else:
            groups.append([head])
    return groups


def density(layout: Tensor) -> float:
    """Share of live blocks, 0 to 1, over all heads of a (H, R, C) or (R, C) layout."""
    return torch.count_nonzero(layout).item() / layout.numel()


def causal_cut(layout: Tensor) -> Tensor:
    """Drops the blocks above the diagonal. Token-level causality inside the diagonal blocks is the softmax's part."""
    return torch.tril(layout)


def crop(layout: Tensor, rows: int, columns: int) -> Tensor:
    """The top-left `rows` x `columns` blocks of (H, R, C), as DeepSpeed cropped its layout for shorter sequences.

    Raises:
        ValueError: the layout is smaller than asked for.
    """
    have_rows, have_columns = layout.shape[-2:]
    if not (0 < rows <= have_rows and 0 < columns <= have_columns):
        raise ValueError(
            f"Cannot crop a layout of {have_rows} x {have_columns} blocks to {rows} x {columns}; "
            "build it for the longer length."
        )
    return layout[..., :rows, :columns]


def count_live(live: Tensor) -> Tensor:
    """True elements, or ones of uint8, along the last dimension: int64. `sum` alone would copy them to int64 first."""
    size = max(8, math.gcd(live.shape[-1], 128))
    return _grouped(live, size).sum(-1, dtype=torch.uint8).sum(-1)


def pack_bits(live: Tensor) -> Tensor:
    """(..., C) bool, or 0 and 1 in uint8 -> (..., ceil(C / 8)) uint8. Bit k of byte j is element 8 * j + k."""
    return (_grouped(live, 8) << _bit_numbers(live.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, length: int) -> Tensor:
    """The (..., length) bool of which `pack_bits` made these."""
    live = (bits.unsqueeze(-1) >> _bit_numbers(bits.device)).bitwise_and_(1)
    return live.view(torch.bool).flatten(-2)[..., :length]


def to_token_mask(layout: Tensor, block: int) -> Tensor:
    """(H, R, C) blocks -> (H, R * block, C * block) tokens, same dtype. Quadratic memory: for small lengths."""
    return layout.repeat_interleave(block, dim=-2).repeat_interleave(block, dim=-1)


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


def _grouped(live: Tensor, size: int) -> Tensor:
    """(..., C) bool or uint8 -> (..., ceil(C / size), size) uint8 of 0 and 1."""
    missing = -live.shape[-1] % size
    live = pad(live, (0, missing)) if missing else live
    return (live if live.dtype == torch.uint8 else live.view(torch.uint8)).unflatten(-1, (-1, size))


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


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
