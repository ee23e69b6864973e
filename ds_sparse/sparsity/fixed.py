from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from ..tools.block_sizes import rounded_up
from ._base import SparsityConfig
from ._registry import register_sparsity
from ._steps import REACHES_AHEAD, RowStep, horizontal_needs_bidirectional, row_step, windows, within
from .declarations import Attention, HorizontalGlobalAttention, declared

if TYPE_CHECKING:
    from torch import Tensor


def windows_split_evenly(num_local_blocks: int, num_global_blocks: int) -> str | None:
    if num_local_blocks % num_global_blocks:
        return (
            f"num_local_blocks, {num_local_blocks}, is not a multiple of num_global_blocks, {num_global_blocks}; use "
            f"{rounded_up(num_local_blocks, num_global_blocks)}."
        )
    return None


def patterns_need_heads(num_different_global_patterns: int, different_layout_per_head: bool) -> str | None:
    if num_different_global_patterns > 1 and not different_layout_per_head:
        return (
            "Number of different layouts cannot be more than one when you have set a single layout for all heads! "
            "Set different_layout_per_head to True."
        )
    return None


def patterns_fit_in_window(
    num_different_global_patterns: int, num_local_blocks: int, num_global_blocks: int
) -> str | None:
    patterns, local, glob = num_different_global_patterns, num_local_blocks, num_global_blocks
    if patterns > local // glob:
        return (
            f"Number of layout versions (num_different_global_patterns), {patterns}, cannot be larger than number of "
            f"local window blocks divided by number of global blocks, {local} / {glob} = {local // glob}!"
        )
    return None


@register_sparsity("fixed")
@declared
class FixedSparsityConfig(SparsityConfig):
    """Local windows of one size, and in each window some blocks that all attend to: mode "fixed", the default.

    Sources: Child et al., "Generating long sequences with sparse transformers", 2019, arXiv 1904.10509; DeepSpeed's
    mode of this name.

    With `different_layout_per_head` and several patterns, head h takes pattern `h % num_different_global_patterns`:
    the last global blocks of the window, those before, and so on. The density tends to
    `num_global_blocks / num_local_blocks`.

    Raises:
        ValueError: a field of the wrong type or out of bounds, windows that global blocks do not divide, horizontal
            global attention on a unidirectional layout, more patterns than heads may differ by or a window can hold.

    Examples:
        >>> import ds_sparse
        >>> structure = ds_sparse.FixedSparsityConfig(num_heads=1, block=16, num_local_blocks=2)
        >>> structure.make_layout(seq_len=80)
        tensor([[[1, 1, 0, 1, 1],
                 [1, 1, 0, 1, 1],
                 [0, 1, 1, 1, 1],
                 [0, 1, 1, 1, 1],
                 [0, 1, 0, 1, 1]]])
    """

    num_local_blocks: int = Field(default=4, ge=1, description="Size of a local window in blocks.")
    num_global_blocks: int = Field(
        default=1, ge=1, description="Blocks of each window that are attended by all. Divides num_local_blocks."
    )
    attention: Attention = "bidirectional"
    horizontal_global_attention: HorizontalGlobalAttention = False
    num_different_global_patterns: int = Field(
        default=1,
        ge=1,
        description="In how many ways heads choose their global blocks. More than 1 needs different_layout_per_head; "
        "at most num_local_blocks / num_global_blocks.",
    )

    rules = (windows_split_evenly, horizontal_needs_bidirectional, patterns_need_heads, patterns_fit_in_window)

    def cautions(self) -> Iterator[tuple[str, str]]:
        yield from super().cautions()
        reaches_ahead = self.attention == "unidirectional" and self.num_global_blocks > 1
        if reaches_ahead and not (self._says("causal") or self._says("strict_causal")):
            yield (
                "num_global_blocks",
                f"num_global_blocks above 1 makes stripes that start at the first global row, {REACHES_AHEAD}",
            )

    @row_step
    def set_local_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the local windows, by DeepSpeed's name."""
        return windows([self.num_local_blocks], blocks, self.attention == "unidirectional")

    @row_step
    def set_global_layout(self, h: int, blocks: int) -> RowStep:
        """The step of `lay_out` for the global blocks, by DeepSpeed's name."""
        import torch

        unidirectional = self.attention == "unidirectional"
        local, glob = self.num_local_blocks, self.num_global_blocks
        first = local - (1 + h % self.num_different_global_patterns) * glob
        end = blocks // local * local
        place = torch.arange(blocks, dtype=torch.int32)
        is_global, first_row = torch.zeros(blocks, dtype=torch.bool), place
        if end:
            is_global = (place % local >= first) & (place % local < first + glob) & (place < end)
            first_row = place // local * local + first
        # The short last window pulls its global blocks left to fit. In a row shorter than num_global_blocks the
        # start is negative and counts from the end, as it did in DeepSpeed.
        last = min(end + first, blocks - glob)
        last, stop, _ = slice(last, last + glob).indices(blocks)

        def step(live: Tensor, rows: range) -> None:
            mine = slice(rows.start, rows.stop)
            live.logical_or_(is_global & (place[mine, None] >= first_row) if unidirectional else is_global)
            if self.horizontal_global_attention:
                live[is_global[mine]] = 1
            if end < blocks:
                live[within(rows, last if unidirectional else 0, blocks), last:stop] = 1
                if self.horizontal_global_attention:
                    live[within(rows, last, stop)] = 1

        return step
