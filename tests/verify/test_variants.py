from __future__ import annotations

import pytest
import torch
from helpers import as_on_hopper

from ds_sparse.dispatch import IMPLEMENTATIONS
from ds_sparse.verify.cases import CASES
from ds_sparse.verify.variants import CHOSEN_BY, variants

CPU = torch.device("cpu")


def test_every_implementation_has_its_variants():
    named = {i.name for those in IMPLEMENTATIONS.values() for i in those if i.device == "cpu"}
    found = variants(CPU)
    assert {v.implementation for v in found} == named
    assert {v.operation for v in found} == CASES.keys()
    for operation, names in CHOSEN_BY.items():
        own = [v for v in found if v.operation == operation]
        for implementation in (i for i in IMPLEMENTATIONS[names] if i.device == "cpu"):
            assert {v.dtype for v in own} == set(implementation.dtypes)
            assert implementation.tiles is None or {v.block for v in own} == set(implementation.tiles)


def test_a_hopper_gpu_has_its_own_kernels_and_the_portable_ones():
    with as_on_hopper():
        found = variants(torch.device("cuda"))
    families = {v.family for v in found}
    for operation in CHOSEN_BY:
        assert {f"{operation}, hopper", f"{operation}, portable"} <= families
    assert {v.deterministic for v in found if v.family == "block_sparse_attention, hopper"} == {True, False}
    assert not any(v.dtype == torch.float64 for v in found if "window" in v.operation)


@pytest.mark.parametrize("operation", CASES)
def test_a_name_says_which_kernel_it_is(operation):
    variant = next(v for v in variants(CPU) if v.operation == operation)
    assert str(variant).startswith(f"{operation}, cpu, block {variant.block}, head size ")
