"""Lengths of packed documents, the same at every call: all alike, or such as real corpora have."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MEDIAN, SPREAD, LONGEST = 400, 1.2, 8192
"""A corpus' lengths: `MEDIAN` tokens times e to the power of `SPREAD` z, z from a standard normal distribution, and at
most `LONGEST`. Half of the documents have fewer than `MEDIAN` tokens, one in eight over four times as many."""


def equal_lengths(tokens: int, length: int) -> list[int]:
    """Documents of one length that fill a row of so many tokens; the last ends with the row."""
    return [min(length, tokens - first) for first in range(0, tokens, length)]


def corpus_lengths(tokens: int, rows: int = 1) -> list[list[int]]:
    """Documents that fill rows of so many tokens each, as drawn one after the other; the last of a row ends with it."""
    generator = torch.Generator().manual_seed(0)
    filled = []
    for _ in range(rows):
        lengths: list[int] = []
        while (left := tokens - sum(lengths)) > 0:
            z = torch.randn((), generator=generator, dtype=torch.float64).item()
            drawn = round(MEDIAN * math.exp(SPREAD * z))
            lengths.append(min(max(1, drawn), LONGEST, left))
        filled.append(lengths)
    return filled


def cu_seqlens_of(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 (documents + 1): 0, the first length, the first two together, and so on."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def places_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """int32 (tokens) each: the number of each token's document, and the token's place in it; waits for nothing."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, token, right=True, out_int32=True) - 1
    return number, token - cu_seqlens[number]
