"""Types of the arguments of commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


class UsageError(ValueError):
    """An option that is wrong whatever files hold: a command ends with 2."""


def number(parse: Callable[[str], float], what: str, fits: Callable[[float], bool]) -> Callable[[str], Any]:
    """argparse type: a number in some bounds, which `what` says."""

    def read(text: str) -> float:
        try:
            found = parse(text)
        except ValueError:
            found = float("nan")
        if not fits(found):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return found

    return read


positive = number(int, "an integer of at least 1", lambda x: x >= 1)
chance = number(float, "a number from 0 to below 1", lambda x: 0 <= x < 1)
positive_number = number(float, "a number above 0", lambda x: 0 < x < float("inf"))
