import pytest
import torch
from helpers import seeded
from torch.nn.attention.flex_attention import flex_attention

from ds_sparse import reference
from ds_sparse.bench import flex
from ds_sparse.bench.references import random_tensors
from ds_sparse.layout import to_token_mask


def test_lists_by_hand():
    layout = torch.tensor([[[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]], dtype=torch.bool)
    counts, columns = flex.lists(layout)
    assert counts.tolist() == [[2, 0, 3]]
    assert columns.shape == (1, 3, 3)
    assert columns[0, 0, :2].tolist() == [1, 3] and columns[0, 2].tolist() == [0, 1, 2]
    assert counts.dtype == columns.dtype == torch.int32
    assert flex.lists(layout, 4)[1].shape == (1, 3, 4)
    assert flex.lists(torch.zeros_like(layout))[1].shape == (1, 3, 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("side", [16, 32, 64])
def test_the_mask_of_a_layout_is_the_layout(heads, side):
    layout = torch.rand(heads, 8, 8, generator=seeded()) < 0.5
    layout[:, :4, :4] = True
    layout[:, 4:, 4:] = False
    layout |= torch.eye(8, dtype=torch.bool)
    mask = flex.of_layout(layout, 16, side)
    tokens = to_token_mask(layout, 16)
    tiles = tokens.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3).flatten(3)
    assert torch.equal(mask.to_dense()[0].bool(), tiles.any(3))
    assert torch.equal(mask.full_kv_num_blocks[0], tiles.all(3).sum(2, dtype=torch.int32))
    # Run without compilation, FlexAttention goes by the mask function alone.
    query, key, value = random_tensors(3, (1, 3, 128, 16), torch.float32, torch.device("cpu"))
    expected = reference.attention(query, key, value, layout, 16)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), expected)
