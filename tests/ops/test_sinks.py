"""Attention sinks: what they do to outputs, statistics and gradients, however large they are."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import leaf, random, seeded
from torch.func import grad, vmap

from ds_sparse import block_sparse_attention, selected_attention, window_attention
from ds_sparse._ops import ops

OPERATORS = ("block_attention_forward", "window_attention_forward", "attention_sinks_forward")

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


BLOCKS_OF_ROWS = torch.tensor([[0, 2], [-1, -1], [1, 0]]).repeat_interleave(16, 0)[None, None]
"""The blocks of `LAYOUT`, for each token."""

CALLS = {
    "blocks": lambda *given, **more: block_sparse_attention(*given, LAYOUT, **more),
    "chosen": lambda *given, **more: selected_attention(*given, BLOCKS_OF_ROWS.to(given[0].device), 16, **more),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("batch", [2, 0])
def test_the_gradient_of_a_plain_sum_and_that_of_no_sequence(batch: int, with_lse: bool, call, device: str):
    """A sum's is one number that is expanded: all its strides are 0."""
    query, key, value, sinks = *random(seeded(), 3, batch, 4, 48, 16, dtype=torch.float32), torch.linspace(-1, 1, 4)
    given = [leaf(x, device) for x in (query, key[:, :2], value[:, :2], sinks)]
    output, lse = call(*given[:3], sinks=given[3], return_lse=True)
    assert output.shape == (batch, 4, 48, 16)
    grads = torch.autograd.grad(output.sum() + lse.sum() if with_lse else output.sum(), given)

    exact = [leaf(x.detach().cpu().double(), "cpu") for x in given]
    query, key, value, sinks = exact[0], *(x.repeat_interleave(2, 1) for x in exact[1:3]), exact[3]
    mask = LAYOUT.repeat_interleave(16, 0).repeat_interleave(16, 1)
    scores = (query @ key.mT / 4).masked_fill(~mask, -math.inf)
    scores = torch.cat([scores, sinks[:, None, None].expand(batch, 4, 48, 1)], -1)
    result = (scores.softmax(-1)[..., :-1] @ value).sum()
    result = result + scores.logsumexp(-1).sum() if with_lse else result
    for found, wanted in zip(grads, torch.autograd.grad(result, exact), strict=True):
        torch.testing.assert_close(found.cpu(), wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 37, 16), (1, 2, 130, 7), (2, 2, 33, 16, 24), (1, 3, 40, 2, 64)], ids=str)
def test_rows_of_any_shape_and_order_of_memory(device: str, shape: tuple[int, ...], dtype: torch.dtype):
    """The operators alone, on results as kernels of blocks, pairs and chosen blocks give them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    output, grad = random(seeded(), 2, *shape, dtype=dtype)
    row_max, row_sum, grad_lse = random(seeded(1), 3, *shape[:-1], dtype=wide)
    empty = row_sum < -0.9
    empty[0, 0, 5] = False  # which is no number below
    output, grad = output.masked_fill(empty.unsqueeze(-1), 0), grad.transpose(1, 2).contiguous().transpose(1, 2)
    rows = torch.stack([row_max.masked_fill(empty, -math.inf), (1 + row_sum.abs()).masked_fill(empty, 0)], -1)
    sinks = random(seeded(2), shape[1], *shape[3:-1], dtype=wide)
    sinks.view(-1)[:2] = torch.tensor([-math.inf, 50.0])
    rows[0, 0, 5] = math.nan

    lse = (rows[..., 0] + rows[..., 1].log()).double()
    of_rows = sinks.double()[:, None].expand_as(lse)
    lse_wanted = torch.logaddexp(lse, of_rows)
    wanted = (output * (lse - lse_wanted).exp().unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0).to(dtype)
    for heads_inside in (False, True):
        given = output.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else output
        on_device = [x.to(device) for x in (given, rows, sinks)]
        result, result_lse, with_sinks = (x.cpu() for x in ops.attention_sinks_forward(*on_device))
        torch.testing.assert_close(result, wanted, equal_nan=True)
        torch.testing.assert_close(result_lse, lse_wanted.to(wide), equal_nan=True)
        # What is no number is in one row; 50, as the largest sink is, leaves probabilities below 1.
        of_one = result.masked_fill(result.isnan(), 1), with_sinks.nan_to_num(50.0)
        probability = (of_rows - of_one[1][..., 0] - of_one[1][..., 1].log()).exp()
        probability = probability.where(of_one[1][..., 1] > 0, (of_rows > -math.inf).double())
        expected = (probability * (grad_lse - (grad.double() * of_one[0]).sum(-1))).sum((0, 2))
        in_order = [x.to(device) for x in (grad, grad_lse, *of_one, sinks)]
        torch.testing.assert_close(ops.attention_sinks_backward(*in_order).cpu(), expected.to(wide))


def test_sinks_that_do_not_fit_a_window():
    x = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it has to be \(2,\), a logit a head"):
        window_attention(x, x, x, 2, sinks=torch.zeros(3))
