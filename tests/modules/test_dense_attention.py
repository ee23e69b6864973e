"""dense_attention against a softmax over all keys."""

import pytest
import torch

from ds_sparse.index import cache
from ds_sparse.modules.dense_attention import dense_attention
from ds_sparse.reference import attention, bias_of_pairs

SHAPE = (2, 4, 10, 8)
PADDING = torch.tensor([[True] * 10, [True] * 6 + [False] * 4])
PAIRS = torch.rand(10, 10, generator=torch.Generator().manual_seed(1)) > 0.3
BIAS = torch.randn(1, 4, 10, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

DISTANCES = torch.randn(4, 23, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


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
        ({"distance_bias": DISTANCES}, bias_of_pairs(DISTANCES, *[SHAPE[2]] * 2)),
    ],
)
def test_masks_of_every_kind_and_fewer_key_heads(masks, bias, key_heads):
    query, key, value = (torch.randn(SHAPE, dtype=torch.float64) for _ in range(3))
    key, value = key[:, :key_heads], value[:, :key_heads]
    output = dense_attention(query, key, value, scale=0.3, **masks)
    keys, values = (x.repeat_interleave(4 // key_heads, 1) for x in (key, value))
    torch.testing.assert_close(output, torch.softmax(0.3 * query @ keys.mT + bias, -1) @ values)


@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("offset", [None, 3, 9])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_causality_sinks_and_queries_at_a_later_position(with_sinks, offset, padding):
    query, key, value = (torch.randn(SHAPE, dtype=torch.float64, requires_grad=True) for _ in range(3))
    queries = query if offset is None else query[:, :, offset : offset + 4]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    given = {"key_padding_mask": padding, "sinks": sinks, "query_offset": offset, "causal": True}
    output = dense_attention(queries, key[:, :2], value[:, :2], **given)
    keys, values = (x[:, :2].repeat_interleave(2, 1) for x in (key, value))
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    seen = seen if offset is None else seen[offset : offset + 4]
    seen = seen if padding is None else seen & padding[:, None, None]
    scores = (8**-0.5 * queries @ keys.mT).masked_fill(~seen, float("-inf"))
    if with_sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    truth = torch.softmax(scores, -1)[..., :10] @ values
    torch.testing.assert_close(output, truth)
    leaves = [query, key, value, *([sinks] if with_sinks else [])]
    ours, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (output, truth))
    torch.testing.assert_close(ours, theirs)


def test_a_capture_of_packed_documents_is_a_sentence(monkeypatch):
    monkeypatch.setattr(cache, "is_captured", lambda device: True)
    x = torch.randn(1, 2, 10, 8)
    with pytest.raises(RuntimeError, match="computes packed documents one by one, .* of which all layers are sparse"):
        dense_attention(x, x, x, cu_seqlens=torch.tensor([0, 7, 10]))


@pytest.mark.parametrize("offset", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_soft_cap_beside_sinks_and_rows_that_see_nothing(dtype, offset):
    """As of the reference, in whose rows without a key nothing is left, and no gradient either."""
    padding = PADDING.clone()
    padding[0] = False
    given = [3 * torch.randn(SHAPE, dtype=dtype) for _ in range(3)]
    given = [x.requires_grad_() for x in (given[0][:, :, offset:], given[1][:, :2], given[2][:, :2])]
    for sinks in (None, torch.randn(4, dtype=dtype)):
        options = {"key_padding_mask": padding, "causal": True, "softcap": 2.0, "sinks": sinks}
        found = dense_attention(*given, query_offset=offset, **options)
        wide = [x.detach().double().requires_grad_() for x in given]
        everything = torch.ones(1, 1, dtype=torch.bool)
        truth = attention(*wide, everything, 16, query_offset=offset or 0, **options)
        near = (1e-12, 1e-12) if dtype == torch.float64 else (2e-2, 5e-2)
        torch.testing.assert_close(found.double(), truth, rtol=near[0], atol=near[1])
        grads = [torch.autograd.grad(x.sin().sum(), leaves) for x, leaves in ((found, given), (truth, wide))]
        for ours, exact in zip(*grads, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=near[0], atol=10 * near[1])
    with pytest.raises(TypeError, match="softcap is None; it has to be a Python number"):
        dense_attention(*given, softcap=None)
