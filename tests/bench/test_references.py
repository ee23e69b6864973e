"""Exact results of attention, which peers are held to."""

import torch
from helpers import gradients, random, seeded

from ds_sparse import reference
from ds_sparse.bench.references import attention_by_pieces, block_rows, documents, group_by_pieces


def by_block_rows(query, key, value, grad, layout, block):
    return attention_by_pieces([query, key, value, grad], block_rows(layout, block, query.device))


def test_block_rows_give_what_the_reference_gives():
    block, rng = 16, seeded()
    layout = torch.rand(5, 7, generator=rng) < 0.4
    layout[2] = False
    layout[:, 3] = False
    query, grad = random(rng, 5 * block, 8), random(rng, 5 * block, 8)
    key, value = random(rng, 7 * block, 8), random(rng, 7 * block, 8)
    leaves = [x[None, None].clone().requires_grad_() for x in (query, key, value)]
    output = reference.attention(*leaves, layout, block, scale=8**-0.5)
    expected = [output, *gradients(output, leaves, grad[None, None])]
    sums, terms = by_block_rows(query, key, value, grad, layout, block)
    for ours, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours, right[0, 0])
    assert (terms[0] >= sums[0].abs() - 1e-12).all()
    torch.testing.assert_close(terms[0], by_block_rows(query, key, value.abs(), grad, layout, block)[0][0])


def test_sums_from_row_to_row_are_wider_than_half_precision():
    """512 rows that add 1 each: in bf16 the sum would stay at 256."""
    query, key, grad = torch.zeros(512, 8), torch.zeros(1, 8), torch.ones(512, 8)
    layout = torch.ones(512, 1, dtype=torch.bool)
    sums, _ = by_block_rows(*(x.bfloat16() for x in (query, key, key, grad)), layout, 1)
    assert (sums[3] == 512).all()


def test_documents_see_what_their_mask_lets_them():
    lengths, rng = [5, 1, 7], seeded()
    tensors = [random(rng, 13, 8) for _ in range(4)]
    sums, _ = attention_by_pieces(tensors, documents(lengths, lambda n: torch.ones(n, n, dtype=torch.bool).tril()))
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    query, key, value = leaves
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    output = (query @ key.T * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ value
    for ours, right in zip(sums, [output, *gradients(output, leaves, tensors[3])], strict=True):
        torch.testing.assert_close(ours, right)


def test_heads_that_share_a_key_head_add_their_gradients():
    rng, heads = seeded(), 3
    query, grad = random(rng, heads, 13, 8), random(rng, heads, 13, 8)
    key, value = random(rng, 1, 13, 8), random(rng, 1, 13, 8)
    live = torch.ones(13, 13, dtype=torch.bool).tril()
    sums, terms = group_by_pieces([query, key, value, grad], lambda: documents([13], lambda n: live))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    for ours, right in zip(sums, [output, *gradients(output, leaves, grad)], strict=True):
        torch.testing.assert_close(ours, right.flatten(0, 1))
    assert all((size >= total.abs() - 1e-12).all() for size, total in zip(terms, sums, strict=True))
