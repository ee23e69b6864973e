"""Layouts: bool tensors of the blocks of the attention matrix that exist.

A layout is a bool tensor (H, R, C): H heads, or 1 when all heads are equal; R block rows (queries), C block columns
(keys). True means that the block of `block` x `block` scores is computed, False that it does not exist.
The block layout comes from OpenAI's blocksparse kernels and from DeepSpeed sparse attention, which kept it as an int64
tensor with one copy a head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OF_SEQUENCES = (
    " block_sparse_attention and BlockIndex.build take one for each sequence; here give that of one, such as layout[0]."
)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, or in a function that it decorates, every new tensor is a real one on the CPU: layouts are, whatever the
    default device is, where a model is built on the meta device or of fake tensors, and where `torch.zeros` has been
    replaced by a function that asks for another device (deepspeed.OnDevice, Accelerate's init_empty_weights)."""
    with unset_fake_temporarily(), torch.device("cpu"), _OnCPU():
        yield


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "cpu"} if kwargs.get("device") is not None else kwargs))


def as_bool_layout(layout: Tensor) -> Tensor:
    """Checks a layout and returns it as bool (H, R, C).

    Args:
        layout: (H, R, C) or (R, C), bool, or 0 and 1 in any integer or floating type; (R, C) becomes (1, R, C).

    Raises:
        TypeError: not a tensor, or of another type.
        ValueError: not 2-D or 3-D, an empty dimension, or a value other than 0 and 1.
    """
    layout = with_heads(layout)
    check_values(layout)
    return layout.bool()


def with_heads(layout: Tensor) -> Tensor:
    """`as_bool_layout` without a look at the values, which would wait for the device: (H, R, C) of the given dtype."""
    if not isinstance(layout, Tensor):
        raise TypeError(f"A layout is a torch tensor of 0s and 1s, got {type(layout).__name__}{_instead_of(layout)}.")
    _check_dense(layout)
    if layout.dtype not in (torch.bool, *_INTEGERS, *_FLOATS):
        raise TypeError(f"A layout is bool, or 0 and 1 as numbers, got {layout.dtype}; convert it with layout != 0.")
    if 0 in layout.shape:
        raise ValueError(f"A layout needs at least one head, row and column, got {tuple(layout.shape)}.")
    if layout.dim() not in (2, 3):
        raise ValueError(
            "A layout has shape (block rows, block columns) or (heads, block rows, block columns), "
            f"got {tuple(layout.shape)}." + (_OF_SEQUENCES if layout.dim() == 4 else "")
        )
    return layout if layout.dim() == 3 else layout.unsqueeze(0)


def with_heads_of_sequences(layout: Tensor) -> tuple[Tensor, int]:
    """`with_heads` of a layout that may be another one for each sequence, (B, H, R, C), whose heads follow those of the
    sequence before; and B, 1 where it is one for all."""
    if isinstance(layout, Tensor) and layout.dim() == 4 and not layout.is_nested and layout.numel():
        return with_heads(layout.flatten(0, 1)), layout.shape[0]
    return with_heads(layout), 1


def _instead_of(given: object) -> str:
    """Advice for what is no layout, where it is known."""
    if hasattr(given, "make_layout"):
        return "; give what its make_layout(tokens) returns"
    instead = {
        "int": f"; a window of {given} tokens is for window_attention, and for explain a WindowIndex",
        "dict": "; parse_sparse_attention(block, num_heads).make_layout(tokens) makes one",
        "list": "; give it in torch.tensor",
        "WindowIndex": ", which window_attention takes",
        "TokenIndex": ", which sparse_attn takes",
        "PackedIndex": ", which block_sparse_attention takes",
    }
    return instead.get(type(given).__name__, "")


def _check_dense(layout: Tensor) -> None:
    if layout.layout == torch.strided and not layout.is_nested and not is_distributed(layout):
        return
    if layout.is_nested:
        kind, instead = "nested", "layout.to_padded_tensor(0)"
    elif layout.layout != torch.strided:
        kind, instead = f"of layout {layout.layout}", "layout.to_dense() != 0"
    else:
        kind, instead = "a DTensor", "layout.full_tensor(), or the rows of the heads of this rank"
    raise TypeError(f"A layout is a dense tensor of 0s and 1s, got one that is {kind}; give {instead}.")


