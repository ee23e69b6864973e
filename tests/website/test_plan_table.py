from __future__ import annotations

import plan_table
import pytest

from benchmarks.plan.committed import committed, committed_rates, training_steps, written
from ds_sparse.plan.rates import FILE


@pytest.fixture(scope="module")
def made():
    results, steps = committed(), training_steps()
    return results, steps, committed_rates(results, steps)


def close(text, other):
    """Equal but for the last digits, in which machines differ."""
    words, others = text.split(), other.split()
    assert len(words) == len(others)
    return all(
        a == b or float(a.strip(",")) == pytest.approx(float(b.strip(",")), rel=1e-3) for a, b in zip(words, others)
    )


def test_committed_rates_are_those_of_the_results(made):
    assert close(FILE.read_text(), written(made[2])), "run website/plan_table.py"


@pytest.mark.slow("plans every measured step")
def test_the_table_is_that_of_the_results(made):
    page = plan_table.PAGE.read_text()
    assert plan_table.with_table(page, *made) == page, "run website/plan_table.py"
