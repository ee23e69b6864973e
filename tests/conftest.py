from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("slow"):
        if len(mark.args) != 1 or not isinstance(mark.args[0], str):
            raise pytest.UsageError(f"{item.nodeid} is marked slow; say why, as in slow('trains for a minute')")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes share the GPU


@pytest.fixture(scope="session")
def one_rank() -> None:
    """A process group of this process alone, which stays: DeepSpeed keeps groups of the one that it found first."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


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


@pytest.fixture
def without_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench has the operations of the installed package alone, whatever tests of benchmarks added to this
    process."""
    from ds_sparse.bench import IN_A_CLONE, OPERATIONS

    for name in IN_A_CLONE:
        monkeypatch.delitem(OPERATIONS, name, raising=False)
