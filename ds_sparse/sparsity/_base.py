"""The base class of all structures: the way from steps to a layout.

torch is imported where a layout is made: a block is read and checked without it, in a tenth of the time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ..tools.block_sizes import not_whole_blocks, rounded_up
from ..tools.memory import machine_memory
from ..tools.random_numbers import random_numbers_kept
from ._steps import RowStep
from .declarations import DECLARED, DEFAULTS, Block, Rule, declared, declared_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layout import LayoutRows, RowMaker


DRAWN_TOKENS = 2048
"""Tokens of a layout that is drawn where no length is asked for."""


def _on_cpu(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: what the method makes is on the CPU, whatever the default device is."""

    @functools.wraps(method)
    def on_the_cpu(self: SparsityConfig, seq_len: int) -> Tensor:
        from ..layout import on_cpu

        with on_cpu():
            return method(self, seq_len)

    return on_the_cpu


@declared
class SparsityConfig:
    """Base of all structures: subclass it and write `make_layout`, or `lay_out` for one head.

    A subclass may have a plain `__init__` that calls `super().__init__(num_heads, block)`, or declare fields of its
    own under `@declared`. Names, order and defaults are those of DeepSpeed's class; the keyword-only fields are ours,
    and count where this constructor gets them.

    Raises:
        ValueError: a field of the wrong type or out of bounds (pydantic's ValidationError is one).

    Examples:
        >>> import ds_sparse
        >>> class DiagonalSparsityConfig(ds_sparse.SparsityConfig):
        ...     def lay_out(self, h, layout):
        ...         layout[h].fill_diagonal_(1)
        ...         return layout
        >>> DiagonalSparsityConfig(num_heads=2, block=16).make_bool_layout(seq_len=32)
        tensor([[[ True, False],
                 [False,  True]]])
    """

    num_heads: int = Field(ge=1, description="Number of attention heads of the model.")
    block: Block = Field(
        default=16, description="Tokens in a block: the layout decides over block x block scores at a time."
    )
    different_layout_per_head: bool = Field(
        default=False,
        description="A layout of its own for each head, where there are random blocks or several global patterns.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        kw_only=True,
        description="Seed of the random blocks. With it they come from a generator of their own and are equal on every "
        "rank and after resume; without it from Python's random.",
    )
    causal: bool = Field(
        default=False,
        kw_only=True,
        description="Mask later tokens inside the live blocks as well (token-level causal attention).",
    )
    strict_causal: bool = Field(default=False, kw_only=True, description="Drop every block above the diagonal.")

    if TYPE_CHECKING:
        num_layout_heads: int = Field(init=False)  # what is laid out: all heads, or the one that all share

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions between fields, checked by the constructor and, over the fields that are valid, by the JSON reader."""
    json_rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions which only the JSON reader checks early; in Python they keep DeepSpeed's later error."""
    length_rules: ClassVar[tuple[Rule, ...]] = ()
    """Conditions between fields and `blocks`, the blocks in a row. The steps of the layout check them; the JSON reader
    names the key by them."""
    json_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults which differ between DeepSpeed's JSON block and its class."""

    _steps: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that lay a head out, in their order, each a `row_step`: those of the class as it has them,
    unless it, or a class that it extends, names them."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if not cls._steps:
            cls._steps = tuple(name for name, member in vars(cls).items() if hasattr(member, "of_rows"))
        if "__init__" in vars(cls):
            setattr(cls, DECLARED, frozenset())

    @property
    def draws_random_blocks(self) -> bool:
        """Tells if the layout may depend on the seed, as far as fields tell: code of a subclass counts as if it did,
        and `draws` tries it. A subclass may say so itself."""
        return self.overrides_layout() or self._says("num_random_blocks", 0) > 0

    def cautions(self) -> Iterator[tuple[str, str]]:
        """(option, sentence) for each choice that works but may surprise. Warned about once a process."""
        if self._says("attention") == "unidirectional" and not self._says("causal"):
            yield (
                "attention",
                (
                    'attention "unidirectional" masks whole blocks only: inside a diagonal block a token still sees '
                    "the later tokens of its block, unless the model is causal itself. Set causal to true for "
                    "token-level masking, or pass a triangular attention mask."
                ),
            )
        if self._says("seed") is not None and not self.draws_random_blocks:
            yield "seed", "seed changes nothing here: this structure draws no random blocks."
        width = self._says("num_sliding_window_blocks", 1)
        if width % 2 == 0:
            yield (
                "num_sliding_window_blocks",
                f"a sliding window of {width} blocks counts as one of {width + 1}, as in DeepSpeed: it reaches "
                f"{width // 2} blocks from the diagonal.",
            )

    def cautions_at(self, blocks: int) -> Iterator[tuple[str, str]]:
        """(option, sentence) for each choice that does nothing in rows of so many blocks. Said once a process where
        such a layout is made for attention, but not of an option that the layer's first layout was said of, and by the
        JSON reader."""
        yield from ()

    def lay_out(self, h: int, layout: Tensor) -> Tensor:
        """Sets the live blocks of one head, in place.

        Args:
            h: the head, from 0.
            layout: (H, R, C) of any dtype.

        Returns:
            `layout`.

        Raises:
            NotImplementedError: in `SparsityConfig` itself.
        """
        if not self._steps:
            raise NotImplementedError(
                f"{type(self).__name__} lays nothing out: use one of its structures (FixedSparsityConfig, ...), "
                "or override make_layout(seq_len) in a subclass."
            )
        for step in self._steps:
            layout = getattr(self, step)(h, layout)
        return layout

    @_on_cpu
    def setup_layout(self, seq_len: int) -> Tensor:
        """A layout without a live block.

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            Zeros, int64 (num_heads, R, C) on the CPU, R = C = seq_len / block.

        Raises:
            TypeError: seq_len is not an integer.
            ValueError: seq_len is not a positive multiple of the block.
            MemoryError: so many heads and blocks do not fit into this machine; nothing has been allocated.
        """
        import torch

        return self._no_blocks(self.num_heads, seq_len, torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copies head 0 to all others, in place, unless each head has a layout of its own.

        Args:
            layout: (H, R, C).

        Returns:
            `layout`.
        """
        if not self.different_layout_per_head:
            layout[1:] = layout[:1]
        return layout

    @_on_cpu
    def make_layout(self, seq_len: int) -> Tensor:
        """The layout as DeepSpeed gave it.

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            int64 (num_heads, R, C), 0/1, on the CPU.

        Raises:
            TypeError: seq_len is not an integer.
            ValueError: seq_len is not a positive multiple of the block, or too short for the structure.
            MemoryError: as `setup_layout`.
        """
        layout = self._lay_out_heads(self.setup_layout(seq_len))
        return self.check_and_propagate_first_head_layout(layout)

    @_on_cpu
    def make_bool_layout(self, seq_len: int) -> Tensor:
        """The layout as the training path uses it.

        Same blocks as `make_layout`, which it calls when a subclass overrides how layouts are made. The built-in
        structures never build the int64 tensor (1.6 GB at 65,536 tokens, block 16, 12 heads).

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            bool (H, R, C) on the CPU, H = 1 when all heads are equal.

        Raises:
            ValueError, TypeError: as `make_layout`, or what it returned is not a layout.
            MemoryError: so many blocks do not fit into this machine; nothing has been allocated.
        """
        import torch

        from ..layout import as_bool_layout, causal_cut, share_equal_heads

        if self.overrides_layout():
            need_memory(1, -(-seq_len // self.block), torch.bool)
            layout = as_bool_layout(self.make_layout(seq_len))
            if self._says("strict_causal"):
                layout = causal_cut(layout)
        else:
            layout = self._lay_out_heads(self._no_blocks(self.num_layout_heads, seq_len, torch.bool))
        return share_equal_heads(layout)

    @random_numbers_kept()
    def rows_to_draw(self, tokens: int | None = None) -> tuple[LayoutRows, int]:
        """The layout of so many tokens, 2048 by default, in whole blocks."""
        return self.make_rows(rounded_up(DRAWN_TOKENS if tokens is None else tokens, self.block)), self.block

    def _repr_html_(self) -> str | None:
        from ..picture import in_notebook

        return in_notebook(self.rows_to_draw, repr(self))

    def make_rows(self, seq_len: int) -> LayoutRows:
        """The layout of `make_bool_layout`, of which only the block rows exist that are asked for.

        A million tokens in blocks of 16 are 4 GiB a head when whole. A structure that overrides how layouts are made
        has no rows of its own: its layout is made whole.

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            The rows, bool, by head.

        Raises:
            ValueError, TypeError: as `make_bool_layout`.
            MemoryError: as `make_bool_layout`, where the layout is made whole; or some rows do not fit.
        """
        import torch

        from ..layout import ROWS_AT_ONCE, LayoutRows

        if self.overrides_layout():
            return LayoutRows.of(self.make_bool_layout(seq_len), self.num_heads)
        blocks = self._blocks_in(seq_len)
        need_memory(1, blocks, torch.bool, rows=ROWS_AT_ONCE)

        def maker(h: int) -> RowMaker:
            steps = self.row_steps(h, blocks)

            def make(rows: range) -> Tensor:
                live = torch.zeros(len(rows), blocks, dtype=torch.bool)
                for step in steps:
                    step(live, rows)
                return live.tril_(rows.start) if self._says("strict_causal") else live

            return make

        return LayoutRows(self.num_layout_heads, blocks, blocks, maker, num_heads=self.num_heads)

    def computed_share(self, seq_len: int) -> float:
        """The share of scores that are computed.

        Args:
            seq_len: tokens, a multiple of the block.

        Returns:
            Above 0 to 1, the mean over heads.

        Raises:
            ValueError, TypeError, MemoryError: as `make_rows`.
        """
        return self.make_rows(seq_len).density()

    def row_steps(self, h: int, blocks: int) -> list[RowStep]:
        """The steps of `lay_out` for some rows at a time. What is random is drawn here.

        Args:
            h: the head, from 0.
            blocks: blocks in a row, R = C.

        Returns:
            The steps, each of which sets live blocks in place.

        Raises:
            NotImplementedError: a structure that has none.
            ValueError: too few blocks for the structure.
        """
        if not self._steps:
            raise NotImplementedError(f"{type(self).__name__} has no rows of its own.")
        return [getattr(type(self), step).of_rows(self, h, blocks) for step in self._steps]

    def sampler(self, h: int) -> Callable[[range, int], list[int]]:
        """The generator that draws the random blocks of a head.

        Args:
            h: the head, from 0.

        Returns:
            `random.sample`, Python's own without a seed, else one that starts afresh at every call of `sampler`.
        """
        seed = self._says("seed")
        return random.sample if seed is None else random.Random(f"{seed}/{h}").sample

    def _no_blocks(self, heads: int, seq_len: int, dtype: torch.dtype) -> Tensor:
        import torch

        blocks = self._blocks_in(seq_len)
        need_memory(heads, blocks, dtype)
        return torch.zeros((heads, blocks, blocks), dtype=dtype)

    def _blocks_in(self, seq_len: int) -> int:
        if not hasattr(seq_len, "__index__") or isinstance(seq_len, bool):
            raise TypeError(f"A layout needs a sequence length that is an integer, got {seq_len!r}.")
        if seq_len < 1:
            raise ValueError(f"A layout needs a sequence length of at least 1, got {seq_len}.")
        if seq_len % self.block:
            raise ValueError(not_whole_blocks(seq_len, self.block))
        return seq_len // self.block

    def _lay_out_heads(self, layout: Tensor) -> Tensor:
        from ..layout import causal_cut

        for h in range(self.num_layout_heads):
            layout = self.lay_out(h, layout)
        return causal_cut(layout) if self._says("strict_causal") else layout

    def _says(self, name: str, default: Any = None) -> Any:
        """The value of a field; the default where its class declares no such field."""
        if name in DEFAULTS:
            return declared_value(self, name)
        cls: Any = type(self)
        return getattr(self, name) if name in cls.__pydantic_fields__ else default

    def overrides_layout(self) -> bool:
        """Tells if a class outside this package replaces something of ours: it may count on int64 and num_heads."""
        mro = type(self).__mro__
        ours = next(place for place, cls in enumerate(mro) if cls.__module__.startswith(f"{__package__}."))
        return any(hasattr(mro[ours], name) for cls in mro[:ours] for name in vars(cls) if not name.startswith("__"))


def need_memory(heads: int, blocks: int, dtype: torch.dtype, rows: int | None = None) -> None:
    """Raises MemoryError if making a layout (heads, blocks, blocks), whole or some rows at a time, would take more than
    half of this machine's memory: the layout itself, and about three masks of its shape on the way."""
    need = heads * (rows or blocks) * blocks * (dtype.itemsize + 3)
    have = machine_memory()
    if need > have // 2:
        pieces = f", {rows} rows at a time" if rows else ""
        raise MemoryError(
            f"A layout of {heads} x {blocks} x {blocks} blocks takes about {need >> 30:,} GiB to make{pieces}, more "
            f"than half of this machine's {have >> 30:,} GiB. Use a larger block or a shorter sequence."
        )
