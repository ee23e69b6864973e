"""The sizes of windows, dilations and global tokens as callers give them: one number, or one a head."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import torch

from .transforms import unwrap_functorch

Numbers = int | Sequence[int] | torch.Tensor
"""One integer or several; a tensor of them is read, which waits for its device."""

_OF_EACH = " Where sequences differ, call once for each, and put the results together by torch.cat."


class WindowNumbers(NamedTuple):
    """The numbers of a window, for any number of tokens; a compiled graph holds it in the place of a `WindowIndex`.

    Attributes:
        windows, dilations: one number, or one a head.
        causal, global_tokens: as in `window_attention`; global tokens ascend.
    """

    windows: tuple[int, ...]
    causal: bool
    global_tokens: tuple[int, ...]
    dilations: tuple[int, ...]

    @classmethod
    def of(
        cls, windows: Sequence[int], causal: bool, global_tokens: Sequence[int], dilations: Sequence[int]
    ) -> WindowNumbers:
        """Makes them of the lists that operators are given."""
        return cls(tuple(windows), causal, tuple(global_tokens), tuple(dilations))

    @property
    def layout_heads(self) -> int:
        """Heads whose windows differ; 1 where all are alike."""
        alike = all(number == numbers[0] for numbers in (self.windows, self.dilations) for number in numbers)
        return 1 if alike else max(len(self.windows), len(self.dilations))

    @property
    def in_order(self) -> bool:
        """Tells if kernels see tokens in the order of the sequence, whatever their number."""
        first = all(token == place for place, token in enumerate(self.global_tokens))
        return first and all(dilation == 1 for dilation in self.dilations)


def integers(name: str, given: Numbers, least: int) -> tuple[int, ...]:
    """Integers of an argument, as many as there are. Raises TypeError for bools, floats and what else is no integer,
    ValueError for one below `least`."""
    if isinstance(given, torch.Tensor):
        if given.is_floating_point() or given.dtype == torch.bool or given.dim() > 1:
            raise TypeError(
                f"{name} is a {given.dim()}-D tensor of {given.dtype}; it has to hold integers, in 1-D, which all "
                f"sequences of a batch share.{_OF_EACH if given.dim() > 1 else ''}"
            )
        given = unwrap_functorch(name, given).tolist()
    numbers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Integral | torch.SymInt):
            more = _OF_EACH if isinstance(number, Sequence | torch.Tensor) and not isinstance(number, str) else ""
            raise TypeError(f"{name} is {given!r}; it has to be an integer, or a sequence of integers.{more}")
        if number < least:
            raise ValueError(f"{name} is {given!r}; it has to be {least} or more.")
    # NumPy's integers would overflow in what is computed of them.
    return tuple(int(number) if isinstance(number, Integral) else number for number in numbers)


def of_heads(name: str, given: Numbers, least: int, heads: int | None = None) -> tuple[int, ...]:
    """One integer, or one a head. Raises TypeError and ValueError as `integers`, and for none or another number of
    them."""
    numbers = integers(name, given, least)
    if len(numbers) != 1 and ((heads is not None and len(numbers) != heads) or not numbers):
        wanted = "one a head" if heads is None else f"{heads}, one a head"
        raise ValueError(f"{name} has {len(numbers)} numbers; give one, or {wanted}.")
    return numbers


def global_numbers(given: Sequence[int] | torch.Tensor | None, tokens: int) -> tuple[int, ...]:
    """Numbers of global tokens, each once, ascending. Raises TypeError for what is no integer, such as a mask of bools,
    ValueError for a number that no token has."""
    if isinstance(given, torch.Tensor) and given.dtype == torch.bool:
        raise TypeError(
            f"global_tokens is a mask of shape {tuple(given.shape)}; it has to hold numbers of tokens, which of a mask "
            f"(tokens,) are mask.nonzero()[:, 0].{_OF_EACH}"
        )
    numbers = () if given is None else integers("global_tokens", given, 0)
    if numbers and max(numbers) >= tokens:
        raise ValueError(f"global_tokens has {max(numbers)}, and there are {tokens} tokens, numbered from 0.")
    return tuple(sorted(set(numbers)))
