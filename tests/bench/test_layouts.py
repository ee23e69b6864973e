import pytest
import torch

from ds_sparse.bench.layouts import LAYOUTS, make_layout
from ds_sparse.layout import density


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_layout_for_all_heads_the_same_again(name):
    layout = make_layout(name, 16, 1024)
    assert layout.shape == (1, 64, 64) and layout.dtype == torch.bool
    assert torch.equal(layout, make_layout(name, 16, 1024))


@pytest.mark.parametrize("percent", [1, 5, 10, 25, 50])
def test_random_layouts_have_their_density(percent):
    assert density(make_layout(f"random-{percent}", 16, 4096)) == pytest.approx(percent / 100, rel=0.05)


@pytest.mark.parametrize(("block", "reach"), [(16, 8), (64, 2), (128, 1)])
def test_dense_row_is_one_long_row_among_short_ones(block, reach):
    (layout,) = make_layout("dense-row", block, 4096)
    rows = len(layout)
    live = layout.sum(1)
    assert live[rows // 2] == rows
    assert layout[3 * rows // 4].nonzero().flatten().tolist() == [
        *range(3 * rows // 4 - reach, 3 * rows // 4 + reach + 1)
    ]
    assert (live == rows).sum() == 1


@pytest.mark.parametrize(
    ("name", "block", "seq_len", "message"),
    [("random-1", 64, 256, "Of 4 x 4 blocks at a density of 1% none is live"), ("dense-row", 64, 100, "100")],
)
def test_what_cannot_be_is_said(name, block, seq_len, message):
    with pytest.raises(ValueError, match=message):
        make_layout(name, block, seq_len)
