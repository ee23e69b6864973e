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


@pytest.mark.parametrize("more", [{"rpe": torch.zeros(1)}, {"attn_mask": torch.zeros(1)}, {"dropout_p": 0.1}])
def test_what_a_window_does_not_compute_is_an_error(more):
    x = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match=f"window of 5 tokens is given {next(iter(more))}"):
        LocalAttention(5)(x, x, x, **more)
