"""The reference against arithmetic that is plainer still: Python loops and dense attention."""

from __future__ import annotations

import itertools
import math

import pytest
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


def test_attention_by_hand():
    """Short last blocks, heads that share keys, another layout for each head: token by token."""
    rng, block, tokens, keys = seeded(), 8, 13, 19
    query, key, value = random(rng, 2, 4, tokens, 3), random(rng, 2, 2, keys, 3), random(rng, 2, 2, keys, 3)
    layout = torch.rand(4, 2, 3, generator=rng) < 0.5
    bias, keep = random(rng, 1, 4, tokens, keys), torch.rand(2, keys, generator=rng) < 0.7
    output, lse = reference.attention(
        query, key, value, layout, block, rpe=bias, key_padding_mask=keep, causal=True, return_lse=True
    )
    for b, h, i in itertools.product(range(2), range(4), range(tokens)):
        seen = [j for j in range(keys) if j <= i and keep[b, j] and layout[h, i // block, j // block]]
        scores = [(query[b, h, i] @ key[b, h // 2, j] / math.sqrt(3) + bias[0, h, i, j]).item() for j in seen]
        total = math.fsum(map(math.exp, scores))
        expected = sum((math.exp(s) / total * value[b, h // 2, j] for s, j in zip(scores, seen)), torch.zeros(3))
        torch.testing.assert_close(output[b, h, i], expected.double(), rtol=1e-12, atol=1e-14)
        assert lse[b, h, i].item() == pytest.approx(math.log(total) if seen else -math.inf, rel=1e-12)


def test_attention_of_rows_with_nothing_left_has_zero_gradients():
    query, key, value = (random(seeded(n), 1, 1, 16, 4).requires_grad_() for n in range(3))
    layout = torch.tensor([[1, 0], [0, 0]], dtype=torch.bool)
    output, lse = reference.attention(query, key, value, layout, 8, return_lse=True)
    assert not output[:, :, 8:].any() and (lse[:, :, 8:] == -math.inf).all()
    for x in torch.autograd.grad((output.sum(), lse.sum()), (query, key, value)):
        assert torch.isfinite(x).all() and x[:, :, :8].any() and not x[:, :, 8:].any()


def test_lse_is_in_float32_or_wider():
    query = random(seeded(), 1, 1, 8, 4)
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = query.to(dtype)
        output, lse = reference.attention(x, x, x, torch.ones(1, 1, dtype=torch.bool), 8, return_lse=True)
        assert (output.dtype, lse.dtype) == (dtype, wide)


def test_window_products_by_hand():
    rng, tokens = seeded(), 7
    for window in (0, 2, 9):
        a, b = random(rng, 2, tokens, 3), random(rng, 2, 3, tokens)
        p, v = random(rng, 2, tokens, 2 * window + 1), random(rng, 2, tokens, 3)
        scores, output = torch.zeros_like(p), torch.zeros_like(v)
        for n, i, j in itertools.product(range(2), range(tokens), range(2 * window + 1)):
            column = i + j - window
            if 0 <= column < tokens:
                scores[n, i, j] = a[n, i] @ b[n, :, column]
                output[n, i] += p[n, i, j] * v[n, column]
        torch.testing.assert_close(reference.window_matmul(a, b, window), scores, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(reference.unwindow_matmul(p, v, window), output, rtol=1e-12, atol=1e-14)


def test_window_softmax_by_hand():
    rng, tokens, windows = seeded(), 7, (1, 3)
    scores, keep = random(rng, 2, 2, tokens, 7), torch.rand(2, tokens, generator=rng) < 0.6
    for causal, mask in itertools.product((False, True), (keep, random(rng, 1, tokens))):
        probs = reference.window_softmax(scores, windows, 0.5, causal, mask)
        for b, h, i in itertools.product(range(2), range(2), range(tokens)):
            weights = torch.zeros(7, dtype=torch.float64)
            for j in range(-windows[h], (0 if causal else windows[h]) + 1):
                if 0 <= i + j < tokens and (mask.dtype != torch.bool or mask[b, i + j]):
                    added = 0 if mask.dtype == torch.bool else mask[0, i + j]
                    weights[j + 3] = math.exp(0.5 * scores[b, h, i, j + 3] + added)
            expected = weights / weights.sum() if weights.any() else weights
            torch.testing.assert_close(probs[b, h, i], expected, rtol=1e-12, atol=1e-14)


def test_window_mask_by_hand():
    tokens, windows, dilations, global_tokens = 9, (1, 2), (3, 2), (4, 0)
    for causal in (False, True):
        mask = reference.window_mask(tokens, windows, causal, global_tokens, dilations)
        for h, i in itertools.product(range(2), range(tokens)):
            seen = {i + k * dilations[h] for k in range(-windows[h], windows[h] + 1)} | set(global_tokens)
            seen = set(range(tokens)) if i in global_tokens else seen & set(range(tokens))
            assert set(mask[h, i].nonzero().flatten().tolist()) == {j for j in seen if j <= i or not causal}


def test_window_attention_is_attention_with_its_mask():
    query, key, value = (random(seeded(n), 2, 2, 20, 4) for n in range(3))
    mask = reference.window_mask(20, (3, 5), True, (7,), (1, 2))
    ours = reference.window_attention(query, key, value, (3, 5), True, None, (7,), (1, 2), scale=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def philox(seed: int, counter: list[int]) -> list[int]:
    """Philox4x32 with 7 rounds in Python's integers."""
    low, key = 2**32 - 1, [seed % 2**32, seed >> 32]
    for _ in range(7):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & low, (a >> 32) ^ counter[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 0.7, 1 - 2**-17])
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (0x0123456789ABCDEF, 2**61 + 5), (2**62 - 1, 2**32 - 1)])
def test_dropout_keeps_what_philox_says(seed: int, offset: int, dropout_p: float):
    batch, heads, tokens, keys = 2, 3, 19, 37
    keep = reference.dropout_keep(seed, offset, batch, heads, tokens, keys, dropout_p)
    assert keep.shape == (batch, heads, tokens, keys) and keep.dtype == torch.bool
    threshold = min(int(dropout_p * 32768 + 0.5), 32767)
    for b, h, i, j in itertools.product(range(batch), range(heads), range(0, tokens, 3), range(0, keys, 2)):
        counter = [j // 16 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, b * heads + h, offset % 2**32]
        element = j % 2 + 2 * (i % 16 // 8) + 4 * (j % 16 // 8)
        number = philox(seed, counter)[element // 2] >> 16 * (element % 2) & 0x7FFF
        assert keep[b, h, i, j] == (number >= threshold)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout_is_even_and_independent(dropout_p: float):
    """Rates of whole, rows, columns and places in a 16 x 16 square; and no pair of neighbours, heads, calls agrees more
    often than chance has it."""
    masks = torch.stack([reference.dropout_keep(12345, call, 2, 3, 256, 256, dropout_p) for call in (0, 1)]).double()
    deviation = (masks - (1 - dropout_p)) / math.sqrt(dropout_p * (1 - dropout_p))

    def within(x: torch.Tensor, averaged: int) -> None:
        assert x.abs().max() * math.sqrt(averaged) < 5

    within(deviation.mean(), deviation.numel())
    for dim in (3, 4):
        within(deviation.mean(dim), 256)
    squares = deviation.unflatten(4, (16, 16)).unflatten(3, (16, 16))
    within(squares.mean((0, 1, 2, 3, 5)), 2 * 6 * 256)
    for dim, shifts in ((0, (1,)), (1, (1,)), (2, (1,)), (3, (1, 2, 8, 16)), (4, (1, 2, 8, 16))):
        for shift in shifts:
            size = deviation.shape[dim] - shift
            products = deviation.narrow(dim, 0, size) * deviation.narrow(dim, shift, size)
            within(products.mean(), products.numel())


def test_attention_drops_after_the_softmax():
    query, key, value = (random(seeded(n), 2, 2, 24, 4) for n in range(3))
    layout = torch.ones(3, 3, dtype=torch.bool)
    everything = torch.eye(24, dtype=torch.float64).expand(2, 2, -1, -1)
    probs = reference.attention(query, key, everything, layout, 8)
    keep = reference.dropout_keep(3, 4, 2, 2, 24, 24, 0.5)
    output, lse = reference.attention(query, key, value, layout, 8, dropout_p=0.5, dropout_seed=(3, 4), return_lse=True)
    torch.testing.assert_close(output, (probs * keep * 2) @ value)
    assert torch.equal(lse, reference.attention(query, key, value, layout, 8, return_lse=True)[1])


@pytest.mark.parametrize("causal", [False, True])
def test_selected_attention_by_hand(causal: bool):
    rng = seeded()
    query, key, value = random(rng, 2, 4, 6, 3), random(rng, 2, 2, 9, 3), random(rng, 2, 2, 9, 3)
    chosen, offset, sinks = torch.randint(-1, 4, (1, 2, 6, 2), generator=rng), torch.tensor([3, 1]), random(rng, 4)
    output, lse = reference.selected_attention(
        query, key, value, chosen, 3, causal, 0.7, sinks, query_offset=offset, return_lse=True
    )
    for b, h, t in itertools.product(range(2), range(4), range(6)):
        blocks = set(chosen[0, h // 2, t].tolist())
        seen = [s for s in range(9) if s // 3 in blocks and (not causal or s <= offset[b] + t)]
        weights = [math.exp(0.7 * query[b, h, t] @ key[b, h // 2, s]) for s in seen]
        total = sum(weights) + math.exp(sinks[h])
        expected = sum((w * value[b, h // 2, s] / total for w, s in zip(weights, seen)), torch.zeros(3).double())
        torch.testing.assert_close(output[b, h, t], expected)
        assert math.isclose(lse[b, h, t], math.log(total))


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention over what is seen, as PyTorch has it; zeros where nothing is."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return torch.where(seen.any(-1, keepdim=True), output, 0)


def test_blocks_are_chosen_by_hand():
    query, key = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1), torch.tensor([1.0, 2, 9, -6, 3]).reshape(1, 1, 5, 1)
    # means 1.5, 1.5 and 3; maxima of products 2, 9, 3 and -1, 6, -3
    assert reference.select_blocks(query, key, 2, 3).tolist() == [[[[2, 0, 1], [0, 1, 2]]]]
    assert reference.select_blocks(query, key, 2, 3, "max").tolist() == [[[[1, 2, 0], [1, 0, 2]]]]
    assert reference.select_blocks(query, key, 2, 2, "max", first=1, local=1).tolist() == [[[[0, 1], [0, 1]]]]
    chosen = reference.select_blocks(query, key, 2, 3, "max", causal=True, query_offset=2)
    assert chosen.tolist() == [[[[1, 0, -1], [1, 0, -1]]]]
    chosen = reference.select_blocks(query, key, 2, 3, causal=True, query_offset=2)
    assert chosen.tolist() == [[[[0, -1, -1], [0, 1, -1]]]]  # block 1 is complete for the second query alone
    # Shares are 1/2 each: block 0 has both strides of the first compressed key, and one of the second.
    compressed = torch.zeros(1, 1, 2, 1)
    chosen = reference.select_blocks_by_compression(query, compressed, 2, 3, length=2, stride=1, keys=5, causal=False)
    assert chosen.tolist() == [[[[0, 1, -1], [0, 1, -1]]]]


def test_moba_of_all_blocks_is_dense():
    rng = seeded()
    query, key, value = random(rng, 2, 4, 50, 8), random(rng, 2, 2, 50, 8), random(rng, 2, 2, 50, 8)
    causal = torch.ones(50, 50, dtype=torch.bool).tril()
    torch.testing.assert_close(reference.moba(query, key, value, 16, 4), dense(query, key, value, causal))
    own = causal & (torch.arange(50)[:, None] // 16 == torch.arange(50) // 16)
    torch.testing.assert_close(reference.moba(query, key, value, 16, 1), dense(query, key, value, own))


def test_nsa_is_the_sum_of_its_branches():
    rng, position = seeded(), torch.arange(50)[:, None]
    query, key, value, near_key, near_value = (random(rng, 2, heads, 50, 8) for heads in (4, 2, 2, 2, 2))
    of_keys, of_values = random(rng, 2, 2, 11, 8), random(rng, 2, 2, 11, 8)
    gates = torch.rand(2, 4, 50, 3, generator=rng, dtype=torch.float64)
    found = reference.nsa(
        query, key, value, of_keys, of_values, near_key, near_value, gates, 16, 4, length=8, stride=4, window=7
    )
    complete = torch.arange(11) * 4 + 7 <= position
    near = (torch.arange(50) <= position) & (torch.arange(50) > position - 7)
    branches = (
        dense(query, of_keys, of_values, complete),
        dense(query, key, value, torch.ones(50, 50, dtype=torch.bool).tril()),  # 4 blocks are all
        dense(query, near_key, near_value, near),
    )
    torch.testing.assert_close(found, sum(gates[..., i : i + 1] * x for i, x in enumerate(branches)))


def test_an_indexer_learns_by_its_loss():
    rng = seeded()
    query, key, value = (random(rng, 1, 2, 40, 8).requires_grad_() for _ in range(3))
    index_query, index_key = (random(rng, 1, heads, 40, 8).requires_grad_() for heads in (2, 1))
    output, loss = reference.msa(query, key, value, index_query, index_key, 8, 2)
    assert loss > 0 and torch.autograd.grad(output.sum(), index_query, retain_graph=True, allow_unused=True) == (None,)
    of_index = torch.autograd.grad(loss, (index_query, index_key), retain_graph=True)
    assert all(x.any() for x in of_index)
    assert torch.autograd.grad(loss, (query, key), allow_unused=True) == (None, None)
    step = [x - 0.1 * g for x, g in zip((index_query, index_key), of_index, strict=True)]
    chosen = reference.select_blocks(index_query, index_key, 8, 2, "max", causal=True, local=1)
    assert torch.equal(chosen, reference.select_blocks(*step, 8, 2, "max", causal=True, local=1))
    assert reference.msa(query, key, value, *step, 8, 2)[1] < loss
    _, loss = reference.msa(query, key, value, query, key, 8, 2)  # the teacher itself
    assert abs(loss) < 1e-12
