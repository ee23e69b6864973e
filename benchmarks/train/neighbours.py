"""What a model is given beside attention: each token's neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

REACH = 2
"""Tokens on each side."""

LARGEST = 2.0
"""Of the weights at the beginning, which are uniform around 0; a quarter of it takes a model twice the steps to leave
the unigram cross-entropy."""


class Neighbours(nn.Module):
    """Adds to the vector of each token, (B, T, hidden), a depthwise convolution of those on both sides, as wav2vec 2.0
    does (Baevski et al. 2020, arXiv 2006.11477).

    Attention that has to find neighbours by absolute positions alone stays near the unigram cross-entropy for more than
    a thousand steps, in which short runs would have nothing to compare. Neighbours begin with twice the weight of the
    token itself, whose vector says nothing where it is masked.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * REACH, hidden).uniform_(-LARGEST, LARGEST))

    def forward(self, x: Tensor) -> Tensor:
        padded, tokens = pad(x, (0, 0, REACH, REACH)), x.shape[1]
        places = [place for place in range(2 * REACH + 1) if place != REACH]
        return x + sum(padded[:, place : place + tokens] * weight for place, weight in zip(places, self.weight))


def add_neighbours(model: Any) -> None:
    """To the embeddings of a BERT, also of one with rotary positions."""
    embeddings = model.base_model.embeddings
    embeddings.neighbours = Neighbours(model.config.hidden_size)
    embeddings.register_forward_hook(lambda module, _, output: module.neighbours(output))
