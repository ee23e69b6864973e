"""The reference against arithmetic that is plainer still: Python loops and dense attention."""

from __future__ import annotations

import math

import torch
from helpers import EXAMPLES, Layout, generator, layouts, make_layout, random, seeded
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse import reference


@EXAMPLES
@given(layout=layouts(), extra=st.integers(1, 3), data=st.data())
def test_to_dense_puts_blocks_in_head_row_column_order(layout: Layout, extra: int, data: st.DataObject):
    heads, block = (extra if layout.heads == 1 else layout.heads), 8
    values = random(generator(data.draw), 2, layout.num_values(heads), block, block)
    dense = reference.to_dense(values, layout.given, block, heads)
    expected = torch.zeros(2, heads, layout.rows * block, layout.columns * block, dtype=torch.float64)
    place = 0
    for head in range(heads):
        for i in range(layout.rows):
            for j in range(layout.columns):
                if layout.live[head if layout.heads > 1 else 0, i, j]:
                    expected[:, head, i * block : (i + 1) * block, j * block : (j + 1) * block] = values[:, place]
                    place += 1
    assert torch.equal(dense, expected)
    assert torch.equal(reference.to_sparse(dense, layout.given, block), values)


def test_matmul_modes_are_products_of_dense_matrices():
    rng, layout, block = seeded(), make_layout(torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]])), 8
    a, b = random(rng, 2, 1, 24, 5), random(rng, 2, 1, 5, 24)
    product = reference.matmul(a, b, layout.live, block, "sdd", False, False)
    assert torch.equal(product[:, 1], (a @ b)[:, 0, :8, 16:])
    sparse = reference.to_dense(product, layout.live, block, 1)
    right = random(rng, 2, 1, 24, 5)
    assert torch.equal(reference.matmul(product, right, layout.live, block, "dsd", True, False), sparse.mT @ right)
    assert torch.equal(reference.matmul(right, product, layout.live, block, "dds", True, True), right.mT @ sparse.mT)


def test_softmax_row_by_hand():
    scores = torch.tensor([1.0, 2.0, -1.0, 0.5, 3.0, 0.0, 1.5, -2.0], dtype=torch.float64).expand(1, 1, 8, 8)
    bias = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(1, 1, 8, 8)
    keep = torch.arange(8)[None] != 3
    probs = reference.softmax(
        scores, torch.ones(1, 1, dtype=torch.bool), 8, 1, scale=0.5, rpe=bias, key_padding_mask=keep, causal=True
    )
    for t in range(8):
        weights = [
            math.exp(0.5 * scores[0, 0, t, s] + bias[0, 0, t, s]) if s <= t and s != 3 else 0.0 for s in range(8)
        ]
        expected = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        torch.testing.assert_close(probs[0, 0, t], expected, rtol=1e-14, atol=0)


def test_softmax_rows_with_nothing_left_are_zeros_and_so_are_their_gradients():
    scores = random(seeded(), 1, 2, 8, 8).requires_grad_()
    with torch.no_grad():
        scores[0, 0, 1] = -math.inf
    mask = torch.zeros(8, 16, dtype=torch.float64)
    mask[2] = -math.inf
    probs = reference.softmax(scores, torch.ones(1, 2, dtype=torch.bool), 8, 1, attn_mask=mask)
    row_sums = probs.sum((0, 1, 3))
    assert row_sums[2] == 0
    (grad,) = torch.autograd.grad(probs.square().sum(), scores)
    assert torch.isfinite(probs).all() and torch.isfinite(grad).all()
    assert not grad[:, :, 2].any()
    torch.testing.assert_close(row_sums[[0, 1, 3]], torch.ones(3, dtype=torch.float64))


def test_softmax_of_scores_that_are_minus_infinity_throughout_is_zero():
    scores = torch.full((1, 1, 8, 8), -math.inf, dtype=torch.float64)
    assert not reference.softmax(scores, torch.ones(1, 1, dtype=torch.bool), 8, 1).any()


def test_attention_on_a_full_layout_is_dense_attention():
    rng = seeded()
    query, key, value = (random(rng, 2, 3, 16, 4) for _ in range(3))
    ours = reference.attention(query, key, value, torch.ones(2, 2, dtype=torch.bool), 8, scale=0.5, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
