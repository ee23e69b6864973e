"""Memory over some hundred steps; `python -m tests.fuzz --soak --steps 10000` for more."""

from __future__ import annotations

import pytest
import torch

from ds_sparse.tools.torch_settings import cpu_threads
from fuzz import soak

STEPS = 200
pytestmark = pytest.mark.slow("memory is measured over hundreds of steps")


class Leaking(soak.Soak):
    """Keeps a tensor of each step, as a cache would that forgets nothing."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(device, seed)
        self.kept: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        self.kept.append(torch.ones(soak.MIB, device=self.device))
        return super().step()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_is_flat_over_steps_of_many_lengths_and_layouts(device: str):
    with cpu_threads(1):
        assert soak.run(device, STEPS, seed=1) == ""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_that_grows_gets_a_sentence(device: str):
    with cpu_threads(1):
        said = soak.run(device, 20, seed=1, soak=Leaking(device, 1))
    assert said.startswith("Memory grew: ") and "after 4 steps" in said
