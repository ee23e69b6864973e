"""What the operations mean, written down a second time: dense, in float64, from the documentation alone.

Nothing of `ds_sparse/reference.py` is used, so that what is misunderstood there does not pass here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

LOWEST_BIAS = -1e30
"""Finite biases below count as this, and so do sums of them."""


def seen_tokens(layout: Tensor, block: int, tokens: int, keys: int, offset: int = 0) -> Tensor:
    """Token i sees token j where their block is live: bool (H or 1, T, S) of a layout (H or 1, R, C). offset: the
    position of the first query."""
    rows, columns = (torch.arange(tokens) + offset) // block, torch.arange(keys) // block
    return layout.bool()[:, rows][:, :, columns]


def seen_in_windows(
    tokens: int, windows: list[int], dilations: list[int], global_tokens: list[int], causal: bool
) -> Tensor:
    """bool (H, T, T): k * dilation away for k up to the window, or one of both is global."""
    heads = max(len(windows), len(dilations))
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for head in range(heads):
        window, dilation = windows[head % len(windows)], dilations[head % len(dilations)]
        for k in range(-min(window, tokens), min(window, tokens) + 1):
            if abs(k * dilation) < tokens:
                seen[head].diagonal(k * dilation).fill_(True)
    seen[:, global_tokens] = True
    seen[:, :, global_tokens] = True
    return seen & before(tokens, tokens) if causal else seen


def before(tokens: int, keys: int, offset: int = 0) -> Tensor:
    """What causality leaves: token i sees token j <= i."""
    return torch.arange(keys) <= torch.arange(tokens)[:, None] + offset


def live_blocks(layout: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Heads, rows and columns of live blocks, in the order in which sparse values have them."""
    return layout.bool().expand(heads, -1, -1).nonzero().unbind(1)


def blocks_of(dense: Tensor, layout: Tensor, block: int) -> Tensor:
    """The live blocks (B, V, b, b) of a matrix (B, H, R*b, C*b)."""
    cut = dense.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)
    heads, rows, columns = live_blocks(layout, dense.shape[1])
    return cut[:, heads, rows, columns]


def dense_of(values: Tensor, layout: Tensor, block: int, heads: int) -> Tensor:
    """A matrix (B, H, R*b, C*b) of its live blocks, 0 elsewhere."""
    batch, (rows, columns) = values.shape[0], layout.shape[-2:]
    dense = values.new_zeros(heads, rows, columns, batch, block, block)
    dense = dense.index_put(live_blocks(layout, heads), values.transpose(0, 1))
    return dense.permute(3, 0, 1, 4, 2, 5).reshape(batch, heads, rows * block, columns * block)


def band_of(dense: Tensor, window: int) -> Tensor:
    """result[..., i, j] = dense[..., i, i + j - window], 0 where there is no such column."""
    tokens = dense.shape[-1]
    wide = torch.nn.functional.pad(dense, (window, window))
    columns = torch.arange(tokens)[:, None] + torch.arange(2 * window + 1)
    return wide.gather(-1, columns.expand(*dense.shape[:-2], -1, -1))


def dense_of_band(band: Tensor) -> Tensor:
    """The matrix of a band, 0 outside; numbers of the band that belong to no column are left out."""
    tokens, window = band.shape[-2], band.shape[-1] // 2
    away = torch.arange(tokens) - torch.arange(tokens)[:, None]
    places = (away + window).clamp(0, 2 * window)
    return band.gather(-1, places.expand(*band.shape[:-2], -1, -1)) * (away.abs() <= window)


@dataclass
class Scored:
    """Scores of tokens, and what becomes of them: softmax(scores + biases) over the live pairs.

    Attributes:
        scores: (B, H, T, S), scaled.
        seen: bool, broadcast to them.
        biases: added, each broadcast to them; -inf masks.
        times: how often each pair counts; broadcast to them.
    """

    scores: Tensor
    seen: Tensor
    biases: list[Tensor] = field(default_factory=list)
    times: Tensor | None = None

    def solve(self) -> Scored:
        """Adds `live`, `logits` (0 where dead), `is_lowest` (of what is added), `probs`, and `lse` (-inf where a row is
        empty)."""
        live = self.seen.expand(self.scores.shape)
        added = torch.zeros((), dtype=torch.float64)
        for bias in self.biases:
            live = live & (bias != -torch.inf)
            added = added + raised(torch.where(bias == -torch.inf, 0, bias))
        added = raised(added)
        self.is_lowest = added == LOWEST_BIAS
        self.live, self.logits = live, torch.where(live, self.scores + added, 0)
        alive = live.any(-1, keepdim=True)
        highest = torch.where(live, self.logits.detach(), -torch.inf)
        self.highest = torch.where(alive, highest.amax(-1, keepdim=True), 0) if live.numel() else alive.double()
        times = live.double() if self.times is None else live * self.times
        weights = torch.where(live, (self.logits - self.highest).exp(), 0) * times
        total = weights.sum(-1, keepdim=True)
        self.probs = weights / torch.where(alive, total, 1)
        self.lse = torch.where(alive, self.highest + torch.where(alive, total, 1).log(), -torch.inf).squeeze(-1)
        self.total = total.detach()
        return self


def raised(bias: Tensor) -> Tensor:
    """A bias, or a sum of some, with nothing below the lowest; its gradient passes."""
    return torch.where(bias < LOWEST_BIAS, LOWEST_BIAS + (bias - bias.detach()), bias)


def kept(mask: Tensor) -> Tensor:
    """A bool mask, which keeps where True, as a bias."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)


def as_bias(mask: Tensor) -> Tensor:
    """A bool mask keeps where True, a float one is added."""
    return kept(mask) if mask.dtype == torch.bool else mask
