"""What every sparsity structure has: declared fields, rules between them, and the way from steps to a layout.

torch is imported where a layout is made: a block is read and checked without it, in a tenth of the time.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import random
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError, ValidationError

from ..block_sizes import BLOCK_SIZES
from ..memory import machine_memory
from ..wording import listed
from ._docstring import with_fields
from .declarations import DECLARED, DEFAULTS, declared_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..layout_rows import LayoutRows, RowMaker

REACHES_AHEAD = (
    "as in DeepSpeed, so a unidirectional layout gets blocks of later tokens. Set strict_causal to true to drop them."
)

Rule = Callable[..., str | None]
"""A condition between fields. Its parameters are the names of the fields it reads; it returns the sentence that says
what is wrong, or None."""

RowStep = Callable[["Tensor", range], object]
"""A step of a layout that sets the live blocks of some block rows of a head, in place, in a tensor (rows, blocks) of
any dtype."""

_Structure = TypeVar("_Structure", bound=type)

_given: set[str] = set()
"""Cautions that this process has given already."""


class SparsityWarning(UserWarning):
    """A structure that does what was asked, but perhaps not what was meant.

    Examples:
        >>> import warnings
        >>> import ds_sparse
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ds_sparse.SparsityWarning)
        ...     structure = ds_sparse.FixedSparsityConfig(num_heads=2, attention="unidirectional")
    """


def _block_size(block: int) -> int:
    if block not in BLOCK_SIZES:
        # pydantic's own type and wording for a choice, on an integer that stays strict (a Literal would take 16.0).
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": listed(BLOCK_SIZES, "or")}
        )
    return block


def _attention(value: Any, handler: ValidatorFunctionWrapHandler) -> str:
    try:
        return handler(value)
    except ValidationError as error:
        raise PydanticCustomError(
            "literal_error",
            'only "uni/bi-directional" attentions are supported for now! Input should be {expected}',
            {"expected": "'bidirectional' or 'unidirectional'"},
        ) from error


def _plain(value: Any) -> Any:
    """NumPy's integers, also inside a list, as those of Python, which are all that strict validation takes."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def _as_list(value: Any) -> Any:
    """Other sequences of numbers as the list that strict validation takes: tuples, ranges, arrays."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, (tuple, range)) else value


Block = Annotated[int, AfterValidator(_block_size), Field(json_schema_extra={"enum": list(BLOCK_SIZES)})]
Indices = Annotated[list[int], BeforeValidator(_as_list)]
WindowSizes = Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_as_list), Field(min_length=1)]

Attention = Annotated[
    Literal["bidirectional", "unidirectional"],
    WrapValidator(_attention),
    Field(
        description="Whether a block sees the blocks after it; inside a block all tokens see each other, see causal."
    ),
]
HorizontalGlobalAttention = Annotated[
    bool, Field(description="Whether global blocks also attend to all. Needs bidirectional attention.")
]
RandomBlocks = Annotated[int, Field(ge=0, description="Blocks drawn at random in every row.")]
WindowWidth = Annotated[
    int,
    Field(
        ge=0,
        description="Width of the window in blocks, half of it on either side of the diagonal: an even one counts as "
        "the next odd one, and 0 is the diagonal.",
    ),
]
GlobalBlockEndIndices = Annotated[
    Indices | None,
    Field(description="End (exclusive) of the range that starts at each of global_block_indices; null: single blocks."),
]


def _on_cpu(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: what the method makes is on the CPU, whatever the default device is."""

    @functools.wraps(method)
    def on_the_cpu(self: SparsityConfig, seq_len: int) -> Tensor:
        from ..layout import on_cpu

        with on_cpu():
            return method(self, seq_len)

    return on_the_cpu


