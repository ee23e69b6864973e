"""Pairs of options, of which the quick tests run some."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest


def pairs(first: Iterable, second: Iterable) -> list:
    """All pairs. Each value of the longer list is in one quick test, with those of the other in turn; the other pairs
    are slow."""
    firsts, seconds = list(first), list(second)
    found = []
    for (x, a), (y, b) in product(enumerate(firsts), enumerate(seconds)):
        quick = x % len(seconds) == y if len(firsts) >= len(seconds) else y % len(firsts) == x
        marks = () if quick else pytest.mark.slow("each of the two is in a quick test with another")
        found.append(pytest.param(a, b, marks=marks))
    return found
