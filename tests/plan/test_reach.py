"""What a plan says that tokens find."""

import pytest
import torch

from ds_sparse import (
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
)
from ds_sparse.plan.layers import kinds_of
from ds_sparse.plan.model import NAMED
from ds_sparse.plan.reach import Reach, reach_of, recall_of

WINDOW = {"mode": "bslongformer", "block": 16}


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


@pytest.mark.parametrize("model", ["bert-base", "neox-small"])
def test_dense_layers_find_everything_whether_null_or_a_layout_of_ones(model):
    layers = {"1": {"mode": "dense"}, "4": {"mode": "dense", "block": 64}, "5": None}
    recall = recall_of(kinds_of(WINDOW | {"layers": layers}, NAMED[model], "ds.json"), NAMED[model], 1024)
    assert recall.everywhere == (1, 4, 5) and recall.near == 16
