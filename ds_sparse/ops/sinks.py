"""Attention sinks: a logit a head in the softmax's denominator, without a value, after kernels that know of none."""

from __future__ import annotations

import torch

from .._ops import ops
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
    """Output, lse and rows of a kernel's output and rows, with sinks in the denominators.

    Backward's kernels compute the probabilities, which the sinks make smaller, from these rows. Dropout changes
    nothing: the probability of a sink has no value that it could drop.

    Args:
        output: (B, H, T, D), or (B, H, T, g, D).
        rows: (B, H, T, 2) or (B, H, T, g, 2), its maximum and sum of each row; the sum of one with nothing left is 0,
            and stays so.
        sinks: (H,), or (H, g).
    """
    return ops.attention_sinks_forward.default(output, rows, _as_read(sinks, rows))


def grad_of_sinks(
    grad_output: torch.Tensor,
    grad_lse: torch.Tensor | None,
    output: torch.Tensor,
    rows: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """The gradient of sinks from what `with_sinks` returned: of a softmax's logit whose value is 0."""
    given = _as_read(sinks, rows)
    return ops.attention_sinks_backward.default(grad_output, grad_lse, output, rows, given).to(sinks.dtype)


def _as_read(sinks: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return sinks.to(rows.dtype).contiguous()
