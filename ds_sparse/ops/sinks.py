"""Attention sinks: a logit a head in the softmax's denominator, without a value, after kernels that know of none."""

from __future__ import annotations

import torch

from ._library import check_device, check_floating


def check_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> None:
    """Raises ValueError unless there is one floating sink for each head of query (B, H, T, D)."""
    if sinks is None:
        return
    check_device("sinks", sinks, query.device)
    check_floating("sinks", sinks)
    # Heads of a traced tensor may be symbolic, which torch.compile does not find in a tuple.
    if sinks.dim() != 1 or sinks.shape[0] != query.shape[1]:
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}; it has to be ({query.shape[1]},), a logit a head.")


def with_sinks(
    output: torch.Tensor, rows: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds sinks to the denominators of a kernel's results: output, which is overwritten, lse and rows.

    Backward's kernels compute the probabilities, which the sinks make smaller, from these rows. Dropout changes
    nothing: the probability of a sink has no value that it could drop.

    Args:
        output: (B, H, T, D), a kernel's.
        rows: (B, H, T, 2), its maximum and sum of each row; the sum of one with nothing left is 0, and stays so.
        sinks: (H,).
    """
    row_max, row_sum = rows.unbind(-1)
    empty, given = row_sum == 0, sinks.to(rows.dtype)[:, None]
    row_max = row_max.masked_fill(empty, float("-inf"))
    maximum = torch.maximum(row_max, given)
    maximum = maximum.masked_fill(maximum == float("-inf"), 0)
    of_keys = row_sum * (row_max - maximum).exp()
    total = of_keys + (given - maximum).exp()
    share = (of_keys / total).masked_fill(empty, 0).unsqueeze(-1)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        # Under vmap the sinks alone may have samples. Traced by torch 2.11, a result that is also another value of
        # forward (written in place, or `to` its own dtype without a copy) is returned twice and loses its gradient.
        output = (output * share).to(output.dtype, copy=True)
    else:
        output *= share
    return output, maximum + total.log(), torch.stack([maximum, total.masked_fill(empty, 0)], -1)


def grad_of_sinks(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    output: torch.Tensor,
    rows: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """The gradient of sinks, (H,), from what `with_sinks` returned: of a softmax's logit whose value is 0."""
    given = sinks.to(rows.dtype)[:, None]
    sums = rows[..., 1]
    alone = (given > float("-inf")).to(sums.dtype)  # of a row with nothing else
    probability = torch.where(sums > 0, (given - rows[..., 0]).exp() / sums, alone)
    grad = -(grad_output.to(rows.dtype) * output).sum(-1).masked_fill(sums == 0, 0)
    if grad_lse is not None:
        grad = grad + grad_lse
    return (probability * grad).sum((0, 2)).to(sinks.dtype)
