from __future__ import annotations

import plan_table
import pytest

from ds_sparse.plan.committed import FILE, written
from ds_sparse.plan.results import committed
from ds_sparse.plan.training import complete_rates


@pytest.fixture(scope="module")
def made():
    results = committed()
    return results, complete_rates(results)


def close(text, other):
    """Equal but for the last digits, in which machines differ."""
    words, others = text.split(), other.split()
    assert len(words) == len(others)
    return all(
        a == b or float(a.strip(",")) == pytest.approx(float(b.strip(",")), rel=1e-3) for a, b in zip(words, others)
    )


def test_committed_rates_are_those_of_the_results(made):
    assert close(FILE.read_text(), written(made[1])), "run website/plan_table.py"


@pytest.mark.slow("plans every measured step")
def test_the_table_is_that_of_the_results(made):
    page = plan_table.PAGE.read_text()
    assert plan_table.with_table(page, *made) == page, "run website/plan_table.py"
