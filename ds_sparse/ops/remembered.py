"""Calls that passed their checks, by all that these depend on: the next one that is like it is not checked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..dispatch import forced_implementation, is_aligned, is_readable
from ..index.cache import is_capturing
from ._autograd import Function, recorded

Signature = tuple[tuple[Any, ...], ...]

MOST = 1024
"""Signatures of an operation that are kept; a model has some tens."""

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_PLAIN = frozenset({NoneType, bool, int, float, str})


def signature(
    kind: Any, operands: tuple[Any, ...], others: tuple[Any, ...], options: tuple[Any, ...]
) -> Signature | None:
    """All that checks look at, but for values of tensors. None where a call is not remembered: in a trace, under
    torch.func's transforms and in forward mode, where autocast casts an operand, and with tensors that have no memory
    or are of a subclass.

    Args:
        kind: class of what holds the layout, and what else tells calls apart.
        operands: tensors that autocast casts.
        others: tensors that it does not; None is what is not given.
        options: they count with their types, as 16 is a block and 16.0 is none. A call is not remembered with others
            than Python's own numbers and strings.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    forms: list[Any] = []
    try:
        for x in (*operands, *others):
            if x is None:
                forms.append(None)
            elif type(x) in _TENSORS:
                place = x.data_ptr() & 15  # raises for what has no memory of its own
                forms.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad, place))
            else:
                return None
        device_type = "cuda" if operands and operands[0].is_cuda else "cpu"
        if operands and torch.is_autocast_enabled(device_type):
            dtypes = torch.float64, torch.get_autocast_dtype(device_type)
            if any(x.dtype not in dtypes for x in operands):
                return None
    except (AttributeError, RuntimeError):
        return None
    return (*forms,), options, (*map(type, options),), (kind, forced_implementation(), torch.is_grad_enabled())


class Walk(NamedTuple):
    """What kernels walk of an index, for calls of one kind, and how a call that is remembered goes on.

    Attributes:
        rows: what forward takes: the lists of the tiles of rows, stored heads, block and the tiles' height.
        both: what backward takes: the lists of rows, those of columns, and the same numbers.
        ends: what both take last: the implementation's name; of attention on blocks also whether sizes are bounded, and
            whether layouts are those of sequences.
        rows_differ: of attention on blocks, what forward takes after these: `Tiles.lines_differ` of rows.
        function: the autograd function.
        apply: what of it runs: all, or forward alone where no gradient is wanted.
        in_place: whether the operands are read where they are, and hold something.
        gradients: of a product: the walks of the gradients of its operands, where its own has these strides and is
            aligned; None is what is not known.
        strides: of the product.
    """

    rows: tuple[Any, ...] = ()
    both: tuple[Any, ...] = ()
    ends: tuple[Any, ...] = ()
    rows_differ: bool = False
    function: Any = None
    apply: Any = None
    in_place: bool = False
    gradients: tuple[Walk | None, ...] = (None, None)
    strides: tuple[int, ...] = ()

    def of_calls_like(self, function: type[Function], operands: Iterable[Tensor], *others: Tensor | None) -> Walk:
        """The walk of calls that are remembered, of such operands and other tensors with gradients."""
        operands = tuple(operands)
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*operands, *others))
        apply = recorded(function) if wanted else function.forward
        return self._replace(
            function=function,
            apply=apply,
            in_place=all(x.dim() == 4 and x.numel() > 0 and is_readable(x) for x in operands),
        )

    def of_gradient(self, operand: int, grad: Tensor) -> Walk | None:
        """The walk of the gradient of a product's operand, by its number, of that of the product."""
        is_alike = grad.stride() == self.strides and is_aligned(grad)
        return self.gradients[operand] if is_alike else None


class Known(NamedTuple):
    """What was found of calls that are alike.

    Attributes:
        scale: factor of the scores.
        layout: what was read of what the index is made of: a layout's block, the numbers of a window.
        walks: for each index that fits the calls, what kernels walk of it.
    """

    scale: float
    layout: Any
    walks: WeakKeyDictionary[Any, Walk]


class Remembered:
    """What was found of an operation's calls, by their signatures. Threads may share it: each step is one of a
    dictionary's own."""

    def __init__(self) -> None:
        self._found: dict[Signature, Known] = {}

    def get(self, call: Signature) -> Known | None:
        try:
            return self._found.get(call)
        except TypeError:  # an option that has no hash
            return None

    def keep(self, call: Signature, scale: float, layout: Any, index: Any, walk: Callable[[], Walk]) -> None:
        """Keeps what was found of a call that has passed all checks, until there are many others; not in the capture of
        a CUDA graph, where nothing that a walk may need can be made."""
        if not _PLAIN.issuperset(call[2]) or is_capturing():
            return
        if len(self._found) >= MOST:
            self._found.clear()
        self._found.setdefault(call, Known(scale, layout, WeakKeyDictionary())).walks[index] = walk()
