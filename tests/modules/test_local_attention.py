"""LocalAttention against a softmax over the tokens in the window."""

import pytest
import torch

from ds_sparse.modules.local_attention import LocalAttention


def test_tokens_see_the_window_but_no_padding():
    query, key, value = (torch.randn(2, 4, 30, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keep = torch.arange(30) < torch.tensor([[30], [20]])
    output = LocalAttention(5)(query, key, value, scale=0.3, key_padding_mask=keep)
    place = torch.arange(30)
    seen = ((place[:, None] - place).abs() <= 5) & keep[:, None, None]
    scores = (0.3 * query @ key.mT).masked_fill(~seen, float("-inf"))
    truth = torch.softmax(scores, -1).nan_to_num() @ value
    rows = keep[:, None, :, None]
    torch.testing.assert_close(output * rows, truth * rows)
    ours, theirs = (torch.autograd.grad((x * rows).square().sum(), (query, key, value)) for x in (output, truth))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.nan_to_num())


def test_the_last_queries_of_a_causal_layer_see_the_window_before_them():
    query, key, value = (torch.randn(1, 2, 30, 8, dtype=torch.float64) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64)
    place = torch.arange(30)
    away = place[:, None] - place
    scores = (8**-0.5 * query @ key.mT).masked_fill((away < 0) | (away > 5), float("-inf"))
    with_sinks = torch.cat([scores, sinks[:, None, None].expand(1, 2, 30, 1)], -1)
    truth = torch.softmax(with_sinks, -1)[..., :30] @ value
    attention = LocalAttention(5)
    torch.testing.assert_close(attention(query, key, value, causal=True, sinks=sinks), truth)
    last = attention(query[:, :, 27:], key, value, causal=True, sinks=sinks, query_offset=27)
    torch.testing.assert_close(last, truth[:, :, 27:])


@pytest.mark.parametrize(
    "more", [*({name: torch.zeros(1)} for name in ("rpe", "distance_bias", "attn_mask")), {"dropout_p": 0.1}]
)
def test_what_a_window_does_not_compute_is_an_error(more):
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match=f"window of 5 tokens is given {next(iter(more))}"):
        LocalAttention(5)(x, x, x, **more)
