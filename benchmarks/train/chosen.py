"""Arms whose attention is a `sparse_attention` block of the JSON, and what the queries of a trained model choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ds_sparse import record_choices
from ds_sparse.bench.selected import NEIGHBOURS
from ds_sparse.config import SparseAttentionConfigError, parse_sparse_attention_layers
from ds_sparse.modules.choices import Choice
from ds_sparse.tools.arguments import UsageError

from .models import require_arm
from .results import DENSE, MODELS, Case

Blocks = Mapping[str, dict[str, Any]]
"""Kinds of attention, and the block of each; a dense one may be there with an empty one."""

ROWS = 64
"""Queries of a sequence whose attention is computed on all keys."""


def sizes(case: Case, chosen: int) -> dict[str, int]:
    """Keys of blocks that queries choose: so many of 64 keys, in quick runs 5 of 16."""
    block, number = (16, 5) if case.quick else (64, chosen)
    return {"block": block, "num_chosen_blocks": number}


def default_arms(case: Case, blocks: Blocks) -> list[str]:
    return [f"{kind}-{case.document_tokens}" for kind in (DENSE, *blocks)]


def require(case: Case, blocks: Blocks) -> None:
    """Raises UsageError where the case's arm is none of `blocks` or dense, or its sequences do not fit."""
    attention = require_arm(case, case.arm, tuple(dict.fromkeys([DENSE, *blocks])))
    if block := blocks.get(attention.kind):
        heads, layers = (MODELS[case.model][name] for name in ("num_attention_heads", "num_hidden_layers"))
        source = f"--arms {case.arm}"
        try:
            parse_sparse_attention_layers(block, heads, layers, source=source, seq_len=attention.length)
        except SparseAttentionConfigError as error:
            raise UsageError(str(error)) from None


def of(choice: Choice, numbers: Tensor) -> Tensor:
    """bool (..., blocks), of numbers of blocks (..., k): those that are there."""
    blocks = -(-choice.keys // choice.block)
    found = numbers.new_zeros(*numbers.shape[:-1], blocks + 1, dtype=torch.bool)
    return found.scatter_(-1, numbers.where(numbers >= 0, blocks).long(), True)[..., :-1]


def together(choice: Choice) -> float:
    """Different blocks that `NEIGHBOURS` tokens choose together, on average."""
    whole = choice.tokens // NEIGHBOURS * NEIGHBOURS
    of_neighbours = of(choice, choice.block_indices[:, :, :whole]).unflatten(2, (-1, NEIGHBOURS)).any(3)
    return of_neighbours.sum(-1).double().mean().item()


def mass(choice: Choice) -> tuple[float, float]:
    """The part of dense attention, the mean of a chooser's heads, that falls on the chosen blocks, and the most that
    falls on as many: means of `ROWS` queries, which see more blocks than they choose if any do.

    Args:
        choice: with its operands.
    """
    assert choice.query is not None and choice.key is not None
    numbers, tokens, block = choice.block_indices, choice.tokens, choice.block
    chosen, device = numbers.shape[-1], choice.query.device
    first = min(chosen * block, tokens - 1) if choice.causal else 0
    rows = torch.linspace(first, tokens - 1, ROWS, device=device).long()
    group = choice.heads // choice.key.shape[1]
    query, key = choice.query[:, :, rows].float(), choice.key.float().repeat_interleave(group, 1)
    with torch.autocast(device.type, enabled=False):
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if choice.scale is None else choice.scale)
    places = torch.arange(tokens, device=device)
    if choice.causal:
        scores = scores.masked_fill(places > rows[:, None], -torch.inf)
    if choice.key_padding_mask is not None:
        scores = scores.masked_fill(~choice.key_padding_mask[:, None, None], -torch.inf)
    of_keys = pad(scores.softmax(-1), (0, -tokens % block))
    of_blocks = of_keys.unflatten(-1, (-1, block)).sum(-1)
    of_blocks = of_blocks.unflatten(1, (numbers.shape[1], -1)).mean(2)
    taken = (of_blocks * of(choice, numbers[:, :, rows])).sum(-1)
    most = of_blocks.topk(min(chosen, of_blocks.shape[-1])).values.sum(-1)
    return taken.mean().item(), most.mean().item()


def measures(model: nn.Module, **inputs: Any) -> dict[str, float]:
    """What tokens choose in a call, the mean of layers; nothing of a model whose tokens do not choose."""
    with record_choices(model, keep_operands=True) as choices:
        model(**inputs)
    found = [choice for choice in choices.values() if choice.query_block == 1]
    if not found:
        return {}
    taken, most = (mean(of_layers) for of_layers in zip(*map(mass, found)))
    return {"together": mean(list(map(together, found))), "mass": taken, "most_mass": most}


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
