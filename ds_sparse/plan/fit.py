"""Least squares of relative errors, no coefficient below zero."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import numpy as np


def fit(rows: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Coefficients, as many as a row has numbers, of which rows times coefficients are nearest to what was measured.

    Tries each set of columns that may be other than zero: exact, and quick for a handful.

    Raises:
        ValueError: nothing was measured.
    """
    if not measured:
        raise ValueError("There is nothing measured to take a rate from.")
    matrix = np.array(rows, dtype=float) / np.array(measured, dtype=float)[:, None]
    scale = np.abs(matrix).max(0)
    scale[scale == 0] = 1
    matrix, wanted = matrix / scale, np.ones(len(measured))
    columns = range(matrix.shape[1])
    best, found = np.inf, np.zeros(len(columns))
    for those in chain.from_iterable(combinations(columns, count) for count in range(1, len(columns) + 1)):
        solution = np.linalg.lstsq(matrix[:, those], wanted, rcond=None)[0]
        error = ((matrix[:, those] @ solution - wanted) ** 2).sum()
        if (solution >= 0).all() and error < best - 1e-12:
            best, found = error, np.zeros(len(columns))
            found[list(those)] = solution
    return (found / scale).tolist()


def times(coefficients: Sequence[float], row: Sequence[float]) -> float:
    return sum(c * x for c, x in zip(coefficients, row, strict=True))
