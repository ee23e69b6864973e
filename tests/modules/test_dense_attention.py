"""dense_attention against a softmax over all keys."""

import pytest
import torch

from ds_sparse.modules.dense_attention import dense_attention

SHAPE = (2, 4, 10, 8)
PADDING = torch.tensor([[True] * 10, [True] * 6 + [False] * 4])
PAIRS = torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) > 0.3
BIAS = torch.randn(1, 4, 10, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def added(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    "masks, bias",
    [
        ({}, 0),
        ({"key_padding_mask": PADDING}, added(PADDING)[:, None, None]),
        ({"key_padding_mask": added(PADDING)}, added(PADDING)[:, None, None]),
        ({"key_padding_mask": PADDING, "attn_mask": PAIRS}, added(PADDING)[:, None, None] + added(PAIRS)),
        ({"key_padding_mask": PADDING, "rpe": BIAS}, added(PADDING)[:, None, None] + BIAS),
        ({"rpe": BIAS, "attn_mask": added(PAIRS)}, added(PAIRS) + BIAS),
    ],
)
def test_masks_of_every_kind_and_fewer_key_heads(masks, bias, key_heads):
    query, key, value = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))
    key, value = key[:, :key_heads], value[:, :key_heads]
    output = dense_attention(query, key, value, scale=0.3, **masks)
    keys, values = (x.repeat_interleave(4 // key_heads, 1) for x in (key, value))
    torch.testing.assert_close(output, torch.softmax(0.3 * query @ keys.mT + bias, -1) @ values)
