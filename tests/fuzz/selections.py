"""Cases of selected_attention and topk_attention, whose tokens have chosen blocks of keys, or single ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_sparse import selected_attention, topk_attention

from . import reference
from .blocks import HEAD_DIMS, over_keys
from .cases import Case, Draw
from .documents import draw_documents
from .meanings import Attention, Tensors

TOKENS = (20, 33, 64, 1, 2, 7, 100, 129, 160)


def attention(draw: Draw, skew: float) -> Case:
    block = draw.pick("block", (16, 16, 16, 32, 64, 128))
    return _drawn(draw, skew, selected_attention, block, draw.dtype(float64_on_cuda=False))


def lists(draw: Draw, skew: float) -> Case:
    return _drawn(draw, skew, topk_attention, draw.pick("granularity", (1, 1, 2, 4, 4, 8)), draw.dtype())


def _drawn(draw: Draw, skew: float, function: Callable, block: int, dtype: torch.dtype) -> Case:
    of_lists = function is topk_attention
    keys, group, key_heads = draw.pick("keys", TOKENS), draw.pick("group", (1, 2, 3, 4, 8, 16)), draw.size("", (1, 2))
    group = draw.pick("", (group, group, 64)) if of_lists else group
    heads, depth = group * key_heads, draw.pick("head size", HEAD_DIMS)
    of_value = draw.pick("head size of value", (depth, *HEAD_DIMS)) if of_lists else depth
    cu_seqlens = draw_documents(draw, keys).cu_seqlens if draw.maybe(0.25) else None
    packed = cu_seqlens is not None
    tokens = keys if packed else draw.pick("queries", (1, 3, 16, 17, 50, keys))
    batch = 1 if packed else draw.size("batch", (1, 2, 2))
    offset: int | Tensor = 0
    if not packed and draw.maybe(0.5):
        offsets = [draw.random.randint(0, keys) for _ in range(batch if batch and draw.maybe(0.5) else 1)]
        offset = torch.tensor(offsets, dtype=draw.pick("", (torch.int32, torch.int64))) if len(offsets) > 1 else keys
        draw.words["query_offset"] = str(offset)
    of_heads = draw.pick("chosen by heads", (1, key_heads, heads)) if heads else 1
    columns, listed = -(-keys // block), draw.pick("k", (1, 2, 3, 9, *(30, 70) * of_lists))
    shape = (batch if draw.maybe(0.7) else 1, of_heads, tokens, listed)
    chosen = torch.randint(-1, columns + 2 * (packed or of_lists), shape, generator=draw.numbers)
    chosen = chosen.to(draw.pick("numbers", (torch.int32, torch.int64)))
    draw.words["chosen"] = f"{shape}"
    if draw.maybe(0.3):
        chosen = torch.where(draw.uniform(*shape[:3], 1) < 0.5, chosen, -1)
    tensors: Tensors = {"query": draw.values("query", (batch, heads, tokens, depth), dtype)}
    for name, size in {"key": depth, "value": of_value}.items():
        tensors[name] = draw.values(name, (batch, key_heads, keys, size), dtype)
    if not packed and not of_lists and draw.maybe(0.3):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", (batch if draw.maybe(0.7) else 1, keys), dtype)
    if draw.maybe(0.25):
        tensors["sinks"] = draw.values("sinks", (heads,), dtype)
    return attention_case(
        tensors, chosen, block, scale=draw.scale(), causal=draw.pick("causal", (False, True)), offset=offset,
        cu_seqlens=cu_seqlens, tokens_first=packed and draw.maybe(0.7), return_lse=draw.pick("lse", (False, True)),
        skew=skew, function=function, grads=draw.grads(), words=draw.words,
    )  # fmt: skip


def attention_case(
    tensors: Tensors, chosen: Tensor, block: int, *, scale: float | None = None, causal: bool = False,
    offset: int | Tensor = 0, cu_seqlens: Tensor | None = None, tokens_first: bool = False, return_lse: bool = True,
    skew: float = 1.0, function: Callable = selected_attention, **of_case: Any,
) -> Case:  # fmt: skip
    """The function, selected_attention or topk_attention, of operands by name, with a "key_padding_mask" and "sinks";
    tokens_first: packed documents as (T, H, D)."""
    (_, heads, tokens, depth), keys = tensors["query"].shape, tensors["key"].shape[2]
    factor = depth**-0.5 if scale is None else scale
    options: dict[str, Any] = {"scale": factor * skew if skew != 1 else scale, "causal": causal}

    def folded(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1) if tokens_first else x

    def call(given: Tensors) -> Tensors:
        device = given["query"].device
        more = {name: x if x.dim() < 3 else folded(x) for name, x in given.items()} | options
        if cu_seqlens is not None:
            more["cu_seqlens"] = cu_seqlens.to(device)
        else:
            more["query_offset"] = offset.to(device) if isinstance(offset, Tensor) else offset
        operands = [more.pop(name) for name in ("query", "key", "value")]
        found = function(*operands, folded(chosen.to(device)), block, return_lse=return_lse, **more)
        results = dict(zip(("output", "lse"), found)) if return_lse else {"output": found}
        return {name: x.transpose(0, 1)[None] if tokens_first else x for name, x in results.items()}

    if cu_seqlens is None:
        offsets = offset.tolist() if isinstance(offset, Tensor) else [offset]
        before = torch.stack([reference.before(tokens, keys, at)[None] for at in offsets])
        seen = seen_blocks(chosen, block, keys)
    else:
        before, seen = reference.before(tokens, keys), torch.zeros(*chosen.shape[:3], keys, dtype=torch.bool)
        for first, end in pairwise(cu_seqlens.tolist()):
            seen[:, :, first:end, first:end] = seen_blocks(chosen[:, :, first:end], block, end - first)
    seen = seen.repeat_interleave(heads // chosen.shape[1], 1)
    sinks, biases = tensors.get("sinks"), {"key_padding_mask": over_keys} if "key_padding_mask" in tensors else {}
    meaning = Attention(
        ("query", "key", "value"), seen & before if causal else seen, factor, biases, with_lse=return_lse,
        sinks=sinks is not None, bias_dtype=torch.float64 if sinks is None else sinks.dtype,
        shares=function is topk_attention,
    )  # fmt: skip
    wanted = of_case.pop("wanted", tuple(name for name in tensors if name != "key_padding_mask"))
    return Case(function.__name__, tensors["query"].dtype, tensors, wanted, call, meaning, **of_case)


def seen_blocks(chosen: Tensor, block: int, keys: int) -> Tensor:
    """bool (..., T, S): which keys the tokens see that have chosen the blocks (..., T, k)."""
    seen = (chosen.unsqueeze(-1) == torch.arange(-(-keys // block))).any(-2)
    return seen.repeat_interleave(block, -1)[..., :keys]


OPERATIONS = {"selected_attention": attention, "topk_attention": lists}
