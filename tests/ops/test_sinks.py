"""Attention sinks: what they do to outputs, statistics and gradients, however large they are."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import leaf, random, seeded
from torch.func import grad, vmap

from ds_sparse import block_sparse_attention, window_attention

OPERATORS = ("block_attention_forward", "window_attention_forward")

LAYOUT = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)


def operands(device: str, dtype: torch.dtype = torch.float32, tokens: int = 48) -> list[torch.Tensor]:
    return [leaf(x, device) for x in random(seeded(), 3, 2, 2, tokens, 16, dtype=dtype)]


def test_a_sink_of_minus_infinity_is_none(device: str):
    given = operands(device)
    none = leaf(torch.full((2,), -math.inf), device)
    results = block_sparse_attention(*given, LAYOUT, sinks=none, return_lse=True)
    expected = block_sparse_attention(*given, LAYOUT, return_lse=True)
    torch.testing.assert_close(results, expected)
    grads = torch.autograd.grad(results[0].sin().sum(), [*given, none])
    torch.testing.assert_close(grads[:3], torch.autograd.grad(expected[0].sin().sum(), given))
    assert not grads[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [90.0, 1e4, -1e4])
def test_sinks_far_from_all_scores_stay_finite(device: str, size: float, dtype: torch.dtype):
    """Exponentials of their distance are beyond float32."""
    given, sinks = operands(device, dtype), leaf(torch.tensor([size, 0.0]), device)
    output, lse = block_sparse_attention(*given, LAYOUT, sinks=sinks, return_lse=True)
    grads = torch.autograd.grad((output.float() ** 2).sum() + lse.sum(), [*given, sinks])
    assert all(torch.isfinite(x).all() for x in (output, lse, *grads))
    without = block_sparse_attention(*given, LAYOUT)
    torch.testing.assert_close(output[:, 0], torch.zeros_like(output[:, 0]) if size > 0 else without[:, 0])


def test_under_vmap_the_sinks_alone_may_have_samples(device: str):
    query, key, value = (x.detach() for x in operands(device))
    sinks = random(seeded(1), 3, 2).to(device, torch.float32)

    def loss(sinks):
        return block_sparse_attention(query, key, value, LAYOUT, sinks=sinks).sin().sum()

    torch.testing.assert_close(vmap(loss)(sinks), torch.stack([loss(x) for x in sinks]))
    torch.testing.assert_close(vmap(grad(loss))(sinks), torch.stack([grad(loss)(x) for x in sinks]))


def test_sinks_that_do_not_fit_a_window():
    x = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it has to be \(2,\), a logit a head"):
        window_attention(x, x, x, 2, sinks=torch.zeros(3))
