"""How far a result may be from the exact one: roundings counted, and multiplied by sums of absolute values.

Letters: u is the unit roundoff of the dtype in question, half its epsilon. A sum of n terms, added in any order, is off
by `walk(n) * u * sum |terms|`: each rounding is at most u, and n of them add up like a random walk (Higham and Mary,
"A new approach to probabilistic rounding error analysis", 2019). The worst case, n of them, is counted up to 16 terms,
and where terms are alike: adding the same number again and again is rounded the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_sparse import native

from .reference import LOWEST_BIAS, Scored

EXACT = 2.0**-53
"""u of the reference."""


@dataclass(frozen=True)
class Units:
    """The unit roundoffs of a call.

    Attributes:
        sums: of what sums and statistics are kept in.
        handed: of what one product hands to the next, such as probabilities.
        stored: of results.
        least: of `handed`, the smallest number above 0.
        least_stored: of `stored`, likewise.
        flushed: what sums of products are off at every step where they are subnormal numbers, or 0 for them. A term
            takes two additions at most: even and odd ones may have sums of their own.
        tanh: of soft caps.
    """

    sums: float
    handed: float
    stored: float
    least: float
    least_stored: float
    flushed: float
    tanh: float


def units_of(dtype: torch.dtype, device: str, composed: bool = False) -> Units:
    """composed: of PyTorch's operations, which round each step to the dtype."""
    info = torch.finfo(dtype)
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    # Tensor cores cut where others round. In fp32 they multiply parts of 11 bits, and leave out the product of the last
    # ones, so that a single product may be off by some 2**-21.
    sums = wide.eps / 2 * ({torch.float32: 16, torch.float64: 1}.get(dtype, 4) if device == "cuda" else 1)
    if composed:
        sums = info.eps if dtype.itemsize == 2 else sums
    least = info.tiny * info.eps * (4 if composed else 1)
    if device == "cuda" and dtype != torch.float64:
        least = max(least, 4 * torch.finfo(torch.float32).tiny)  # exponentials and products below that are 0 there
    # By Intel's manual instructions that multiply or round bf16 take subnormal numbers for 0, and give 0 for them.
    multiplies_bf16 = device == "cpu" and native.instruction_set().endswith("_bf16")
    flushed = info.tiny if dtype == torch.bfloat16 and multiplies_bf16 else wide.tiny * wide.eps / 2
    handed = info.eps / 2 if dtype.itemsize == 2 else sums
    tanh = 2.0**-11 if device == "cuda" and dtype.itemsize == 2 else 0.0  # PTX's tanh.approx
    return Units(sums + EXACT, handed, info.eps / 2, max(least, flushed), least, flushed, tanh)


def stored_as(dtype: torch.dtype, units: Units) -> Units:
    """For results of that dtype, which are made from what sums are kept in."""
    info = torch.finfo(dtype)
    least = max(info.tiny * info.eps, units.least) if units.sums > 2 * EXACT else info.tiny * info.eps
    return replace(units, stored=max(info.eps / 2, units.sums), least_stored=least)


def walk(terms: Tensor | int, *factors: Tensor) -> Tensor:
    """factors: of the terms, if they may be alike."""
    terms = torch.as_tensor(terms, dtype=torch.float64)
    return terms if factors and all(map(_repeats, factors)) else torch.minimum(terms, 4 * terms.sqrt())


def _repeats(x: Tensor) -> bool:
    """Whether rows or columns of x are constant."""
    return any(bool((x == x.narrow(dim, 0, 1)).all()) for dim in range(-min(2, x.dim()), 0) if x.numel())


def stored(exact: Tensor, error: Tensor, units: Units, times: int = 1) -> Tensor:
    """The error of a number with an error after it is rounded so many times."""
    return error + times * (units.stored * (exact.abs() + error) + units.least_stored)


def of_product(
    product: Callable[[list[Tensor]], Tensor], operands: list[Tensor], grad: Tensor, exact: list[Tensor], units: Units
) -> list[Tensor]:
    """Bounds of a product's result and of the gradients of its operands, `exact` in this order.

    The product of absolute values has the sums of absolute values, that of ones the numbers of terms; gradients alike.
    """

    def followed(of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [of(x).requires_grad_() for x in operands]
        result = product(leaves)
        return [result.detach(), *_gradients(result, leaves, of(grad))]

    magnitudes, terms = followed(lambda x: x.detach().abs()), followed(torch.ones_like)
    factors = [operands, *([grad, x] for x in reversed(operands))]
    errors = [
        units.sums * walk(n, *of) * size + 2 * units.flushed * n for n, size, of in zip(terms, magnitudes, factors)
    ]
    # An operand that is broadcast has a gradient that is rounded for each place, and then added up.
    partial = [0.0 * errors[0], *(units.stored * size for size in magnitudes[1:])]
    return [stored(x, e + p, units) for x, e, p in zip(exact, errors, partial)]


def _gradients(result: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(result, leaves, grad, allow_unused=True) if result.requires_grad else [None] * 2
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found)]


