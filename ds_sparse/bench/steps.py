"""Shared by `matmul` and `window`: products, softmax and attention of both, each beside its dense counterpart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..verify.accuracy import output_and_gradients, require_as_accurate
from .floors import ATTENTION, SCORES, SOFTMAX, TRANSPOSED, VALUES, Ceilings, Size, operation_floor
from .machine import DTYPES
from .markdown import Columns, Table, made_of, milliseconds, notes_on, numbers, pair
from .references import AttentionProblem
from .registry import Build, Peer
from .run import Medians
from .runs import Result, Row

FIELDS = ("dense", "to_dense", "floor_ms", "to_floor", "bound")
"""Fields of a `Row` in the JSON."""

Calls = dict[str, Callable[..., Tensor]]
"""Operations by name."""


class StepsProblem(AttentionProblem):
    """A case on a device, and the operands of each operation.

    Args:
        case: with `dtype`, `scale`, `batch` and `heads`.
        ours: our operations; they scale scores in the softmax, or, with `scale_first`, get them scaled.
        jobs: those whom our operations are compared with, which do the same densely.
        part: as in `AttentionProblem`.
    """

    def __init__(
        self, case: Any, size: Size, device: torch.device, ours: Calls, jobs: Mapping[str, str], scale_first: bool,
        part: int,
    ) -> None:  # fmt: skip
        self.case, self.size, self.dtype, self.ours, self.jobs = case, size, DTYPES[case.dtype], ours, jobs
        self.before: float = case.scale if scale_first else 1.0
        self.inside: float = 1.0 if scale_first else case.scale
        super().__init__((size.batch, size.heads, size.seq_len, size.head_dim), self.dtype, device, part)

    @abstractmethod
    def meaning(self) -> Calls:
        """Our operations but attention, as `ds_sparse.reference` has them, for one head."""

    @cached_property
    def few(self) -> StepsProblem:
        """The problem that `meaning` is compared on; this one, if it is not too large for that."""
        return self

    @cached_property
    def scores_and_probs(self) -> tuple[Tensor, Tensor]:
        """Ours, which take live scores alone."""
        by_job = {job: self.ours[name] for name, job in self.jobs.items()}
        scores = by_job[SCORES](*self.inputs[:2])
        scores = scores if self.before == 1.0 else scores * self.before
        return scores, by_job[SOFTMAX](scores)

    def dense_softmax(self, scores: Tensor) -> Tensor:
        return (scores if self.inside == 1.0 else scores * self.inside).softmax(-1)

    def operands(self, name: str) -> tuple[Tensor, ...]:
        """Operands of one of our operations but attention."""
        query, key, value = self.inputs
        if self.jobs[name] == SCORES:
            return query, key
        scores, probs = self.scores_and_probs
        return {SOFTMAX: (scores,), VALUES: (probs, value), TRANSPOSED: (value.mT, probs)}[self.jobs[name]]

    def verify(self, name: str, peer: Peer) -> None:
        """Holds attention to some heads of the case, and each of our products and softmax to its meaning, in float64.
        Dense PyTorch is not verified.

        Raises:
            ArithmeticError: an error larger than `require_as_accurate` allows.
        """
        if peer.beside == ATTENTION and not peer.dense:
            super().verify(name, peer)
        elif name in self.jobs:
            few = self.few
            few.verify_ends(name, peer.call if few is self else few.ours[name], peer.no_backward == "")

    def verify_ends(self, name: str, call: Callable[..., Tensor], has_backward: bool) -> None:
        """Holds the first head of the first sequence and the last of the last to the meaning."""

        def ends(x: Tensor) -> Tensor:
            """(B, H, T, D), (B, H * V, b, b) or (B * H, V, b, b) -> (2, 1, T, D) or (2, V, b, b)."""
            return x.reshape(self.size.batch * self.size.heads, -1, *x.shape[2:])[[0, -1]]

        inputs, meaning = self.operands(name), self.meaning()[name]
        with torch.no_grad():
            output = call(*inputs)
        grad = torch.randn_like(output)
        found = output_and_gradients(call, inputs, grad) if has_backward else [output]
        few, few_grad = [ends(x) for x in inputs], ends(grad)
        plain = output_and_gradients(meaning, few, few_grad)
        exact = output_and_gradients(meaning, [x.double() for x in few], few_grad.double())
        for i, (mine, rounded, wanted) in enumerate(zip(found, plain, exact)):
            require_as_accurate(f"gradient {i}" if i else "output", ends(mine), rounded, wanted, parts=2)


def ours(jobs: Mapping[str, str]) -> dict[str, Build]:
    """Our operations, with whom they are compared."""

    def by_name(name: str, job: str) -> Build:
        return lambda problem: Peer(problem.ours[name], None if job == ATTENTION else problem.operands(name), job)

    return {name: by_name(name, job) for name, job in jobs.items()}


def dense(job: str) -> Build:
    """PyTorch's operation, on dense operands."""

    def build(problem: StepsProblem) -> Peer:
        query, key, value = problem.inputs
        if job == SCORES:
            return Peer(lambda q, k: q @ k.mT, (query, key), job)
        scores = query @ key.mT * problem.before
        if job == SOFTMAX:
            return Peer(problem.dense_softmax, (scores,), job)
        probs = problem.dense_softmax(scores)
        if job == VALUES:
            return Peer(torch.matmul, (probs, value), job)
        return Peer(lambda v, p: v @ p.mT, (value.mT, probs), job)

    return build


def over_floor(problem: StepsProblem, peer: Peer | None, row: Row, medians: Medians) -> dict[str, Any]:
    """A row's floor on a GPU, its time over it, and what bounds it. A CPU has none: what bounds an operation there
    depends on which of its operands and results lie in caches and in memory that is already its own."""
    if row.milliseconds is None or problem.device.type == "cpu":
        return {}
    ceilings = Ceilings.measure(problem.device, problem.dtype)
    floor, bound = operation_floor(ceilings, problem.size, row.dense, row.direction)
    return {"floor_ms": floor, "to_floor": row.milliseconds / floor, "bound": bound}


def page(
    start: Columns,
    results: Sequence[Result],
    names: Sequence[str],
    others: Mapping[str, Sequence[str]],
    ways: Sequence[str],
) -> Table:
    """A line a case: each operation, on a GPU with the part of its floor that it reaches; notes on who else computes
    it."""
    floors = " (of the floor)" if has_floors(results) else ""
    own = {f"`{name}`, ms{floors}": partial(with_floor, name=name, ways=ways) for name in names}
    notes = [note for name in names for other in others[name] for note in notes_on(results, other, name, ways)]
    return made_of({**start, **own}, results, ways, notes)


def with_floor(result: Result, name: str, ways: Sequence[str]) -> str:
    """Times, and in brackets the parts of the floor that they reach."""
    parts = [1 / floor if floor else None for floor in numbers(result, name, ways, "to_floor")]
    reached = pair(parts, lambda part: f"{part:.0%}".removesuffix("%"))
    return pair(milliseconds(result, name, ways)) + (f" ({reached} %)" if reached else "")


def has_floors(results: Iterable[Result]) -> bool:
    return any(row.to_floor for result in results for row in result.rows)
