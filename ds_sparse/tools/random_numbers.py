"""Random numbers of Python, NumPy and PyTorch, as they were before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Keeps the states of all random numbers: a trial or a picture must not change what training draws."""
    import numpy
    import torch

    states = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
