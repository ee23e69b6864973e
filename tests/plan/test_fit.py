from __future__ import annotations

import pytest

from ds_sparse.plan.fit import fit, times

ROWS = [[1.0, 10.0, 1.0], [2.0, 10.0, 1.0], [4.0, 30.0, 1.0], [8.0, 10.0, 1.0], [8.0, 50.0, 1.0]]


def test_coefficients_that_made_the_measurements_are_found():
    truth = [2.0, 0.5, 3.0]
    assert fit(ROWS, [times(truth, row) for row in ROWS]) == pytest.approx(truth)


def test_none_is_below_zero():
    found = fit(ROWS, [times([2.0, -0.01, 0.0], row) for row in ROWS])
    assert min(found) == 0 and found[0] == pytest.approx(2, rel=0.1)


def test_errors_are_relative():
    """Of 1 ms and of 1000 ms with the same rate, 10 % more of the small one weigh as 10 % of the large one."""
    assert fit([[1.0], [1000.0]], [1.1, 1000.0]) == pytest.approx(fit([[1.0], [1000.0]], [1.0, 1100.0]))


def test_without_measurements_there_are_no_rates():
    with pytest.raises(ValueError, match="nothing measured"):
        fit([], [])
