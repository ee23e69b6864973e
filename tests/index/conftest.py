from __future__ import annotations

from unittest import mock

import pytest

from ds_sparse.index import cache


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Says, as often as it is asked, whether a CUDA graph is captured; what is kept for one goes with the test."""
    monkeypatch.setattr(cache, "captured", set())
    captures = mock.Mock(return_value=True)
    monkeypatch.setattr(cache, "is_capturing", captures)
    return captures
