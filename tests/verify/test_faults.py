"""What surrounds the call of a variant."""

import torch

from ds_sparse.ops import token
from ds_sparse.verify.faults import verify
from ds_sparse.verify.variants import variants

CPU = torch.device("cpu")


def test_memory_that_a_kernel_forgets_holds_nan_while_a_variant_runs(monkeypatch):
    variant = next(x for x in variants(CPU) if x.operation == "sparse_matmul")
    right, forgotten = token.ops.token_matmul_sdd, []

    class Ops:
        def __getattr__(self, name):
            return getattr(ops, name)

        def token_matmul_sdd(self, *call):
            forgotten.append(bool(torch.empty(64).isnan().all()))
            return right(*call)

    ops = token.ops
    monkeypatch.setattr(token, "ops", Ops())
    (outcome,) = verify([variant], CPU, seed=1, repeats=2)
    assert outcome.wrong == "" and outcome.seconds > 0
    assert len(forgotten) >= 3 and all(forgotten[1:])  # the first call is for shapes alone
    assert not torch.are_deterministic_algorithms_enabled()
