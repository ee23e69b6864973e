"""What a case means: exact results of its tensors, and bounds of the errors that results may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import bounds
from .bounds import Units
from .reference import Scored

Tensors = dict[str, Tensor]


def gradient_of(name: str) -> str:
    return f"gradient of {name}"


class Meaning(Protocol):
    def results(self, given: Tensors) -> Tensors:
        """Of float64 tensors, differentiable."""

    def errors(self, given: Tensors, grads: Tensors, exact: Tensors, units: Units) -> Tensors:
        """Bounds for all that `exact` has: results, and what `gradient_of` names."""


@dataclass(frozen=True)
class Product:
    """A product of two tensors, linear in each; its result is "result"."""

    operands: tuple[str, str]
    function: Callable[[list[Tensor]], Tensor]

    def results(self, given: Tensors) -> Tensors:
        return {"result": self.function([given[name] for name in self.operands])}

    def errors(self, given: Tensors, grads: Tensors, exact: Tensors, units: Units) -> Tensors:
        names = ["result", *map(gradient_of, self.operands)]
        operands = [given[name].detach() for name in self.operands]
        known = [exact.get(name, torch.zeros(())) for name in names]
        found = bounds.of_product(self.function, operands, grads["result"], known, units)
        return {name: error for name, error in zip(names, found) if name in exact}


@dataclass(frozen=True)
class Attention:
    """Attention of `operands`, query, key and value; its results are "output" and, if it is wanted, "lse".

    Attributes:
        seen: bool, broadcast to the scores.
        biases: by name, how a tensor becomes what is added to the scores.
        keep: what dropout makes of probabilities, as of `bounds.Attended`.
        times: how often each pair counts.
        bias_dtype: in which gradients of biases are stored.
        shares: whether key and value are repeated for the query heads of a group, whose gradients are then rounded one
            by one before they are added up.
        in_parts: whether rows may be made of two parts, which are stored before they are added up.
        sinks: whether "sinks", a logit a head, is given: another key of zeros, whose value is zeros.
        softcap: of the scores; 0 for none.
    """

    operands: tuple[str, str, str]
    seen: Tensor
    factor: float
    biases: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    keep: Callable[[], Tensor] = lambda: torch.ones((), dtype=torch.float64)
    times: Tensor | None = None
    with_lse: bool = False
    bias_dtype: torch.dtype = torch.float64
    shares: bool = False
    in_parts: bool = False
    sinks: bool = False
    softcap: float = 0.0

    @property
    def all_biases(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """By name, how a tensor becomes what is added to the scores, that of a sink behind those of the keys."""
        if not self.sinks:
            return self.biases

        def beside(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda bias: pad((x := of(bias)).expand(*x.shape[:-1], self.seen.shape[-1]), (0, 1))

        of_sinks = {"sinks": lambda sinks: pad(sinks[:, None, None], (self.seen.shape[-1], 0))}
        return {name: beside(of) for name, of in self.biases.items()} | of_sinks

    def _operands(self, given: Tensors) -> list[Tensor]:
        query, key, value = (given[name] for name in self.operands)
        group = query.shape[1] // key.shape[1] if key.shape[1] else 1
        repeated = [x.repeat_interleave(group, 1) for x in (key, value)]
        return [query, *(pad(x, (0, 0, 0, 1)) if self.sinks else x for x in repeated)]

    def _keep(self) -> Tensor:
        keep = self.keep()
        return pad(keep, (0, 1), value=1.0) if self.sinks and keep.dim() else keep

    def _scored(self, query: Tensor, key: Tensor, given: Tensors) -> Scored:
        biases = [of(given[name]) for name, of in self.all_biases.items()]
        seen = pad(self.seen, (0, 1), value=True) if self.sinks else self.seen
        scores = query @ key.mT * self.factor
        scores = self.softcap * (scores / self.softcap).tanh() if self.softcap else scores
        return Scored(scores, seen, biases, self.times).solve()

    def live(self, given: Tensors) -> Tensor:
        """bool (B, H, T, S), the pairs that count."""
        live = self._scored(*self._operands(given)[:2], given).live
        return live[..., :-1] if self.sinks else live

    def _results(self, query: Tensor, key: Tensor, value: Tensor, given: Tensors) -> Tensors:
        scored = self._scored(query, key, given)
        output = (scored.probs * self._keep()) @ value
        return {"output": output, "lse": scored.lse} if self.with_lse else {"output": output}

    def results(self, given: Tensors) -> Tensors:
        return self._results(*self._operands(given), given)

    def _gradients_of_heads(self, given: Tensors, grads: Tensors) -> Tensors:
        """Those of key and value for each query head alone."""
        query, key, value = (x.detach().clone().requires_grad_() for x in self._operands(given))
        output = self._results(query, key, value, given)["output"]
        found = torch.autograd.grad(output, (key, value), grads["output"], materialize_grads=True, allow_unused=True)
        return dict(zip(("key", "value"), found))

    def errors(self, given: Tensors, grads: Tensors, exact: Tensors, units: Units) -> Tensors:
        given = {name: x.detach() for name, x in given.items()}
        of_heads = self._gradients_of_heads(given, grads) if self.shares else {}
        query, key, value = self._operands(given)
        attended = bounds.Attended(
            query, key, value, self._scored(query, key, given), self.factor, self._keep(), grads["output"],
            grads.get("lse"), self.in_parts, 1 + self.sinks, self.softcap,
        )  # fmt: skip
        found = bounds.of_attention(attended, units)
        output = bounds.stored(exact["output"], found["output"], units, attended.roundings)
        errors = {"output": output, "lse": found["lse"]}
        for role, name in zip(("query", "key", "value"), self.operands):
            if gradient_of(name) in exact:
                error, group = found[role], found[role].shape[1] // max(given[name].shape[1], 1)
                error = bounds.stored(of_heads[role], error, units) if role in of_heads else error
                error = error[:, :, :-1] if self.sinks and role != "query" else error
                error = error.unflatten(1, (-1, group)).sum(2) if group > 1 else error
                errors[gradient_of(name)] = bounds.stored(exact[gradient_of(name)], error, units)
        for name, of in self.all_biases.items():
            if gradient_of(name) in exact:
                as_bias = bounds.stored_as(self.bias_dtype, units)
                error = bounds.of_bias(found, bounds.summed_into(given[name], of), units.sums)
                errors[gradient_of(name)] = bounds.stored(exact[gradient_of(name)], error, as_bias)
        return {name: errors[name] for name in exact}


@dataclass(frozen=True)
class RowSoftmax:
    """Softmax of `operand`; its result is "probs".

    Attributes:
        spread: the operand's numbers as a matrix (B, H, T, S).
        gather: such a matrix in the shape of the operand.
        seen, biases: as of `Attention`.
    """

    operand: str
    spread: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]
    seen: Tensor
    factor: float
    biases: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def _scored(self, given: Tensors) -> Scored:
        biases = [of(given[name]) for name, of in self.biases.items()]
        return Scored(self.spread(given[self.operand]) * self.factor, self.seen, biases).solve()

    def results(self, given: Tensors) -> Tensors:
        return {"probs": self.gather(self._scored(given).probs)}

    def errors(self, given: Tensors, grads: Tensors, exact: Tensors, units: Units) -> Tensors:
        given = {name: x.detach() for name, x in given.items()}
        found = bounds.of_softmax(self._scored(given), self.spread(grads["probs"]), self.factor, units)
        errors = {"probs": bounds.stored(exact["probs"], self.gather(found["output"]), units)}
        operand = gradient_of(self.operand)
        if operand in exact:
            # Where biases have a gradient, the sum's is stored before the factor comes to it.
            errors[operand] = bounds.stored(exact[operand], self.gather(found["x"]), units, times=2)
        for name, of in self.biases.items():
            if gradient_of(name) in exact:
                error = bounds.of_bias(found, bounds.summed_into(given[name], of), units.sums, units)
                errors[gradient_of(name)] = bounds.stored(exact[gradient_of(name)], error, units)
        return {name: errors[name] for name in exact}
