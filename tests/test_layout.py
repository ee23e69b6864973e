import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse import FixedSparsityConfig, WindowIndex
from ds_sparse import layout as lay

modest = settings(deadline=None, derandomize=True, max_examples=60)
LIVE = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [None, 2])
def test_every_kind_of_layout_becomes_bool_with_heads(dtype, heads):
    given_layout = LIVE.to(dtype) if heads is None else LIVE.to(dtype).expand(heads, 3, 3)
    result = lay.as_bool_layout(given_layout)
    assert result.dtype is torch.bool
    assert torch.equal(result, LIVE.bool().expand(heads or 1, 3, 3))


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ([[1, 0]], TypeError, "torch tensor"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "0 and 1 as numbers, got torch.complex64"),
        (torch.ones(4, dtype=torch.int64), ValueError, r"got \(4,\)"),
        (
            torch.ones(1, 1, 2, 2, dtype=torch.bool),
            ValueError,
            r"got \(1, 1, 2, 2\).* here give that of one, such as layout\[0\]",
        ),
        (128, TypeError, "got int; a window of 128 tokens is for window_attention"),
        ({"mode": "fixed"}, TypeError, r"got dict; parse_sparse_attention\(block, num_heads\)"),
        (FixedSparsityConfig(2), TypeError, r"got FixedSparsityConfig; give what its make_layout\(tokens\)"),
        (WindowIndex.build(16, 2), TypeError, "got WindowIndex, which window_attention takes"),
        (torch.ones(0, 2, 2, dtype=torch.bool), ValueError, "at least one head"),
        (torch.ones(0, 1, 2, 2, dtype=torch.bool), ValueError, "at least one head"),
        (torch.tensor([[0, 2]]), ValueError, "from 0 to 2"),
        (torch.tensor([[-1, 1]]), ValueError, "from -1 to 1"),
        (torch.tensor([[0.5, 1]]), ValueError, "got values between"),
        (torch.tensor([[1, torch.nan]]), ValueError, "only 0 and 1, got NaN"),
    ],
)
def test_what_is_no_layout_is_refused(wrong, error, sentence):
    with pytest.raises(error, match=sentence):
        lay.as_bool_layout(wrong)


@modest
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_heads_density_cut_crop_and_expansion_agree(heads, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.rand(2, rows, columns, generator=generator) < 0.5
    layout = kinds[torch.randint(0, 2, (heads,), generator=generator)]

    shared = lay.share_equal_heads(layout)
    assert torch.equal(shared.expand_as(layout), layout)
    assert (shared.shape[0] == 1) == bool((layout == layout[0]).all())

    assert lay.density(layout) == pytest.approx(layout.double().mean().item())
    assert torch.equal(lay.crop(layout, rows, 1), layout[:, :, :1])
    mask = lay.to_token_mask(layout, 3)
    assert mask.shape == (heads, rows * 3, columns * 3) and mask.dtype is torch.bool
    assert torch.equal(mask[:, 1::3, 2::3], layout)
    assert mask.sum() == 9 * layout.sum()
    assert torch.equal(lay.causal_cut(layout), layout & (torch.arange(rows)[:, None] >= torch.arange(columns)))


@modest
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 400), st.sampled_from((0.0, 0.4, 1.0)), st.integers(0, 99))
def test_bits_hold_the_layout_and_live_blocks_are_counted(heads, rows, columns, chance, seed):
    layout = torch.rand(heads, rows, columns, generator=torch.Generator().manual_seed(seed)) < chance
    for live in (layout, layout.mT):
        bits = lay.pack_bits(live)
        assert bits.dtype is torch.uint8 and bits.shape == (*live.shape[:2], -(-live.shape[2] // 8))
        assert [int(bits[0, 0, 0]) >> k & 1 for k in range(min(8, live.shape[2]))] == live[0, 0, :8].long().tolist()
        assert torch.equal(lay.unpack_bits(bits, live.shape[2]), live)
        assert torch.equal(lay.count_live(live), live.sum(2))


def test_a_crop_beyond_the_layout_is_refused():
    with pytest.raises(ValueError, match="3 x 3 blocks to 4 x 3"):
        lay.crop(LIVE[None], 4, 3)
