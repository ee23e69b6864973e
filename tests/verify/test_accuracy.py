import pytest
import torch
from helpers import gradients, random, seeded

from ds_sparse import reference
from ds_sparse.verify.accuracy import attention_by_block_rows, require_as_accurate


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
    sums, terms = attention_by_block_rows(query, key, value, grad, layout, block)
    for ours, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(ours, right[0, 0])
    assert (terms[0] >= sums[0].abs() - 1e-12).all()
    torch.testing.assert_close(terms[0], attention_by_block_rows(query, key, value.abs(), grad, layout, block)[0][0])


def test_sums_from_row_to_row_are_wider_than_half_precision():
    """512 rows that add 1 each: in bf16 the sum would stay at 256."""
    query, key, grad = torch.zeros(512, 8), torch.zeros(1, 8), torch.ones(512, 8)
    layout = torch.ones(512, 1, dtype=torch.bool)
    sums, _ = attention_by_block_rows(*(x.bfloat16() for x in (query, key, key, grad)), layout, block=1)
    assert (sums[3] == 512).all()


def test_a_mistake_in_one_part_is_not_lost_among_the_others():
    exact = random(seeded(), 64, 1000)
    plain, ours = exact.float(), exact.float()
    require_as_accurate("output", ours, plain, exact, parts=64)
    ours[7] *= 1 + 1e-5
    require_as_accurate("output", ours, plain + 1e-6, exact)
    with pytest.raises(ArithmeticError, match=r"output, part 8 of 64, has an RMS error"):
        require_as_accurate("output", ours, plain, exact, parts=64)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(value):
    exact = random(seeded(), 4, 8)
    ours = exact.float()
    ours[3, 3] = value
    with pytest.raises(ArithmeticError, match="part 4 of 4"):
        require_as_accurate("output", ours, exact.float(), exact, parts=4)


def test_sums_whose_terms_cancel_may_round_as_their_terms_do():
    exact = random(seeded(), 4, 8) * 1e-3
    ours = (exact + 4e-8).float()
    with pytest.raises(ArithmeticError, match="RMS error of 4"):
        require_as_accurate("output", ours, exact.float(), exact)
    require_as_accurate("output", ours, exact.float(), exact, terms=torch.ones_like(exact))
    with pytest.raises(ArithmeticError, match="RMS error of 4"):
        require_as_accurate("output", ours, exact.float(), exact, terms=torch.full_like(exact, 0.1))
