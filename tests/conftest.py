from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that kernels are written for; skipped with the reason where it is not there."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    return request.param


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes that a test registers are gone after it."""
    from ds_sparse.sparsity import _registry

    monkeypatch.setattr(_registry, "_classes", dict(_registry._classes))
