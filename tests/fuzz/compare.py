"""A case run by its operation and compared with its meaning."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from helpers import on_device
from torch import Tensor

from ds_sparse.tools.torch_settings import cpu_threads, poisoned_memory

from .bounds import units_of
from .cases import Case
from .meanings import Tensors, gradient_of
from .spoilt import spoilt


class Outcome(NamedTuple):
    """faults: sentences, none where all is well. ratio: the largest error over its bound, and of what."""

    faults: list[str]
    ratio: float
    of: str


def gradients(results: Tensors, leaves: Tensors, wanted: tuple[str, ...], grads: Tensors) -> Tensors:
    """Of all wanted, zeros where nothing depends on them."""
    names = [name for name, x in results.items() if x.requires_grad]
    if not names:
        return {gradient_of(name): torch.zeros_like(leaves[name]) for name in wanted}
    outputs, given, inputs = [results[n] for n in names], [grads[n] for n in names], [leaves[n] for n in wanted]
    found = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
    return {gradient_of(name): torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(wanted, found)}


def hold(case: Case, device: str) -> None:
    """Asserts that the results and gradients of a case are within their bounds."""
    outcome = check(case, device)
    assert not outcome.faults, "\n".join(outcome.faults)


def check(case: Case, device: str) -> Outcome:
    with cpu_threads(1):
        return _check(case, device)


def _check(case: Case, device: str) -> Outcome:
    leaves = {name: on_device(x, device).requires_grad_(name in case.wanted) for name, x in case.tensors.items()}
    # torch 2.11 raises in that operation's backward pass under deterministic algorithms, which poisoning takes.
    poisoned = case.poisoned and not (case.operation == "torch_sparse_attention" and device == "cuda")
    memory: AbstractContextManager = poisoned_memory() if poisoned else nullcontext()
    exact_leaves = {
        name: (x if x.dtype == torch.bool else without(case, name, x.detach().double()))
        .clone()
        .requires_grad_(name in case.wanted)
        for name, x in case.tensors.items()
    }
    expected = case.meaning.results(exact_leaves)
    faults: list[str] = []
    with memory, cpu_threads(case.threads):
        ours = case.call(leaves)
        drawn = {name: case.grads(name, x.detach().cpu()) for name, x in ours.items()}
        clean = {name: x.double() for name, x in drawn.items()}
        if "output" in case.planted:
            drawn["output"] = drawn["output"].masked_fill(case.planted["output"].unsqueeze(-1), case.number)
            clean["output"] = without(case, "output", clean["output"])
        found = dict(ours) | gradients(
            ours, leaves, case.wanted, {name: on_device(x, device) for name, x in drawn.items()}
        )
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    for name, x in ours.items():
        dtype = wide if name == "lse" else case.dtype
        if x.shape != expected[name].shape or x.dtype != dtype:
            faults.append(f"{name} is {x.dtype} {tuple(x.shape)}, and has to be {dtype} {tuple(expected[name].shape)}")
    for name, x in case.tensors.items():
        if not same_bits(leaves[name].detach().cpu(), x):
            faults.append(f"{name} was written to")
    if faults:
        return Outcome(faults, float("inf"), "")
    exact = {name: x.detach() for name, x in (expected | gradients(expected, exact_leaves, case.wanted, clean)).items()}
    errors = case.meaning.errors(exact_leaves, clean, exact, units_of(case.dtype, device, case.composed))
    ratio, of, anything = 0.0, "", spoilt(case)
    for name in exact:
        x = found[name].detach().cpu()
        if name in anything:
            x = torch.where(anything[name], exact[name].to(x.dtype), x)
        own, sentence = compared(name, x, exact[name], errors[name])
        if sentence:
            faults.append(sentence)
        if own >= ratio:
            ratio, of = own, name
    return Outcome(faults, ratio, of)


def without(case: Case, name: str, x: Tensor) -> Tensor:
    """Zeros in the place of what is planted."""
    return x.masked_fill(case.planted[name].unsqueeze(-1), 0) if name in case.planted else x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.dtype != torch.bool else torch.equal(a, b)


def compared(name: str, ours: Tensor, exact: Tensor, bound: Tensor) -> tuple[float, str]:
    """The largest error over its bound; where that is above 1, or something is not finite, a sentence."""
    if exact.numel() == 0:
        return 0.0, ""
    if name == "lse":
        empty = exact == -torch.inf
        if not torch.equal(ours == -torch.inf, empty):
            return float("inf"), "lse: -inf stands elsewhere than where a row has nothing left"
        ours, exact = ours.masked_fill(empty, 0), exact.masked_fill(empty, 0)
    # What the dtype cannot hold may be infinite.
    held = exact.abs() + bound < torch.finfo(ours.dtype).max
    error = (ours.double() - exact).abs()
    wrong = held & ~(error <= bound)
    ratio = torch.where(held, error / bound, 0).nan_to_num(torch.inf, torch.inf).max().item()
    if not wrong.any():
        return ratio, ""
    worst = int(torch.where(wrong, error / bound, 0).nan_to_num(torch.inf, torch.inf).flatten().argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), exact.shape))
    return ratio, (
        f"{name}{list(place)} is {ours[place].item():.9g} and has to be {exact[place].item():.9g}: the error "
        f"{error[place].item():.3g} is above {bound[place].item():.3g}; {int(wrong.sum())} of {exact.numel()} are wrong"
    )