def is_distributed(x: Tensor) -> bool:
    """Tells if x is a DTensor, which those that have none need not import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def check_values(layout: Tensor) -> None:
    """Raises ValueError where a layout of numbers holds anything but 0 and 1."""
    if layout.dtype is torch.bool:
        return
    low, high = (bound.item() for bound in torch.aminmax(layout))
    if math.isnan(low):
        raise ValueError("A layout holds only 0 and 1, got NaN; make it of comparisons, which are True or False.")
    if not (low >= 0 and high <= 1):
        raise ValueError(f"A layout holds only 0 and 1, got values from {low} to {high}; convert it with layout != 0.")
    if layout.is_floating_point() and (layout != layout.bool()).any():
        raise ValueError("A layout holds only 0 and 1, got values between; convert it with layout != 0.")


def share_equal_heads(layout: Tensor) -> Tensor:
    """(H, R, C) -> (1, R, C) when all heads are equal, else the layout itself."""
    if layout.shape[0] > 1 and bool((layout[1:] == layout[:1]).all()):
        # A copy: a view would keep the memory of all heads.
        return layout[:1].clone()
    return layout


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


def _grouped(live: Tensor, size: int) -> Tensor:
    """(..., C) bool or uint8 -> (..., ceil(C / size), size) uint8 of 0 and 1."""
    missing = -live.shape[-1] % size
    live = pad(live, (0, missing)) if missing else live
    return (live if live.dtype == torch.uint8 else live.view(torch.uint8)).unflatten(-1, (-1, size))


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


ROWS_AT_ONCE = 128
"""Block rows that exist at a time. So few that uint8 holds their sums."""

RowMaker = Callable[[range], Tensor]
"""From a range of block rows of one head to bool (rows, columns)."""


@dataclass(frozen=True)
class LayoutRows:
    """A layout (heads, rows, columns) in blocks.

    Attributes:
        heads: of all sequences together, one after the other; of each 1 when all its heads are equal.
        maker: from a head to what makes its rows; what is random in a head is drawn by this call.
        sequences: which have layouts of their own; 1 when they share one.
        num_heads: of a sequence, where all share its layout; None: any number.
    """

    heads: int
    rows: int
    columns: int
    maker: Callable[[int], RowMaker]
    sequences: int = 1
    num_heads: int | None = None

    @classmethod
    def of(cls, layout: Tensor, num_heads: int | None = None) -> LayoutRows:
        """The rows of a layout (R, C), (H, R, C) or (B, H, R, C) that exists, bool or 0/1 integers.

        Raises:
            TypeError, ValueError: as `as_bool_layout`.
        """
        of_heads, sequences = with_heads_of_sequences(layout)
        live = as_bool_layout(of_heads).cpu()
        heads, rows, columns = live.shape
        return cls(heads, rows, columns, lambda h: lambda rows: live[h, rows.start : rows.stop], sequences, num_heads)

    @property
    def heads_of_sequence(self) -> int:
        return self.heads // self.sequences

    def asked(self, head: int | None) -> list[int]:
        """The heads that are head `head` of a sequence; None: all.

        Raises:
            ValueError: there is no such head.
        """
        if head is None:
            return list(range(self.heads))
        number = self.heads_of_sequence if self.heads_of_sequence > 1 else self.num_heads
        if head < 0 or (number is not None and head >= number):
            wanted = "0 or more" if number is None else f"from 0 to {number - 1}"
            raise ValueError(f"head is {head}; it has to be {wanted}.")
        first = head if self.heads_of_sequence > 1 else 0
        return list(range(first, self.heads, self.heads_of_sequence))

    def pieces(self, h: int) -> Iterator[tuple[range, Tensor]]:
        """All rows of a head, bool, no more than ROWS_AT_ONCE at a time, and which they are."""
        make = self.maker(h)
        for start in range(0, self.rows, ROWS_AT_ONCE):
            piece = range(start, min(start + ROWS_AT_ONCE, self.rows))
            yield piece, make(piece)

    def density(self) -> float:
        """Share of live blocks, 0 to 1, over all heads."""
        live = sum(int(part.count_nonzero()) for h in range(self.heads) for _, part in self.pieces(h))
        return live / (self.heads * self.rows * self.columns)
