"""The same bits again and again; `python -m tests.fuzz --races --seconds 600` repeats each variant more often."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from ds_sparse.dispatch import IMPLEMENTATIONS, forced_implementation
from fuzz import races
from fuzz.races import Variant

REPEATS = {"cpu": 3, "cuda": 6}
"""Of each variant."""


def tried(device: str) -> list[Variant]:
    """On the CPU, whose threads share kernels among blocks and head sizes, the first of each operation and dtype."""
    found = races.variants(device)
    if device == "cuda":
        return found
    return list({(v.operation, v.dtype, v.block >= 64): v for v in reversed(found)}.values())


def test_each_variant_gives_the_same_bits_while_memory_is_busy(device: str):
    with races.busy_memory(device) as busy:
        wrong = [races.check(variant, device, 1, REPEATS[device], busy) for variant in tried(device)]
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert not forced_implementation(), "left behind for other tests"


def test_every_implementation_has_its_variants():
    named = {i.name for those in IMPLEMENTATIONS.values() for i in those if i.device == "cpu"}
    found = races.variants("cpu")
    assert {v.implementation for v in found} == named
    assert {v.operation for v in found} == races.OPERATIONS.keys()
    for operation, names in races.CHOSEN_BY.items():
        own = [v for v in found if v.operation == operation]
        for implementation in (i for i in IMPLEMENTATIONS[names] if i.device == "cpu"):
            assert {v.dtype for v in own} == set(implementation.dtypes)
            assert implementation.tiles is None or {v.block for v in own} == set(implementation.tiles)


def test_a_bit_that_differs_once_is_found():
    calls = count()

    def run() -> list[torch.Tensor]:
        return [torch.ones(4), torch.tensor([1.0, 1.0 + 2.0**-23 * (next(calls) == 2)])]

    assert "differs in 1 of 2 numbers of result 1" in races.differing(run, "cpu", 5, lambda: None)


def test_what_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> races.Run:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(races, "call_of", fails)
    variant = races.variants("cpu")[0]
    said = races.check(variant, "cpu", 3, 2, lambda: None)
    assert said == f"FAILED {variant}, seed 3: RuntimeError: no kernel image"
