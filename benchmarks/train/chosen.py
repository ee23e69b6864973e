"""Arms whose attention is a `sparse_attention` block of the JSON, and what the queries of a trained model choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ds_sparse.bench.selected import NEIGHBOURS
from ds_sparse.config import parse_sparse_attention
from ds_sparse.modules import chosen_attention, indexer_attention, native_sparse_attention
from ds_sparse.ops import selected_attention

from .models import require_arm
from .results import DENSE, MODELS, Case

Blocks = Mapping[str, dict[str, Any]]
"""Kinds of attention, and the block of each."""

ROWS = 64
"""Queries of a sequence whose attention is computed on all keys."""


def sizes(case: Case, chosen: int) -> dict[str, int]:
    """Keys of blocks that queries choose: so many of 64 keys, in quick runs 5 of 16."""
    block, number = (16, 5) if case.quick else (64, chosen)
    return {"block": block, "num_chosen_blocks": number}


def default_arms(case: Case, blocks: Blocks) -> list[str]:
    return [f"{kind}-{case.document_tokens}" for kind in (DENSE, *blocks)]


def require(case: Case, blocks: Blocks) -> None:
    """Raises ValueError where the case's arm is none of `blocks` or dense, or its sequences do not fit."""
    attention = require_arm(case, case.arm, (DENSE, *blocks))
    if attention.kind != DENSE:
        heads = MODELS[case.model]["num_attention_heads"]
        parse_sparse_attention(blocks[attention.kind], heads, source=case.arm, seq_len=attention.length)


@dataclass(frozen=True)
class Choice:
    """A call of attention on blocks that tokens have chosen.

    Attributes:
        query, key: (B, H, T, D) and (B, Hkv, T, D).
        numbers: of blocks (B, choosers, T, k), -1 for none; each chooser is for as many heads.
        key_padding_mask: bool (B, T), or None.
    """

    query: Tensor
    key: Tensor
    numbers: Tensor
    block: int
    causal: bool
    scale: float | None
    key_padding_mask: Tensor | None

    def of(self, numbers: Tensor) -> Tensor:
        """bool (..., blocks), of numbers of blocks (..., k): those that are there."""
        blocks = -(-self.key.shape[2] // self.block)
        found = numbers.new_zeros(*numbers.shape[:-1], blocks + 1, dtype=torch.bool)
        return found.scatter_(-1, numbers.where(numbers >= 0, blocks).long(), True)[..., :-1]

    def together(self) -> float:
        """Different blocks that `NEIGHBOURS` tokens choose together, on average."""
        whole = self.numbers.shape[2] // NEIGHBOURS * NEIGHBOURS
        of_neighbours = self.of(self.numbers[:, :, :whole]).unflatten(2, (-1, NEIGHBOURS)).any(3)
        return of_neighbours.sum(-1).double().mean().item()

    def mass(self) -> tuple[float, float]:
        """The part of dense attention, the mean of a chooser's heads, that falls on the chosen blocks, and the most
        that falls on as many: means of `ROWS` queries, which see more blocks than they choose if any do."""
        tokens, chosen = self.query.shape[2], self.numbers.shape[-1]
        first = min(chosen * self.block, tokens - 1) if self.causal else 0
        rows = torch.linspace(first, tokens - 1, ROWS, device=self.query.device).long()
        group = self.query.shape[1] // self.key.shape[1]
        query, key = self.query[:, :, rows].float(), self.key.float().repeat_interleave(group, 1)
        with torch.autocast(query.device.type, enabled=False):
            scores = query @ key.mT * (self.query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        places = torch.arange(tokens, device=rows.device)
        if self.causal:
            scores = scores.masked_fill(places > rows[:, None], -torch.inf)
        if self.key_padding_mask is not None:
            scores = scores.masked_fill(~self.key_padding_mask[:, None, None], -torch.inf)
        of_keys = pad(scores.softmax(-1), (0, -tokens % self.block))
        of_blocks = of_keys.unflatten(-1, (-1, self.block)).sum(-1)
        of_blocks = of_blocks.unflatten(1, (self.numbers.shape[1], -1)).mean(2)
        taken = (of_blocks * self.of(self.numbers[:, :, rows])).sum(-1)
        most = of_blocks.topk(min(chosen, of_blocks.shape[-1])).values.sum(-1)
        return taken.mean().item(), most.mean().item()


@contextmanager
def choices() -> Iterator[list[Choice]]:
    """Keeps what tokens choose in the calls of layers."""
    found: list[Choice] = []

    def keep(query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, block: int, **more: Any) -> Tensor:
        about = more.get("causal", False), more.get("scale"), more.get("key_padding_mask")
        found.append(Choice(query, key, numbers, block, *about))
        return selected_attention(query, key, value, numbers, block, **more)

    with ExitStack() as stack:
        for module in (chosen_attention, indexer_attention, native_sparse_attention):
            stack.enter_context(patch.object(module, "selected_attention", keep))
        yield found


def measures(model: nn.Module, **inputs: Any) -> dict[str, float]:
    """What tokens choose in a call, the mean of layers; nothing of a model whose tokens do not choose."""
    with choices() as found:
        model(**inputs)
    if not found:
        return {}
    taken, most = (mean(of_layers) for of_layers in zip(*(choice.mass() for choice in found)))
    return {"together": mean([choice.together() for choice in found]), "mass": taken, "most_mass": most}


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
