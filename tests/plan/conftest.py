from __future__ import annotations

import pytest

from ds_sparse.plan.committed import committed_rates
from ds_sparse.plan.rates import Rates
from ds_sparse.plan.results import Results, committed


@pytest.fixture(scope="session")
def results() -> Results:
    """What is committed for an H200."""
    return committed()


@pytest.fixture(scope="session")
def rates() -> Rates:
    """Those of an H200, as they are committed."""
    return committed_rates()
