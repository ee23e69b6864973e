"""What the programs here are compared with: attention over all pairs of tokens, in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from helpers import assert_as_accurate
from torch import Tensor, nn


def attention(
    query: Tensor, key: Tensor, value: Tensor, layout: Tensor, block: int, added: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """softmax(query @ key^T / sqrt(D) + what is added) @ value on the layout (H, R, C); zeros in empty rows."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    for bias in added:
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
    live = layout.bool().to(scores.device).repeat_interleave(block, -2).repeat_interleave(block, -1)
    return scores.masked_fill(~live, float("-inf")).softmax(-1).nan_to_num() @ value


class DenseSelfAttention(nn.Module):
    """In the place of a `SparseSelfAttention` whose masks are added."""

    def __init__(self, layout: Tensor, block: int):
        super().__init__()
        self.layout, self.block = layout, block

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rpe=None, key_padding_mask=None, attn_mask=None
    ) -> Tensor:
        blocks = query.shape[-2] // self.block
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(len(query), 1, 1, -1)
        added = (rpe, key_padding_mask, attn_mask)
        return attention(query, key, value, self.layout[:, :blocks, :blocks], self.block, added)


def assert_equal_to_dense(program: nn.Module, make_dense: Callable[[nn.Module], None], *inputs: Any) -> None:
    """Output and gradients of a program are as accurate as those of its dense twin at the same precision.

    Args:
        make_dense: puts dense attention into a copy of the program, in place.
        inputs: of the program; floating ones get gradients too.
    """
    twin = copy.deepcopy(program)
    make_dense(twin)
    results = [_run(program, inputs), _run(twin, inputs), _run(twin.double(), inputs, torch.float64)]
    names = ["output", *(name for name, _ in program.named_parameters())]
    names += [f"input {number}" for number in range(len(results[0]) - len(names))]
    largest = 0.0
    for name, ours, plain, exact in zip(names, *results, strict=True):
        if not name.endswith("key.bias"):
            # That of a key's bias is zero but for rounding, since softmax does not see what is added to a whole row: it
            # is held to the size of its weight's, which comes before.
            largest = exact.abs().max().item()
        assert largest > 0, f"{name}: nothing to compare"
        # Gradients of weights and biases are sums over all tokens, whose terms cancel.
        assert_as_accurate(name, ours, plain.cpu(), exact.cpu(), largest_term=4 * largest)


def _run(program: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    leaves = [
        x.detach().to(dtype or x.dtype).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    output = program(*leaves)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).reshape(output.shape).to(output.dtype)
    wanted = [*program.parameters(), *(x for x in leaves if isinstance(x, Tensor) and x.requires_grad)]
    return [output, *torch.autograd.grad((output * weights).sum(), wanted)]
