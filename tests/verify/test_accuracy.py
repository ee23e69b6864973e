import pytest
import torch
from helpers import random, seeded

from ds_sparse.verify.accuracy import require_as_accurate


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
