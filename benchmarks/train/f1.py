"""F1, from counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Found:
    """How many are predicted, how many are there, and how many of both agree; of several sequences, their sum."""

    predicted: int = 0
    there: int = 0
    right: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(self.predicted + other.predicted, self.there + other.there, self.right + other.right)

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 where nothing is predicted or there."""
        both = self.predicted + self.there
        return 2 * self.right / both if both else 0.0


def macro_f1(predicted: np.ndarray, classes: np.ndarray) -> float:
    """The mean of the F1 of each class that is there; both arrays have a class for each of what is classified."""
    return float(np.mean([found_of_class(predicted == one, classes == one).f1 for one in np.unique(classes)]))


def found_of_class(predicted: np.ndarray, there: np.ndarray) -> Found:
    """Of bool arrays."""
    return Found(int(predicted.sum()), int(there.sum()), int((predicted & there).sum()))
