"""Cases of the modes whose queries choose their blocks, by what `sparsify` gives a layer. Numbers that choose are small
integers, so that scores are exact in any order, and nobody but a fault chooses otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from helpers import as_view
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import gelu, linear

from ds_sparse import IndexerSparsityConfig, MobaSparsityConfig, NativeSparsityConfig, reference
from ds_sparse.modules.chosen_attention import learned_attention
from ds_sparse.modules.structured_attention import StructuredAttention

from .bounds import Units
from .cases import VIEWS, Case, Draw
from .documents import draw_documents
from .meanings import Tensors
from .selections import attention_case

TOKENS = (33, 64, 1, 7, 50, 80, 100)


def best_blocks(
    query: Tensor, key: Tensor, block: int, k: int, *, by: str, groups: int, causal: bool, first: int, local: int,
    query_block: int = 1, keep: Tensor | None = None, offset: int | Tensor = 0,
) -> Tensor:  # fmt: skip
    """(B, groups, T / query_block, k): the numbers of the blocks that score highest behind those that are forced."""
    (batch, heads, tokens, _), keys = query.shape, key.shape[2]
    query, key = query.detach().double(), key.detach().double().repeat_interleave(heads // key.shape[1], 1)
    number = torch.arange(-(-keys // block))
    of_block = torch.arange(keys) // block == number[:, None]
    keep = torch.ones(batch, keys, dtype=torch.bool) if keep is None else keep.expand(batch, keys)
    position = torch.as_tensor(offset).reshape(-1, 1).expand(batch, 1) + torch.arange(tokens)
    begin, end = position[:, ::query_block], position[:, query_block - 1 :: query_block]
    seen = keep[:, None] & (torch.arange(keys) <= end[..., None] if causal else torch.tensor(True))
    there = (seen[:, :, None] & of_block).any(-1).unsqueeze(1)
    if by == "mean":
        members = (of_block & keep[:, None]).double()
        sums = query.unflatten(2, (-1, query_block)).sum(3) @ (members.unsqueeze(1) @ key).mT
        sizes = query_block * members.sum(-1).clamp(min=1)[:, None, None]
        scores = sums.unflatten(1, (groups, -1)).sum(2) / sizes
        can = there & ((number + 1) * block - 1 <= begin[:, None, :, None]) if causal else there
    else:
        scores = (query @ key.mT).masked_fill(~seen[:, None], -torch.inf).unsqueeze(3)
        scores = scores.masked_fill(~of_block, -torch.inf).amax(-1).unflatten(1, (groups, -1)).sum(2)
        can = there
    near = (number > begin[..., None] // block - local) & (
        number <= end[..., None] // block + (not causal) * (local - 1)
    )
    forced = there & ((number < first) | (near if local else torch.tensor(False)))[:, None]
    scores = scores.masked_fill(~can, -torch.inf).masked_fill(forced, torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)
    return best.indices.masked_fill(best.values == -torch.inf, -1)[..., :k]


def moba(draw: Draw, skew: float) -> Case:
    return _of_selected(draw, skew, MobaSparsityConfig)


def indexer(draw: Draw, skew: float) -> Case:
    return _of_selected(draw, skew, IndexerSparsityConfig)


def _of_selected(draw: Draw, skew: float, cls: type) -> Case:
    """A mode whose layers compute `selected_attention` on what they choose."""
    learns, dtype = cls is IndexerSparsityConfig, draw.dtype(float64_on_cuda=False)
    block, key_heads = draw.pick("block", (16, 16, 32)), draw.pick("key heads", (1, 2))
    heads, depth = key_heads * draw.pick("group", (1, 2, 3, 4)), draw.pick("head size", (16, 8, 3, 32, 64))
    by_blocks = not learns and draw.maybe(0.3)
    causal = not by_blocks and draw.maybe(0.6)
    first, around = draw.pick("first", (0, 0, 1)), draw.pick("local", (1, 1, 2))
    says_causal = causal and draw.maybe(0.5)  # the structure; else the layer
    forced = first + (around if says_causal else 2 * around - 1)
    options: dict[str, Any] = {
        "causal": says_causal,
        "num_first_blocks": first, "num_sliding_window_blocks": 2 * around - 1,
        "num_chosen_blocks": forced + draw.pick("chosen", (0, 1, 2, 5)), "block": block,
    }  # fmt: skip
    if learns:
        options |= {"index_dim": min(8, depth), "index_heads": draw.pick("index heads", ("group", "head", "one"))}
        groups = {"group": key_heads, "head": heads, "one": 1}[options["index_heads"]]
    else:
        options |= {"selection": "block" if by_blocks else "token", "chosen_by_group": draw.maybe(0.5)}
        groups = key_heads if options["chosen_by_group"] else heads
    draw.words["structure"] = str(options)
    structure = cls(num_heads=heads, **options)
    attention = StructuredAttention(structure, 256, gives_learned=True)

    tokens = draw.pick("tokens", TOKENS)
    tokens = -(-tokens // block) * block if by_blocks else tokens  # whole blocks of queries, whose means are exact
    packed = not by_blocks and draw.maybe(0.25)
    cu_seqlens = draw_documents(draw, tokens).cu_seqlens if packed else None
    batch, queries, offset = 1 if packed else draw.pick("batch", (1, 2)), tokens, 0
    if not packed and causal and draw.maybe(0.3):
        queries = draw.pick("queries", [n for n in (1, 3, 20) if n <= tokens])
        offset = tokens - queries
    whole = torch.randint(-2, 3, (2, batch, heads, tokens, depth), generator=draw.numbers).to(dtype)
    tensors: Tensors = {
        "query": as_view(whole[0, :, :, offset:], draw.pick("strides", VIEWS)),
        "key": as_view(whole[1, :, :key_heads], draw.pick("", VIEWS)),
        "value": draw.values("value", (batch, key_heads, tokens, depth), dtype),
    }
    keep, floats = None, draw.maybe(0.5)
    if not packed and draw.maybe(0.4):
        keep = draw.uniform(batch, tokens) < draw.pick("keys kept", (0.3, 0.7, 0.9))
        tensors["key_padding_mask"] = keep
    if not learns and draw.maybe(0.25):
        tensors["sinks"] = draw.values("sinks", (heads,), dtype)

    query, key = tensors["query"], tensors["key"]
    learned = learned_attention(structure, key_heads, depth).to(dtype) if learns else None
    if learned is not None:
        for weight in (learned.query_weight, learned.key_weight):
            kept = torch.randint(-1, 2, weight.shape, generator=draw.numbers) * (draw.uniform(*weight.shape) < 0.4)
            weight.data.copy_(kept)
        learned.train(draw.maybe(0.5))
        each = max(key_heads, groups) // key_heads
        query, key = (
            x.double().unflatten(1, (groups, -1)).transpose(2, 3).flatten(3) @ weight.double()
            for x, weight in (
                (query, learned.query_weight), (key.repeat_interleave(each, 1), learned.key_weight)
            )
        )  # fmt: skip
    elif by_blocks and keep is not None:
        query = query.masked_fill(~keep[:, None, :, None], 0)
    how: dict[str, Any] = {
        "by": "max" if learns else "mean", "groups": groups, "causal": causal, "first": first, "local": around,
        "query_block": block if by_blocks else 1, "keep": keep, "offset": offset,
    }  # fmt: skip
    k = structure.num_chosen_blocks
    borders = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [
        best_blocks(query[:, :, a : b if packed else None], key[:, :, a:b], block, k, **how)
        for a, b in pairwise(borders)
        if b > a
    ]
    most = max(part.shape[-1] for part in parts)
    parts = [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in parts]
    chosen = torch.cat(parts, 2)
    if by_blocks:
        chosen = chosen.repeat_interleave(block, 2)[:, :, :tokens]

    def call(query: Tensor, key: Tensor, value: Tensor, *_: Any, return_lse: bool, **more: Any) -> Tensor:
        padding = more.get("key_padding_mask")
        if padding is not None and floats:
            more["key_padding_mask"] = torch.where(padding, 0.0, -10000.0).to(query.dtype)
        more["causal"] = causal and not says_causal
        more["query_offset"] = more.get("query_offset") or None
        module = None if learned is None else learned.to(query.device)
        return attention(query, key, value, learned=module, **more)

    call.__name__ = cls.__name__
    return attention_case(
        tensors, chosen, block, scale=draw.scale(), causal=causal, offset=offset, cu_seqlens=cu_seqlens,
        return_lse=False, skew=skew, function=call, grads=draw.grads(), words=draw.words,
    )  # fmt: skip


@dataclass(frozen=True)
class Stated:
    """What plain PyTorch makes of the tensors; errors are those of some thousand roundings."""

    function: Callable[[Tensors], Tensor]
    dtype: torch.dtype

    def results(self, given: Tensors) -> Tensors:
        return {"output": self.function(given)}

    def errors(self, given: Tensors, grads: Tensors, exact: Tensors, units: Units) -> Tensors:
        eps = torch.finfo(self.dtype).eps
        return {name: torch.full_like(x, 2**12 * eps * max(1.0, x.abs().amax().item())) for name, x in exact.items()}


def native(draw: Draw, skew: float) -> Case:
    """NSA, in float64 on the CPU. On a GPU all blocks are chosen, as scores in float32 may be nearer than they are
    right."""
    dtype = torch.float64 if draw.device == "cpu" else torch.float32
    key_heads, depth = draw.pick("key heads", (1, 2)), draw.pick("head size", (8, 16, 3))
    heads = key_heads * draw.pick("group", (1, 2, 3))
    packed = draw.maybe(0.3)
    stride = draw.pick("stride", (8, 16) if packed else (4, 8, 2))
    length, tokens = stride * draw.pick("strides", (1, 2)), draw.pick("tokens", TOKENS[:-1])
    first, around = draw.pick("first", (0, 1)), draw.pick("local", (1, 2))
    k = first + around + draw.pick("chosen", (0, 1, 2)) if draw.device == "cpu" else 16
    options = {
        "block": 16, "num_chosen_blocks": k, "num_first_blocks": first, "num_sliding_window_blocks": 2 * around - 1,
        "compressed_length": length, "compressed_stride": stride, "window": draw.pick("window", (1, 9, 200)),
    }  # fmt: skip
    structure = NativeSparsityConfig(num_heads=heads, causal=True, **options)
    attention = StructuredAttention(structure, 256, gives_learned=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.random.getrandbits(40))
        learned = learned_attention(structure, key_heads, depth)
        torch.nn.init.normal_(learned.gate_weight)
    learned = learned.to(dtype)
    cu_seqlens = draw_documents(draw, tokens).cu_seqlens if packed else None
    batch = 1 if packed else draw.pick("batch", (1, 2))
    shapes = {"query": heads, "key": key_heads, "value": key_heads}
    tensors = {
        name: torch.randn(batch, n, tokens, depth, generator=draw.numbers, dtype=torch.float64).to(dtype)
        for name, n in shapes.items()
    }
    tensors |= {name: x.detach().clone() for name, x in learned.named_parameters()}
    if not packed and draw.maybe(0.4):
        tensors["key_padding_mask"] = draw.uniform(batch, tokens) < draw.pick("keys kept", (0.3, 0.7, 0.9))
    scale = draw.pick("scale", (None, 0.3, -0.5, 1.0))
    factor = depth**-0.5 if scale is None else scale

    def call(given: Tensors) -> Tensors:
        given = dict(given)
        operands = [given.pop(name) for name in shapes]
        padding, device = given.pop("key_padding_mask", None), operands[0].device
        more = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.to(device)}

        def of_parameters(*operands: Tensor, **options: Any) -> Tensor:
            return functional_call(learned.to(device), given, operands, options)

        return {
            "output": attention(
                *operands, learned=of_parameters, key_padding_mask=padding, scale=factor * skew, **more
            )
        }  # fmt: skip

    def compressed(given: Tensors, name: str, x: Tensor) -> Tensor:
        at = [x[:, :, i : i + length] for i in range(0, x.shape[2] - length + 1, stride)]
        weights = [given[f"compress_{name}.{of}"] for of in ("position", "mlp.0.weight", "mlp.0.bias", "mlp.2.weight")]
        found = [linear(gelu(linear((y + weights[0]).flatten(2), *weights[1:3])), weights[3]) for y in at]
        return torch.stack(found, 2) if found else x[:, :, :0]

    def stated(given: Tensors) -> Tensor:
        borders = [0, tokens] if cu_seqlens is None else cu_seqlens.tolist()
        outputs = []
        for a, b in pairwise(borders):
            if a == b:
                continue
            query, key, value = (given[name][:, :, a:b] for name in shapes)
            gates = torch.sigmoid(query @ given["gate_weight"] + given["gate_bias"])
            of_document = reference.nsa(
                query, key, value, compressed(given, "key", key), compressed(given, "value", value), key, value, gates,
                16, k, length, stride, options["window"], first, around, factor, given.get("key_padding_mask"),
            )  # fmt: skip
            outputs.append(of_document)
        return torch.cat(outputs, 2)

    wanted = tuple(name for name in tensors if name != "key_padding_mask")
    return Case(
        "NativeSparsityConfig", dtype, tensors, wanted, call, Stated(stated, dtype), draw.grads(),
        draw.words | {"structure": str(options)},
    )  # fmt: skip


OPERATIONS = {"mode moba": moba, "mode indexer": indexer, "mode nsa": native}
