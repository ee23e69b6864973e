"""What is known without reading anything: how often each label stands in what is trained on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def log_frequencies(labels: Iterable[np.ndarray], classes: int) -> Tensor:
    """fp32 (classes), the logarithm of each class's share of integer labels, arrays of any shape. Each counts once
    more than it is there, so that none is impossible.

    Examples:
        >>> log_frequencies([np.array([0, 0, 0, 1])], classes=2).exp()
        tensor([0.6667, 0.3333])
    """
    counts = 1 + sum(np.bincount(np.ravel(some), minlength=classes) for some in labels)
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def unigram_cross_entropy(frequencies: Tensor, labels: np.ndarray) -> float:
    """Nats, of integer labels, an array of any shape, by the result of `log_frequencies`."""
    return -float(frequencies[torch.from_numpy(labels.astype(np.int64))].mean())
