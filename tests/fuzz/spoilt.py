"""Numbers that are not finite, planted in cases of attention: what they may spoil, and what they may not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .cases import Case, Draw
from .meanings import Attention, Tensors, gradient_of

CONTAINS = (
    *("block_sparse_attention", "attention at an offset", "packed attention", "window_attention", "sparse_attn"),
    *("gather_attention", "selected_attention", "topk_attention"),
)
"""Operations that keep such numbers to the rows that see them."""


def planted(draw: Draw, case: Case) -> Case:
    """The case, now and then with such numbers in a few tokens of an operand, or of the output's gradient; or in all
    keys and values that nobody sees, as those of padding and of a cache that is not filled yet."""
    meaning = case.meaning
    if case.operation not in CONTAINS or draw.maybe(0.7) or any(0 in x.shape for x in case.tensors.values()):
        return case
    live = seen(case)
    query, key, value = meaning.operands
    by_heads = live.unflatten(1, (case.tensors[key].shape[1], -1))
    kinds = {
        "key": (key,),
        "value": (value,),
        "both": (key, value),
        "unseen": (key, value),
        "query": (query,),
        "gradient": ("output",),
    }
    kind = draw.pick("not finite", tuple(kinds))
    if kind == "unseen":
        tokens = ~by_heads.any(3).any(2)
    else:
        tokens = torch.zeros(live.shape[:3] if kind in ("query", "gradient") else by_heads[:, :, 0, 0].shape).bool()
        for _ in range(draw.pick("", (1, 1, 3))):
            batch, head, token = (draw.random.randrange(size) for size in tokens.shape)
            tokens[batch, head, 0 if draw.maybe(0.3) else token] = True
    number = draw.pick("", (math.nan, math.nan, math.inf, -math.inf))
    draw.words["not finite"] = f"{number} in {int(tokens.sum())} of {kind}"
    names = [name for name in kinds[kind] if name == "output" or not is_repeated(case.tensors[name])]
    return plant(case, names, tokens, number)


def plant(case: Case, names: Sequence[str], tokens: Tensor, number: float) -> Case:
    """The case with that number in tokens (B, H, T) of these operands, or of "output", which is its gradient."""
    for name in names:
        if name != "output":
            case.tensors[name][tokens] = number
    return replace(case, planted=dict.fromkeys(names, tokens), number=number)


def is_repeated(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


def seen(case: Case) -> Tensor:
    """bool (B, H, T, S): the pairs by which such numbers may get on."""
    meaning = case.meaning
    assert isinstance(meaning, Attention)
    return meaning.live({name: x if x.dtype == torch.bool else x.detach().double() for name, x in case.tensors.items()})


def spoilt(case: Case) -> Tensors:
    """By the name of a result, those of its rows that may be anything, bool, which broadcasts to it."""
    if not case.planted:
        return {}
    live, (query, key, value) = seen(case), case.meaning.operands
    group = live.shape[1] // case.tensors[key].shape[1]
    rows = torch.zeros(live.shape[:3], dtype=torch.bool)
    for name, tokens in case.planted.items():
        if name in (key, value):
            rows |= (live & tokens.repeat_interleave(group, 1).unsqueeze(2)).any(3)
        else:
            rows |= tokens
    keys = (live & rows.unsqueeze(3)).any(2).unflatten(1, (-1, group)).any(2)
    found = {"output": rows.unsqueeze(-1), "lse": rows, gradient_of(query): rows.unsqueeze(-1)}
    found |= {gradient_of(name): keys.unsqueeze(-1) for name in (key, value)}
    return found | {gradient_of(name): rows.any() for name in case.meaning.all_biases}
