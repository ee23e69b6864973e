from __future__ import annotations

import pytest

from ds_sparse.ops import missing_kernels


@pytest.fixture(scope="module")
def device(device: str, request: pytest.FixtureRequest) -> str:
    """Each device that has kernels for the OPERATORS of the module under test."""
    missing = missing_kernels(device, request.module.OPERATORS)
    if missing:
        pytest.skip(f"no {device} kernel here for {', '.join(missing)}")
    return device
