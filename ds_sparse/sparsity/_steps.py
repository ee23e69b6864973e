"""The steps of which structures make their layouts, and the rules of how much of them a row of blocks holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .declarations import require

if TYPE_CHECKING:
    from torch import Tensor

RowStep = Callable[["Tensor", range], object]
"""A step of a layout that sets the live blocks of some block rows of a head, in place, in a tensor (rows, blocks) of
any dtype."""

REACHES_AHEAD = (
    "as in DeepSpeed, so a unidirectional layout gets blocks of later tokens. Set strict_causal to true to drop them."
)


def row_step(make: Callable[[Any, int, int], RowStep]) -> Callable[[Any, int, Tensor], Tensor]:
    """Decorator: from a method (h, blocks) that makes the step of a head to DeepSpeed's (h, layout), which takes it in
    all rows of a layout, in place. `of_rows` is the method as it was."""

    def set_layout(self, h: int, layout: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # as help() shows it
        make(self, h, layout.shape[1])(layout[h], range(layout.shape[1]))
        return layout

    named: Any = set_layout
    named.__name__, named.__qualname__, named.__doc__ = make.__name__, make.__qualname__, make.__doc__
    named.of_rows = make
    return named


def within(rows: range, start: int, stop: int) -> slice:
    """The rows from `start` to `stop`, of those in `rows`, as places in a tensor that holds only these."""
    return slice(max(0, start - rows.start), max(0, stop - rows.start))


def windows(sizes: list[int], blocks: int, unidirectional: bool) -> RowStep:
    """Consecutive square windows of `sizes` blocks, of which the last repeats, up to `blocks`; lower-triangular if
    unidirectional."""
    import torch

    sizes = [min(size, blocks) for size in sizes[:blocks]]
    sizes += [sizes[-1]] * (max(0, blocks - sum(sizes)) // sizes[-1] + 1)
    window = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes))[:blocks]

    def step(live: Tensor, rows: range) -> None:
        mine = window[rows.start : rows.stop]
        first = int(torch.searchsorted(window, mine[:1]))
        end = int(torch.searchsorted(window, mine[-1:], right=True))
        mask = mine[:, None] == window[first:end]
        live[:, first:end].logical_or_(mask.tril_(rows.start - first) if unidirectional else mask)

    return step


def sliding_window(blocks: int, width: int, unidirectional: bool) -> RowStep:
    """Blocks at most `width // 2` from the diagonal; only the lower half if unidirectional.

    As in DeepSpeed, an even width gives `width + 1` blocks.

    Raises:
        ValueError: a row has fewer blocks than the window.
    """
    import torch

    require(window_fits(width, blocks))
    back = width // 2
    ahead = 0 if unidirectional else back

    def step(live: Tensor, rows: range) -> None:
        first, end = max(0, rows.start - back), min(blocks, rows.stop + ahead)
        band = torch.ones(len(rows), end - first, dtype=torch.bool)
        diagonal = rows.start - first
        live[:, first:end].logical_or_(band.tril_(diagonal + ahead).triu_(diagonal - back))

    return step


def global_ranges(starts: list[int], ends: list[int] | None, blocks: int) -> list[tuple[int, int]]:
    """The global blocks as [start, end) ranges inside a row of `blocks`; those that start beyond it are left out.

    Raises:
        ValueError: a negative index (counted from the end) reaches before the first block.
    """
    require(indices_reach_the_row(starts, ends, blocks))
    if ends is None:
        return [(start % blocks, start % blocks + 1) for start in starts if start < blocks]
    pairs = [(start, end) for start, end in zip(starts, ends, strict=True) if start < blocks]
    return [slice(start, end).indices(blocks)[:2] for start, end in pairs]


def global_rows_and_columns(ranges: list[tuple[int, int]], unidirectional: bool) -> RowStep:
    """Blocks that attend to all and are attended by all, as [start, end) ranges; if unidirectional, all blocks above
    the diagonal are dropped."""

    def step(live: Tensor, rows: range) -> None:
        for start, end in ranges:
            live[within(rows, start, end)] = 1
            live[:, start:end] = 1
        if unidirectional:
            live.tril_(rows.start)

    return step


def indices_beyond(starts: list[int], blocks: int) -> Iterator[tuple[str, str]]:
    """The caution about global blocks that `global_ranges` leaves out."""
    beyond = ", ".join(str(start) for start in starts if start >= blocks)
    if beyond:
        yield (
            "global_block_indices",
            f"no block {beyond} in this sequence, whose last is {blocks - 1}: ignored, as in DeepSpeed.",
        )


def random_blocks_fit(num_random_blocks: int, blocks: int) -> str | None:
    return _fit("random blocks", num_random_blocks, blocks)


def window_fits(num_sliding_window_blocks: int, blocks: int) -> str | None:
    return _fit("sliding window blocks", num_sliding_window_blocks, blocks)


def global_blocks_fit(num_global_blocks: int, blocks: int) -> str | None:
    return _fit("global blocks", num_global_blocks, blocks)


def _fit(what: str, wanted: int, blocks: int) -> str | None:
    if blocks < wanted:
        return f"Number of {what}, {wanted}, must be smaller than overall number of blocks in a row, {blocks}!"
    return None


def indices_reach_the_row(
    global_block_indices: list[int], global_block_end_indices: list[int] | None, blocks: int
) -> str | None:
    for start in global_block_indices if global_block_end_indices is None else ():
        if start < -blocks:
            return f"Global block index {start} counts from the end, but a row has only {blocks} blocks!"
    return None


def horizontal_needs_bidirectional(horizontal_global_attention: bool, attention: str) -> str | None:
    if attention != "bidirectional" and horizontal_global_attention:
        return 'only "bi-directional" attentions can support horizontal global attention!'
    return None


def ranges_pair_up(global_block_end_indices: list[int] | None, global_block_indices: list[int]) -> str | None:
    if global_block_end_indices is not None and len(global_block_end_indices) != len(global_block_indices):
        return (
            f"Global block start indices length, {len(global_block_indices)}, must be same as global block end indices "
            f"length, {len(global_block_end_indices)}!"
        )
    return None


def ranges_run_forward(global_block_end_indices: list[int] | None, global_block_indices: list[int]) -> str | None:
    for start, end in zip(global_block_indices, global_block_end_indices or (), strict=False):
        if start >= end:
            return f"Global block start index, {start}, must be smaller than global block end index, {end}!"
    return None
