"""What dropout keeps on live blocks is what it keeps of the whole matrix."""

from __future__ import annotations

import pytest
import torch

from ds_sparse.ops.live_dropout import kept_on_blocks
from ds_sparse.reference import dropout_keep

TOKENS = 128


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
def test_it_is_the_references(block: int):
    blocks = torch.arange(TOKENS // block)
    rows, columns = (x.flatten() for x in torch.meshgrid(blocks, blocks, indexing="ij"))
    seed, matrices = torch.tensor([(1 << 61) + 12345, (7 << 40) + 9]), torch.arange(6).view(2, 3)
    kept = kept_on_blocks(seed, 0.3, matrices, rows, columns, block)
    kept = kept.unflatten(2, (len(blocks), -1)).transpose(3, 4).reshape(2, 3, TOKENS, TOKENS)
    assert torch.equal(kept, dropout_keep(*seed.tolist(), 2, 3, TOKENS, TOKENS, 0.3))
