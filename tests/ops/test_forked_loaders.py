"""Data loaders fork a process that has run kernels, on several threads and with tiles; their workers run them, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers import random, seeded
from torch.utils.data import DataLoader, Dataset

from ds_sparse import block_sparse_attention
from ds_sparse.ops import MatMul

LAYOUT = torch.ones(2, 4, 4, dtype=torch.bool).tril()


class Attended(Dataset):
    """The output, and the scores of all live blocks, of sample i."""

    def __init__(self, dtype: torch.dtype):
        self.samples = random(seeded(), 6, 2, 64, 32, dtype=dtype)
        self.product = MatMul(LAYOUT.long(), 16, "sdd", trans_b=True)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.samples[i : i + 1]
        return block_sparse_attention(x, x, x, LAYOUT, block=16), self.product(x, x)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("two_threads")
def test_workers_of_a_forked_loader_give_the_same_bits(dtype: torch.dtype):
    samples = Attended(dtype)
    expected = [samples[i] for i in range(len(samples))]
    loader = DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60)
    found = list(loader)
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])
