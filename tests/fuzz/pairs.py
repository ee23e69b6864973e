"""Cases of operations on lists of token pairs: sparse_attn, its steps in PyTorch, sparse_matmul, sparse_matmul_vo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import Pairs
from torch import Tensor

import ds_sparse
from ds_sparse import TokenIndex

from .cases import DENSITIES, Case, Draw
from .documents import Documents, draw_documents
from .meanings import Attention, Product, Tensors
from .reference import as_bias

DEPTHS = (16, 32, 8, 1, 3, 20, 64, 100, 128)
STEPS = ("gather_attention", "jagged_attention", "torch_sparse_attention")


def draw_lists(draw: Draw, batch: int, heads: int, tokens: int, keys: int, repeated: bool) -> Pairs:
    own_batch, own_heads = batch if batch and draw.maybe(0.3) else 1, heads if heads and draw.maybe(0.5) else 1
    density, pairs = draw.pick("density of pairs", DENSITIES), []
    for _ in range(own_batch * own_heads):
        listed = (draw.uniform(tokens, keys) < density).nonzero()
        if repeated and len(listed) and draw.maybe(0.3):
            listed = torch.cat([listed, listed[torch.randint(len(listed), (5,), generator=draw.numbers)]])
        pairs.append(listed[torch.randperm(len(listed), generator=draw.numbers)])
    draw.words["lists"] = f"{own_batch} x {own_heads} of {[len(x) for x in pairs]} pairs"
    return Pairs(tuple(pairs), own_batch, own_heads, tokens, keys)


def moved(given: Any, device: str) -> Any:
    """Tensors of nested lists, or an index, there."""
    if isinstance(given, list):
        return [moved(x, device) for x in given]
    return given.to(device)


def rows_given(
    draw: Draw, lists: Pairs, forms: tuple[str, ...] = ("lists", "lists", "padded", "TokenIndex")
) -> Callable[[str], tuple[Any, ...]]:
    """values and offsets, or an index in place of both, on a device."""
    form = draw.pick("lists as", forms)
    dtype = draw.pick("", (torch.int64, torch.int32))
    values, ends = lists.csr(pointer=draw.maybe(0.4))
    values, ends = [x.to(dtype) for x in values], [x.to(dtype) for x in ends]
    if form == "padded" and len(lists.lists) > 1:
        stacked = torch.stack(ends)
        stacked = stacked.view(lists.batch, lists.heads, -1) if lists.batch > 1 else stacked
        return lambda device: (lists.stacked(values, 7).to(device), stacked.to(device))
    given = lists.nested(values), lists.nested(ends)
    if form == "TokenIndex":
        return lambda device: (TokenIndex.from_csr(*given, lists.queries, lists.keys).to(device),)
    return lambda device: tuple(moved(x, device) for x in given)


@dataclass(frozen=True)
class Sizes:
    """Of operands, and how dimensions before the tokens are given: "as they are", none, one or three; or behind them,
    of packed documents."""

    batch: int
    heads: int
    tokens: int
    keys: int
    depth: int
    lead: str

    def folded(self, x: Tensor) -> Tensor:
        return {
            "none": lambda: x[0, 0], "one": lambda: x[0], "three": lambda: x[None],
            "tokens first": lambda: x[0].transpose(0, 1),
        }.get(self.lead, lambda: x)()  # fmt: skip

    def unfolded(self, x: Tensor) -> Tensor:
        return {
            "none": lambda: x[None, None], "one": lambda: x[None], "three": lambda: x[0],
            "tokens first": lambda: x.transpose(0, 1)[None],
        }.get(self.lead, lambda: x)()  # fmt: skip


def documents_and_sizes(draw: Draw, sizes: Sizes) -> tuple[Documents | None, Sizes]:
    """Documents, now and then, where the operands may be a row of them; how the operands are given then."""
    if sizes.batch != 1 or sizes.tokens != sizes.keys or sizes.tokens == 0 or draw.maybe(0.6):
        return None, sizes
    return draw_documents(draw, sizes.tokens), replace(
        sizes, lead=draw.pick("dimensions before", ("as they are", "tokens first"))
    )


def draw_sizes(draw: Draw) -> Sizes:
    batch, heads = draw.size("batch", (1, 1, 2, 3)), draw.size("heads", (1, 2, 3))
    tokens = draw.size("tokens", (17, 33, 64, 1, 5, 90))
    keys = tokens if draw.maybe(0.5) else draw.size("keys", (20, 64, 1, 7))
    leads = ["as they are", "three"] + ["one"] * (batch == 1) + ["none"] * (batch == heads == 1)
    return Sizes(batch, heads, tokens, keys, draw.pick("head size", DEPTHS), draw.pick("dimensions before", leads))


def operands(draw: Draw, sizes: Sizes, dtype: torch.dtype, width: int | None = None) -> Tensors:
    tensors = {"q": draw.values("q", (sizes.batch, sizes.heads, sizes.tokens, sizes.depth), dtype)}
    tensors["k"] = draw.values("k", (sizes.batch, sizes.heads, sizes.keys, sizes.depth), dtype)
    if width is not None:
        tensors["v"] = draw.values("v", (sizes.batch, sizes.heads, sizes.keys, width), dtype)
    return tensors


def attention_of(draw: Draw, skew: float, name: str) -> Case:
    """sparse_attn, or one of its steps, which have no lse."""
    dtype = draw.pick("dtype", (torch.float32, torch.float64)) if name == "torch_sparse_attention" else draw.dtype()
    sizes = draw_sizes(draw)
    width = sizes.depth if draw.maybe(0.7) else draw.pick("head size of values", DEPTHS)
    tensors = operands(draw, sizes, dtype, width)
    lists = draw_lists(
        draw, sizes.batch, sizes.heads, sizes.tokens, sizes.keys, repeated=name != "torch_sparse_attention"
    )
    documents, sizes = documents_and_sizes(draw, sizes)
    needs_index = documents is not None and documents.layout == "own"
    lists_on = rows_given(draw, lists, ("TokenIndex",)) if needs_index else rows_given(draw, lists)
    scale, is_native = draw.scale(), name == "sparse_attn"
    with_lse = is_native and draw.pick("lse", (False, True))
    is_mapped = is_native and sizes.batch > 0 and lists.batch == 1 and documents is None and draw.maybe(0.3)
    if is_mapped:
        sizes = replace(sizes, lead="as they are")
        draw.words["dimensions before"] = "vmap"
    return attention_case(
        name, tensors, lists, lists_on, sizes, documents, scale=scale, return_lse=with_lse, skew=skew,
        is_mapped=is_mapped, grads=draw.grads(), words=draw.words,
    )  # fmt: skip


def attention_case(
    name: str, tensors: Tensors, lists: Pairs, lists_on: Callable[[str], tuple[Any, ...]] | None = None,
    sizes: Sizes | None = None, documents: Documents | None = None, *, scale: float | None = None,
    return_lse: bool = False, skew: float = 1.0, is_mapped: bool = False, **of_case: Any,
) -> Case:  # fmt: skip
    """An attention of "q", "k" and "v" (B, H, tokens, D) over pairs; the index is of `lists` where nothing else is."""
    depth, is_native = tensors["q"].shape[-1], name == "sparse_attn"
    factor = depth**-0.5 if scale is None else scale

    def call(given: Tensors) -> Tensors:
        device = str(given["q"].device)
        folded = [x if sizes is None else sizes.folded(x) for x in given.values()]
        options = {"scale": factor * skew if skew != 1 else scale} | ({"return_lse": return_lse} if is_native else {})
        options |= {} if documents is None else documents.options(device)
        given_lists = (index_of(lists).to(device),) if lists_on is None else lists_on(device)

        def operation(*x: Tensor) -> Any:
            return getattr(ds_sparse, name)(*x, *given_lists, **options)

        found = (torch.vmap(operation) if is_mapped else operation)(*folded)
        results = dict(zip(("output", "lse"), found)) if return_lse else {"output": found}
        return {key: x if sizes is None else sizes.unfolded(x) for key, x in results.items()}

    times = lists.counts.double() if documents is None else documents.of_row(lists.counts.double(), 0)
    meaning = Attention(("q", "k", "v"), times > 0, factor, times=times, with_lse=return_lse)
    wanted = of_case.pop("wanted", ("q", "k", "v"))
    return Case(name, tensors["q"].dtype, tensors, wanted, call, meaning, composed=not is_native, **of_case)


def index_of(lists: Pairs) -> TokenIndex:
    return TokenIndex.from_pairs(lists.nested(list(lists.lists)), lists.queries, lists.keys)


def masked(draw: Draw, skew: float) -> Case:
    dtype, sizes = draw.dtype(), draw_sizes(draw)
    tensors = operands(draw, sizes, dtype, sizes.depth)
    full = (sizes.batch, sizes.heads, sizes.tokens, sizes.keys)
    shape = draw.subset(full, draw.pick("", (2, 4 if sizes.lead in ("as they are", "three") else 2)))
    tensors["mask"], scale = draw.bias("mask", shape, dtype), draw.scale()
    if dtype == torch.float16 and scale is not None:
        scale = max(-0.5, min(scale, 0.5))  # in plain PyTorch, scores of more than 65,504 are infinite
    factor = sizes.depth**-0.5 if scale is None else scale

    def call(given: Tensors) -> Tensors:
        folded = [sizes.folded(given[name]) for name in ("q", "k", "v")]
        output = ds_sparse.masked_attention(*folded, given["mask"], scale=factor * skew if skew != 1 else scale)
        return {"output": sizes.unfolded(output)}

    meaning = Attention(("q", "k", "v"), torch.ones((), dtype=torch.bool), factor, {"mask": as_bias})
    return Case(
        "masked_attention", dtype, tensors, ("q", "k", "v"), call, meaning, draw.grads(), draw.words, composed=True
    )  # fmt: skip


def scores_of(draw: Draw, skew: float, by_rows: bool) -> Case:
    dtype, sizes = draw.dtype(), draw_sizes(draw)
    tensors = operands(draw, sizes, dtype)
    lists = draw_lists(draw, sizes.batch, sizes.heads, sizes.tokens, sizes.keys, repeated=True)
    if by_rows:
        lists_on = rows_given(draw, lists)
    else:
        form, given = draw.pick("lists as", ("lists", "padded", "TokenIndex")), lists.nested(list(lists.lists))
        if form == "padded" and len(lists.lists) > 1:
            given = lists.stacked(list(lists.lists), -1)
        elif form == "TokenIndex":
            given = index_of(lists)
        lists_on = lambda device: (moved(given, device),)  # noqa: E731
    return scores_case(tensors, lists, by_rows, lists_on, sizes, grads=draw.grads(), words=draw.words)


def scores_case(
    tensors: Tensors, lists: Pairs, by_rows: bool, lists_on: Callable[[str], tuple[Any, ...]] | None = None,
    sizes: Sizes | None = None, **of_case: Any,
) -> Case:  # fmt: skip
    """sparse_matmul, or sparse_matmul_vo, of "q" and "k" (B, H, tokens, D)."""
    batch, heads = tensors["q"].shape[:2]
    ordered = [x[x[:, 0].argsort(stable=True)] for x in lists.lists] if by_rows else lists.lists
    of_matrices = [lists.number(*divmod(n, heads)) for n in range(batch * heads)]

    def call(given: Tensors) -> Tensors:
        operation = ds_sparse.sparse_matmul_vo if by_rows else ds_sparse.sparse_matmul
        q, k = (x if sizes is None else sizes.folded(x) for x in (given["q"], given["k"]))
        device = str(q.device)
        given_lists = (index_of(lists).to(device),) if lists_on is None else lists_on(device)
        return {"result": in_order(operation(q, k, *given_lists), lists, ordered, batch, heads)}

    def product(x: list[Tensor]) -> Tensor:
        scores = (x[0] @ x[1].mT).flatten(0, 1)
        found = [scores[n, ordered[place][:, 0], ordered[place][:, 1]] for n, place in enumerate(of_matrices)]
        return torch.cat(found) if found else scores.flatten()[:0]

    name, meaning = "sparse_matmul_vo" if by_rows else "sparse_matmul", Product(("q", "k"), product)
    return Case(name, tensors["q"].dtype, tensors, ("q", "k"), call, meaning, **of_case)


def in_order(found: Any, lists: Pairs, ordered: Sequence[Tensor], batch: int, heads: int) -> Tensor:
    """Scores as they are returned, one sequence's and head's after the other's; what is padded has to be 0."""
    parts = []
    for n in range(batch * heads):
        b, h = divmod(n, heads)
        if isinstance(found, Tensor):
            row = found.reshape(batch * heads, found.shape[-1])[n]
        elif lists.batch == 1:
            row = found[h].reshape(batch, -1)[b]
        else:
            row = found[b][0].reshape(heads, -1)[h] if lists.heads == 1 else found[b][h]
        count = len(ordered[lists.number(b, h)])
        if row[count:].any():
            raise AssertionError("scores behind the end of a list are not 0")
        parts.append(row[:count])
    return torch.cat(parts) if parts else torch.zeros(0, dtype=first_of(found).dtype)


def first_of(found: Any) -> Tensor:
    """The first of them."""
    return found if isinstance(found, Tensor) else first_of(found[0])


OPERATIONS = {
    "sparse_attn": lambda draw, skew: attention_of(draw, skew, "sparse_attn"),
    **{name: lambda draw, skew, name=name: attention_of(draw, skew, name) for name in STEPS},
    "masked_attention": masked,
    "sparse_matmul": lambda draw, skew: scores_of(draw, skew, by_rows=False),
    "sparse_matmul_vo": lambda draw, skew: scores_of(draw, skew, by_rows=True),
}
