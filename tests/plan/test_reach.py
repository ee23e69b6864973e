"""What a plan says that tokens find."""

import torch

from ds_sparse import (
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from ds_sparse.plan.reach import Reach, reach_of


def test_windows_are_seen_as_far_as_they_are_whole_and_global_blocks_are_between():
    def found(structure):
        return reach_of(structure.make_bool_layout(4096), 16)

    window = {"num_heads": 1, "block": 16, "num_sliding_window_blocks": 7}
    assert found(BSLongformerSparsityConfig(**window)) == Reach(48, 1.0)
    assert found(LocalSlidingWindowSparsityConfig(attention="bidirectional", **window)) == Reach(48, 0.0)
    fixed = found(FixedSparsityConfig(num_heads=1, block=16, num_local_blocks=4))
    assert fixed.near == 16 and 15 < fixed.between < 17, "the last block before each window is global"
    assert found(DenseSparsityConfig(num_heads=1, block=16)) == Reach(255 * 16, 256.0)


def test_heads_find_together_what_one_of_them_sees():
    near, far = torch.eye(8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool).tril(-1)
    assert reach_of(torch.stack([near, far]), 32).near == 7 * 32
