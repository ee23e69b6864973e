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


@pytest.mark.parametrize("queries", [10, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_tokens_of_a_causal_layer_see_none_after_them_and_sinks_take_their_share(queries, with_sinks):
    query, key, value = (torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    given = query[:, :, 10 - queries :], key, value
    output = dense_attention(
        *given, scale=0.3, key_padding_mask=PADDING, causal=True, query_offset=10 - queries, sinks=sinks
    )
    scores = 0.3 * query @ key.mT + added(PADDING)[:, None, None] + added(torch.ones(10, 10).tril().bool())
    if with_sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, 10, 1)], -1)
    truth = (torch.softmax(scores, -1)[..., :10] @ value)[:, :, 10 - queries :]
    torch.testing.assert_close(output, truth)
    operands = [query, key, value, *([sinks] if with_sinks else [])]
    ours, theirs = (torch.autograd.grad(x.square().sum(), operands) for x in (output, truth))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
