from __future__ import annotations

import pytest

from ds_sparse.ops import missing_kernels


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow_on_cpu(reason): slow, but on a GPU")


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("slow_on_cpu"):
        if item.callspec.params.get("device", "cpu") == "cpu":
            item.add_marker(pytest.mark.slow(*mark.args))


@pytest.fixture(scope="module")
def device(device: str, request: pytest.FixtureRequest) -> str:
    """Each device that has kernels for the OPERATORS of the module under test."""
    missing = missing_kernels(device, request.module.OPERATORS)
    if missing:
        pytest.skip(f"no {device} kernel here for {', '.join(missing)}")
    return device
