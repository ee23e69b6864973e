from __future__ import annotations

import pytest

from ds_sparse.plan.rates import Rates, committed_rates


@pytest.fixture(scope="session")
def rates() -> Rates:
    """The rates of an H200, as they are committed."""
    return committed_rates()
