"""`ds_sparse verify`: each kernel variant against its meaning in float64, then repeated bit by bit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import force_implementation
from ..tools.torch_settings import cpu_threads, poisoned_memory
from .accuracy import require_as_accurate, results_and_gradients
from .cases import Case, case_of
from .repeats import Busy, busy_memory, differing
from .variants import Variant

LEAST_ERRORS = {torch.float64: 1e-12, torch.float32: 2**-19}
"""Relative errors of results that are allowed at any rate: in float32 some 30 roundings, as sums of 1,000 terms have
one after the other, where PyTorch adds pairwise; in float64 PyTorch's result is the exact one."""

PART = 64
"""Tokens that are judged together. Of fewer, the first of a causal mask have gradients that cancel, and errors as if
they had not."""


class Outcome(NamedTuple):
    """wrong: a sentence of what is wrong; "" if nothing is."""

    variant: Variant
    seed: int
    wrong: str
    seconds: float


def verify(variants: Iterable[Variant], device: torch.device, seed: int, repeats: int) -> Iterator[Outcome]:
    """Verifies variants one after the other, on the numbers of a seed.

    Args:
        variants: of the device.
        repeats: how often each call is repeated, to be compared bit by bit.

    Yields:
        what came out, variant by variant.
    """
    # One thread but for repeats: matrices on the CPU are small, and threads would wait for each other.
    with cpu_threads(1), busy_memory(device) as busy:
        for variant in variants:
            start = time.perf_counter()
            wrong = fault(variant, device, seed, repeats, busy)
            yield Outcome(variant, seed, wrong, time.perf_counter() - start)


def fault(variant: Variant, device: torch.device, seed: int, repeats: int, busy: Busy) -> str:
    """Says what is wrong with a variant, forward or backward; "" if nothing is."""
    try:
        case = case_of(variant, device, seed)
        grads = _random_grads(case, seed)

        def run() -> list[Tensor]:
            return results_and_gradients(case.call, list(case.operands.values()), grads)

        # Around all threads, as both count for the whole process.
        with (
            poisoned_memory() if variant.deterministic else nullcontext(),
            force_implementation(variant.implementation),
        ):
            found = run()
            names = _names(case, grads)
            kept = [i for i, name in enumerate(names) if variant.deterministic or name != "gradient of query"]
            differs = differing(
                [found[i] for i in kept], lambda: [x for i, x in enumerate(run()) if i in kept], device, repeats, busy
            )
        _require_its_meaning(variant, case, grads, found)
    except Exception as error:  # noqa: BLE001
        return str(error) if isinstance(error, ArithmeticError) else f"{type(error).__name__}: {error}"
    return differs


def _names(case: Case, grads: Sequence[Tensor]) -> list[str]:
    results = ["output", "lse"][: len(grads)]
    return [*results, *(f"gradient of {name}" for name in case.operands)]


def _random_grads(case: Case, seed: int) -> list[Tensor]:
    """Gradients for each result, as large as they are."""
    with torch.no_grad():
        results = case.call(*case.operands.values())
    rng = torch.Generator(results[0].device).manual_seed(seed + 1)
    return [torch.randn(x.shape, generator=rng, device=x.device).to(x) for x in results]


def _require_its_meaning(variant: Variant, case: Case, grads: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raises ArithmeticError where a result or a gradient is farther from float64 than plain PyTorch's."""

    def meant(dtype: torch.dtype) -> list[Tensor]:
        operands = [x.to(dtype) for x in case.operands.values()]
        # An lse, and its gradient, are wider than 16 bits.
        wanted = [g.to(torch.promote_types(dtype, g.dtype)) if g.dtype != variant.dtype else g.to(dtype) for g in grads]
        return results_and_gradients(case.meaning, operands, wanted)

    exact = meant(torch.float64)
    plain = exact if variant.dtype == torch.float64 else meant(variant.dtype)
    for name, *numbers in zip(_names(case, grads), found, plain, exact, strict=True):
        nothing_left = numbers[2] == -torch.inf
        if not torch.equal(numbers[0] == -torch.inf, nothing_left):
            raise ArithmeticError(f"{name} is -inf elsewhere than where a row has nothing left.")
        ours, rounded, wanted = (x.masked_fill(nothing_left, 0) for x in numbers)
        least = LEAST_ERRORS.get(ours.dtype, 0.0)
        require_as_accurate(name, ours, rounded, wanted, _parts(ours, variant.block), least=least)


def _parts(x: Tensor, block: int) -> int:
    """Number of parts that are judged alone: of each sequence and head, `PART` tokens; of sparse values, a block; of a
    number a head, all."""
    if x.dim() == 1:
        return 1
    outer = x.shape[0] * x.shape[1]
    if x.dim() < 4 or x.shape[2] == block:
        return outer
    return outer * (x.shape[2] // PART) if x.shape[2] % PART == 0 else outer