class Softened:
    """Errors of the probabilities of scores.

    Attributes:
        probs: of each.
        lse: of the log of a row's sum.
    """

    def __init__(self, scored: Scored, of_scores: Tensor, units: Units):
        u, live, probs = units.sums, scored.live, scored.probs.detach()
        below = (scored.logits - scored.highest).detach().abs() * live
        added = sum((b.detach().abs().nan_to_num(0, 0, 0) for b in scored.biases), torch.zeros(()))
        # Factors, biases and the row maximum are rounded one after the other, in units of the power of 2; then that.
        exponent = of_scores + u * (4 * (scored.scores.detach().abs() + added) + 2 * below + 6)
        # Beside the lowest number a score is lost, here and there.
        exponent = torch.where(scored.is_lowest & (scored.logits.detach() == LOWEST_BIAS), 6 * u, exponent)
        exponent = torch.where(live, exponent, 0)
        weighted = torch.where(probs > 0, probs * exponent.expm1(), 0).sum(-1, keepdim=True)
        largest = exponent.amax(-1, keepdim=True) if live.numel() else weighted
        terms = live.sum(-1, keepdim=True) if scored.times is None else (live * scored.times).sum(-1, keepdim=True)
        of_total = torch.minimum(weighted.log1p(), largest) + u * walk(terms)
        relative = (exponent + of_total).expm1() + 2 * u
        # Powers below the smallest normal number may be 0. No probability is above 1.
        floor = torch.finfo(torch.float32 if u > 1e-12 else torch.float64).tiny
        flushed = floor * live.double() * (1 if scored.times is None else scored.times)  # each of a pair's times
        self.probs = torch.where(probs > 0, (probs * relative).clamp(max=1), 0) + flushed
        self.lse = (of_total + 4 * u * (scored.lse.detach().unsqueeze(-1).abs().nan_to_num(0, 0, 0) + 1)).squeeze(-1)