@dataclass_transform(field_specifiers=(Field,))
def declared(cls: _Structure) -> _Structure:
    """Class decorator: the annotated fields become the constructor, its strict validation and the JSON schema.

    A pydantic dataclass, except that attributes which a subclass sets before calling `super().__init__` survive,
    that the class's `rules` are checked (ValueError), that its `cautions` are given once a process, and that the
    docstring lists the fields.

    Args:
        cls: a subclass of `SparsityConfig`. A field is annotated and has a default, as those of `SparsityConfig` have,
            unless it is keyword-only; pydantic's `Field` gives it bounds and a description.

    Returns:
        The class, whose constructor takes its own fields after those of its base.

    Raises:
        TypeError: a field without a default that is not keyword-only.

    Examples:
        >>> import ds_sparse
        >>> from pydantic import Field
        >>> @ds_sparse.declared
        ... class StripesSparsityConfig(ds_sparse.SparsityConfig):
        ...     every: int = Field(default=4, ge=1, description="Columns from one live one to the next.")
        ...
        ...     def lay_out(self, h, layout):
        ...         layout[h, :, :: self.every] = 1
        ...         return layout
        >>> StripesSparsityConfig(num_heads=1, every=2).make_layout(seq_len=64)[0, 0]
        tensor([1, 0, 1, 0])
        >>> StripesSparsityConfig(num_heads=1, every=0)
        Traceback (most recent call last):
            ...
        pydantic_core._pydantic_core.ValidationError: 1 validation error for StripesSparsityConfig
        every
          Input should be greater than or equal to 1 ...
    """
    made: Any = dataclass(config=ConfigDict(strict=True, extra="forbid"), eq=False)(cls)
    validated_init = made.__init__
    parameters = inspect.signature(made).parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keyword_only = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    @functools.wraps(validated_init)
    def __init__(self: SparsityConfig, *args: Any, **kwargs: Any) -> None:
        earlier = dict(vars(self))
        if len(args) <= len(positional) and not kwargs.keys() & set(positional[: len(args)]):
            # By name, so that an error names the field and not its position.
            args, kwargs = (), dict(zip(positional, args, strict=False)) | kwargs
        validated_init(self, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        if type(self).__init__ is not __init__:
            setattr(self, DECLARED, frozenset(kwargs) & DEFAULTS.keys())
        for name, value in earlier.items():
            # A subclass older than our keyword-only fields may use one of their names: it keeps what it set.
            if name not in vars(self) or (name in keyword_only and name not in kwargs):
                setattr(self, name, value)
        for rule in self.rules:
            require(rule(**{name: self._says(name, vars(self).get(name)) for name in rule_fields(rule)}))
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1
        for _, sentence in self.cautions():
            if sentence not in _given:
                _given.add(sentence)
                warnings.warn(sentence, SparsityWarning, stacklevel=2)

    made.__init__ = __init__
    setattr(made, DECLARED, frozenset(DEFAULTS))
    made.__doc__ = with_fields(made.__doc__ or made.__name__, made.__pydantic_fields__)
    return made


def rule_fields(rule: Rule) -> tuple[str, ...]:
    """Names of the fields that a rule reads."""
    return tuple(inspect.signature(rule).parameters)


def require(broken: str | None) -> None:
    """Raises ValueError with the sentence of a rule that is broken."""
    if broken:
        raise ValueError(broken)


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

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "__init__" in vars(cls):
            setattr(cls, DECLARED, frozenset())

    @property
    def draws_random_blocks(self) -> bool:
        """Whether the layout may depend on the seed, as far as the fields tell: code of a subclass counts as if it did,
        and `draws` tries it. A subclass may say so itself."""
        return self.overrides_layout() or self._says("num_random_blocks", 0) > 0

    def cautions(self) -> Iterator[tuple[str, str]]:
        """(option, sentence) for each choice that works but may surprise. Warned about once a process."""
        if self._says("attention") == "unidirectional" and not self._says("causal"):
            yield (
                "attention",
                (
                    'attention "unidirectional" masks whole blocks only: inside a diagonal block a token still sees '
                    "the later tokens of its block. Set causal to true for token-level masking, or pass a triangular "
                    "attention mask."
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
        """(option, sentence) for each choice that does nothing in rows of so many blocks, for the JSON reader."""
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
        raise NotImplementedError(
            f"{type(self).__name__} lays nothing out: use one of its structures (FixedSparsityConfig, ...), "
            "or override make_layout(seq_len) in a subclass."
        )

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
            MemoryError: as `make_bool_layout`, where the layout is made whole.
        """
        import torch

        from ..layout_rows import LayoutRows

        if self.overrides_layout():
            return LayoutRows.of(self.make_bool_layout(seq_len))
        blocks = self._blocks_in(seq_len)

        def maker(h: int) -> RowMaker:
            steps = self.row_steps(h, blocks)

            def make(rows: range) -> Tensor:
                live = torch.zeros(len(rows), blocks, dtype=torch.bool)
                for step in steps:
                    step(live, rows)
                return live.tril_(rows.start) if self._says("strict_causal") else live

            return make

        return LayoutRows(self.num_layout_heads, blocks, blocks, maker)

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
        raise NotImplementedError(f"{type(self).__name__} has no rows of its own.")

    def sampler(self, h: int) -> Callable[[range, int], list[int]]:
        """What draws the random blocks of a head.

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
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by Block size {self.block}!")
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
        """Whether a class outside this package replaces something of ours: it may count on int64 and num_heads."""
        mro = type(self).__mro__
        ours = next(place for place, cls in enumerate(mro) if cls.__module__.startswith(f"{__package__}."))
        return any(hasattr(mro[ours], name) for cls in mro[:ours] for name in vars(cls) if not name.startswith("__"))


def need_memory(heads: int, blocks: int, dtype: torch.dtype) -> None:
    """Raises MemoryError if making a layout (heads, blocks, blocks) would take more than half of this machine's memory:
    the layout itself, and about three masks of its shape on the way."""
    need = heads * blocks * blocks * (dtype.itemsize + 3)
    have = machine_memory()
    if need > have // 2:
        raise MemoryError(
            f"A layout of {heads} x {blocks} x {blocks} blocks takes about {need >> 30:,} GiB to make, more than half "
            f"of this machine's {have >> 30:,} GiB. Use a larger block or a shorter sequence."
        )


def set_rows(step: RowStep, h: int, layout: Tensor) -> Tensor:
    """Takes a step in all rows of head `h` of a (H, R, C) layout, in place, and returns the layout."""
    step(layout[h], range(layout.shape[1]))
    return layout


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
