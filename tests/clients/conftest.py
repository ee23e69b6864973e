from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def old_imports() -> None:
    """`deepspeed.ops.sparse_attention` is there, as under `ds_sparse run`."""
    import ds_sparse.integrations.deepspeed_ops  # noqa: F401


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """The ranks that `initialize` sets where no launcher did are not those of later tests' processes."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
