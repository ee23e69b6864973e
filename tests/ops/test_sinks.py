"""Attention sinks: what they do to outputs, statistics and gradients, however large they are."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import leaf, random, seeded
from torch.func import grad, vmap

from ds_sparse import WindowIndex, block_sparse_attention, reference, window_attention

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


def test_a_row_with_nothing_but_its_sink_is_zeros_and_its_lse_the_sink(device: str):
    given, sinks = operands(device), leaf(torch.tensor([0.5, -3.0]), device)
    output, lse = block_sparse_attention(*given, LAYOUT, sinks=sinks, return_lse=True)
    assert not output[:, :, 16:32].any()
    torch.testing.assert_close(lse[:, :, 16:32], sinks[:, None].expand(2, 2, 16))
    of_rows = lse[:, :, 16:32].sum() + (100 * output[:, :, 16:32]).sum()
    *others, of_sinks = torch.autograd.grad(of_rows, [*given, sinks])
    assert not any(x.any() for x in others)
    torch.testing.assert_close(of_sinks, torch.full_like(sinks, 32.0))


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


def test_half_precision_loses_nothing_but_a_rounding(device: str):
    given, sinks = operands(device, torch.bfloat16), leaf(torch.tensor([1.0, 2.0]), device)
    wide = [leaf(x.detach().cpu().double(), "cpu") for x in (*given, sinks)]
    output = block_sparse_attention(*given, LAYOUT, sinks=sinks)
    exact = reference.attention(*wide[:3], LAYOUT, 16, sinks=wide[3])
    torch.testing.assert_close(output.cpu().double(), exact, atol=0.01, rtol=0.01)
    weight = random(seeded(3), *exact.shape)
    found = torch.autograd.grad(output, sinks, weight.to(output))[0]
    expected = torch.autograd.grad(exact, wide[3], weight)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, atol=0.05, rtol=0.02)


def test_under_vmap_the_sinks_alone_may_have_samples(device: str):
    query, key, value = (x.detach() for x in operands(device))
    sinks = random(seeded(1), 3, 2).to(device, torch.float32)

    def loss(sinks):
        return block_sparse_attention(query, key, value, LAYOUT, sinks=sinks).sin().sum()

    torch.testing.assert_close(vmap(loss)(sinks), torch.stack([loss(x) for x in sinks]))
    torch.testing.assert_close(vmap(grad(loss))(sinks), torch.stack([grad(loss)(x) for x in sinks]))


@pytest.mark.parametrize("options", [{}, {"causal": True, "global_tokens": [0, 7]}, {"dilation": 2}], ids=str)
def test_sinks_of_windows(device: str, options: dict):
    given, sinks = operands(device, tokens=37), leaf(torch.tensor([0.5, -1.0]), device)
    output = window_attention(*given, 4, sinks=sinks, **options)
    exact = [leaf(x.detach().cpu().double(), "cpu") for x in (*given, sinks)]
    numbers = {"causal": options.get("causal", False), "global_tokens": tuple(options.get("global_tokens", ()))}
    expected = reference.window_attention(
        *exact[:3], (4,), dilations=(options.get("dilation", 1),), sinks=exact[3], **numbers
    )
    torch.testing.assert_close(output.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    found = torch.autograd.grad(output.sin().sum(), [*given, sinks])
    wanted = torch.autograd.grad(expected.sin().sum(), exact)
    torch.testing.assert_close([x.cpu().double() for x in found], list(wanted), atol=1e-4, rtol=1e-4)


def test_sinks_of_windows_are_compiled(device: str):
    given, sinks = operands(device, tokens=37), leaf(torch.tensor([0.5, -1.0]), device)
    index = WindowIndex.build(37, 4).to(device)

    def run(sinks):
        return window_attention(*given, index, sinks=sinks).sum(-1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(sinks), run(sinks))


def test_sinks_that_do_not_fit_a_window():
    x = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it has to be \(2,\), a logit a head"):
        window_attention(x, x, x, 2, sinks=torch.zeros(3))
