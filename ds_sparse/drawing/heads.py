"""What the heads of a picture are called."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def head_name(heads: Sequence[int], of: int, asked: int | None) -> str:
    """The heads of one picture, of a layout of so many; or the one that was asked for."""
    if asked is not None:
        return f"head {asked}"
    if len(heads) == of:
        return "all heads"
    return f"head{'s' * (len(heads) > 1)} {_in_ranges(heads)}"


def _in_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers, three and more in a row as a range: "0, 1, 4-7"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