@dataclass(frozen=True)
class Attended:
    """An attention with everything that its bounds want, float64; heads of keys repeated for those of queries.

    Attributes:
        query, key, value, grad: (B, H, T, D), (B, H, S, D), (B, H, S, E), (B, H, T, E).
        scored: solved.
        factor: of the scores.
        keep: what dropout makes of a probability: 0, or the factor above 1; broadcast to the scores.
        grad_lse: (B, H, T) or None.
        in_parts: whether results of two parts of the keys are stored, and added up.
        roundings: of the output; where there are sinks, it is stored before they count.
        softcap: of the scores, which are capped; 0 for none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scored: Scored
    factor: float
    keep: Tensor
    grad: Tensor
    grad_lse: Tensor | None
    in_parts: bool = False
    roundings: int = 1
    softcap: float = 0.0

    def of_capped(self, of_products: Tensor, units: Units) -> Tensor:
        """Bounds of capped scores, from those of scores before."""
        scores, cap = self.scored.scores.detach().abs(), self.softcap
        nearer = (self.factor * (self.query @ self.key.mT)).abs() - of_products
        steepest = 1 - (nearer.clamp(min=0) / cap).tanh() ** 2
        return (steepest * of_products).clamp(max=2 * cap) + (8 * units.sums + units.tanh) * scores

    def cap_slope(self, of_scores: Tensor, u: float) -> tuple[Tensor, Tensor]:
        """The derivative of capped scores, and its bound, from those of scores."""
        tanh = self.scored.scores.detach() / self.softcap
        of_tanh = of_scores / self.softcap + 2 * u
        return 1 - tanh**2, (2 * tanh.abs() * of_tanh + of_tanh**2 + 4 * u).clamp(max=1)


def of_attention(x: Attended, units: Units) -> dict[str, Tensor]:
    """Bounds of output and lse, and of the gradients of query, key, value and scores, before results are rounded; the
    last is the gradient of a bias, and comes with the gradient itself as "of scores"."""
    u, probs = units.sums, x.scored.probs.detach()
    q, k, v, go = x.query.abs(), x.key.abs(), x.value.abs(), x.grad.abs()
    factor, depth, width = abs(x.factor), x.query.shape[-1], x.value.shape[-1]
    of_products = u * walk(depth, q, k) * factor * (q @ k.mT)
    if x.softcap:
        of_products = x.of_capped(of_products, units)
    if x.in_parts:
        # A probability is that in its part, times a power of the difference of two lse.
        sizes_of_rows = x.scored.scores.detach().abs() + (x.scored.logits - x.scored.scores).detach().abs()
        of_products = of_products + 8 * u * (sizes_of_rows * x.scored.live).amax(-1, keepdim=True)
    soft = Softened(x.scored, of_products, units)

    row_live, column_live = x.scored.live.sum(-1, keepdim=True), x.scored.live.sum(-2).unsqueeze(-1)
    row_terms, column_terms = walk(row_live), walk(column_live)
    row_flushed, column_flushed = 2 * units.flushed * row_live, 2 * units.flushed * column_live
    # Exponentials up to 1 are handed on before they are divided by the row's sum.
    least = units.least * x.scored.live.double()  # in float32 it may be 0
    exact_handed = soft.probs + units.handed * (probs + soft.probs)
    handed = (exact_handed + least / x.scored.total.clamp(min=1)) * x.keep
    handed_backward = (exact_handed + least) * x.keep
    weights = probs * x.keep
    output = weights @ x.value
    of_output = handed @ v + u * row_terms * (weights @ v) + 3 * u * output.abs() + row_flushed
    of_value = torch.zeros(())
    if x.in_parts:
        # Each part's output, and its gradient, is stored; those of keys have terms of either.
        of_output = of_output + 2 * units.stored * (weights @ v)
        of_value = 2 * units.stored * (weights.mT @ go)
    rounded = stored(output, of_output, units, x.roundings)

    grad_probs, sizes = (x.grad @ x.value.mT) * x.keep, (go @ v.mT) * x.keep
    delta = (x.grad * output).sum(-1, keepdim=True)
    of_delta = (go * rounded).sum(-1, keepdim=True) + u * walk(width) * (go * output.abs()).sum(-1, keepdim=True)
    lse_grad = torch.zeros_like(delta) if x.grad_lse is None else x.grad_lse.unsqueeze(-1)
    inner = grad_probs - delta + lse_grad
    of_inner = u * walk(width) * sizes + of_delta + 3 * u * (grad_probs.abs() + delta.abs() + lse_grad.abs())
    of_inner = of_inner + 2 * units.flushed * width
    if x.in_parts:
        largest = (sizes * x.scored.live).amax(-1, keepdim=True)
        of_inner = of_inner + 4 * (u * walk(width) + units.stored) * largest
    scores = probs * inner
    of_scores = soft.probs * (inner.abs() + of_inner) + probs * of_inner + 2 * u * scores.abs()
    if x.softcap:
        slope, of_slope = x.cap_slope(of_products, u)
        scores, of_scores = scores * slope, of_scores * (slope + of_slope) + scores.abs() * of_slope
    of_scores = of_scores + torch.finfo(torch.float32 if u > 1e-12 else torch.float64).tiny * x.scored.live.double()
    given = of_scores + units.handed * (scores.abs() + of_scores) + units.least * max(1.0, 1 / max(factor, 1e-30))
    given = given * x.scored.live

    terms = scores.abs() + of_scores
    of_query = units.stored * factor * (terms @ k) if x.in_parts else torch.zeros(())
    return {
        "output": of_output,
        "lse": soft.lse,
        "query": factor * (given @ k + u * (row_terms + 2) * (terms @ k)) + row_flushed + of_query,
        "key": factor * (given.mT @ q + u * (column_terms + 2) * (terms.mT @ q)) + column_flushed,
        "value": handed_backward.mT @ go + u * (column_terms + 2) * (weights.mT @ go) + column_flushed + of_value,
        "scores": of_scores,
        "of scores": scores,
    }


def of_bias(
    errors: dict[str, Tensor], summed: Callable[[Tensor], Tensor], u: float, rounded: Units | None = None
) -> Tensor:
    """Of the gradient of a bias; summed: adds up what is of scores as the gradient is; rounded: as what terms are
    stored before they are added up."""
    sizes = errors["of scores"].abs()
    error = errors["scores"] if rounded is None else stored(sizes, errors["scores"], rounded) * (errors["scores"] > 0)
    terms = summed((errors["scores"] > 0).double())
    return summed(error) + u * walk(terms) * summed(sizes + error)


def summed_into(bias: Tensor, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Adds up what is of scores over all that a number of the bias is added to; of: what is added, of the bias."""

    def summed(x: Tensor) -> Tensor:
        own = torch.zeros_like(bias).requires_grad_()
        return torch.autograd.grad(of(own).expand_as(x), own, x)[0]

    return summed


def of_softmax(scored: Scored, grad: Tensor, factor: float, units: Units) -> dict[str, Tensor]:
    """Bounds of the probabilities, and of the gradients of x and of scores, before results are rounded; grad is that of
    the probabilities, dense, as are all."""
    u, probs = units.sums, scored.probs.detach()
    soft = Softened(scored, torch.zeros_like(probs), units)
    rounded = stored(probs, soft.probs, units)
    terms = walk(scored.live.sum(-1, keepdim=True))
    # Backward has the probabilities as they were stored.
    delta = (probs * grad).sum(-1, keepdim=True)
    sizes = (probs * grad.abs()).sum(-1, keepdim=True)
    of_delta = (rounded * grad.abs() * scored.live).sum(-1, keepdim=True) + u * terms * sizes
    inner = grad - delta
    scores = probs * inner
    of_scores = rounded * inner.abs() + (probs + rounded) * (of_delta + 2 * u * (grad.abs() + delta.abs()))
    of_scores = (of_scores + 3 * u * scores.abs()) * scored.live
    return {"output": soft.probs, "x": abs(factor) * of_scores, "scores": of_scores, "of scores": scores}
