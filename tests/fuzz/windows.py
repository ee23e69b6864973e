"""Cases of operations on windows: window_matmul, unwindow_matmul, window_softmax, window_attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import ds_sparse
from ds_sparse import WindowIndex, window_attention

from .blocks import HEAD_DIMS, over_keys
from .cases import Case, Draw
from .documents import Documents, draw_documents
from .meanings import Attention, Product, RowSoftmax, Tensors
from .reference import band_of, dense_of_band, seen_in_windows

TOKENS = (20, 33, 64, 1, 2, 7, 100, 129, 160)
WINDOWS = (0, 1, 2, 3, 8, 17, 32, 64)


def leading(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions before the tokens of two operands, which broadcast."""
    full = [draw.size("", (1, 2, 3, 2)) for _ in range(draw.pick("", (0, 1, 2, 2, 2, 3)))]
    pair = []
    for _ in range(2):
        sizes = tuple(1 if draw.maybe(0.2) else size for size in full)
        pair.append(sizes[draw.random.randrange(len(sizes) + 1) if draw.maybe(0.2) else 0 :])
    return pair[0], pair[1]


def window_size(draw: Draw, tokens: int) -> int:
    return draw.pick("window", [w for w in WINDOWS if w <= 2 * tokens] + [tokens])


def product(draw: Draw, skew: float, name: str) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.size("tokens", TOKENS)
    window, depth = window_size(draw, tokens), draw.size("head size", HEAD_DIMS)
    of_first, of_second = leading(draw)
    if name == "window_matmul":
        tensors = {"a": draw.values("a", (*of_first, tokens, depth), dtype)}
        tensors["b"] = draw.values("b", (*of_second, depth, tokens), dtype)
    else:
        tensors = {"p": draw.values("p", (*of_first, tokens, 2 * window + 1), dtype)}
        tensors["v"] = draw.values("v", (*of_second, tokens, depth), dtype)
    return product_case(name, tensors, window, grads=draw.grads(), words=draw.words)


def product_case(name: str, tensors: Tensors, window: int, **of_case: Any) -> Case:
    """window_matmul of "a" and "b", or unwindow_matmul of "p" and "v"."""
    operands = tuple(tensors)

    def call(given: Tensors) -> Tensors:
        return {"result": getattr(ds_sparse, name)(*given.values(), window)}

    def result(x: list[Tensor]) -> Tensor:
        return band_of(x[0] @ x[1], window) if name == "window_matmul" else dense_of_band(x[0]) @ x[1]

    meaning = Product(operands, result)
    return Case(name, tensors[operands[0]].dtype, tensors, of_case.pop("wanted", operands), call, meaning, **of_case)


def softmax(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.size("tokens", TOKENS)
    batch, heads = draw.size("batch", (1, 2, 3)), draw.size("heads", (1, 2, 3))
    windows = [window_size(draw, tokens) for _ in range(heads if heads and draw.maybe(0.4) else 1)]
    draw.words["window"] = windows
    tensors: Tensors = {"scores": draw.values("scores", (batch, heads, tokens, 2 * max(windows) + 1), dtype)}
    if draw.maybe(0.5):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", (batch if draw.maybe(0.7) else 1, tokens), dtype)
    scale, causal = draw.scale(), draw.pick("causal", (False, True))
    flat = len(tensors) == len(windows) == 1 and draw.maybe(0.2) and batch == heads == 1
    return softmax_case(
        tensors, windows, 1.0 if scale is None else scale, causal, skew, flat, grads=draw.grads(), words=draw.words
    )


def softmax_case(
    tensors: Tensors, windows: list[int], scale: float = 1.0, causal: bool = False, skew: float = 1.0,
    flat: bool = False, **of_case: Any,
) -> Case:  # fmt: skip
    """window_softmax of "scores", with a "key_padding_mask"; flat: of one matrix."""

    def call(given: Tensors) -> Tensors:
        scores, sizes = given["scores"], windows[0] if len(windows) == 1 else windows
        options = {"scale": scale * skew, "causal": causal, "key_padding_mask": given.get("key_padding_mask")}
        probs = ds_sparse.window_softmax(scores[0, 0] if flat else scores, sizes, **options)
        return {"probs": probs[None, None] if flat else probs}

    biases = {"key_padding_mask": over_keys} if "key_padding_mask" in tensors else {}
    seen = seen_in_windows(tensors["scores"].shape[2], windows, [1], [], causal)
    meaning = RowSoftmax("scores", dense_of_band, lambda x: band_of(x, max(windows)), seen, scale, biases)
    return Case("window_softmax", tensors["scores"].dtype, tensors, ("scores",), call, meaning, **of_case)


def attention(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.pick("tokens", TOKENS)
    group, key_heads = draw.pick("group", (1, 1, 2)), draw.size("key heads", (1, 2, 2))
    batch, depth, heads = draw.size("batch", (1, 2, 2)), draw.pick("head size", HEAD_DIMS), group * key_heads
    documents = draw_documents(draw, tokens) if draw.maybe(0.25) else None
    at_offset = documents is None and draw.maybe(0.3)
    queries = min(draw.pick("queries", (1, 3, 16, 17, 30)), tokens) if at_offset else tokens
    offset = draw.random.randint(0, tokens - queries) if at_offset else None
    draw.words["query_offset"] = offset
    tensors: Tensors = {"query": draw.values("query", (batch, heads, queries, depth), dtype)}
    for name in ("key", "value"):
        tensors[name] = draw.values(name, (batch, key_heads, tokens, depth), dtype)

    def of_heads(name: str, choices: tuple[int, ...]) -> list[int]:
        drawn = [draw.random.choice(choices) for _ in range(heads if heads and draw.maybe(0.4) else 1)]
        draw.words[name] = drawn
        return drawn

    windows = of_heads("window", WINDOWS)
    dilations = [1] if at_offset else of_heads("dilation", (1, 1, 1, 2, 3, 40))
    number = 0 if at_offset or documents else draw.pick("", (0, 0, 1, 3))
    draw.words["global tokens"] = chosen = draw.random.sample(range(tokens), min(tokens, number))
    causal, scale = draw.pick("causal", (False, True)), draw.scale()
    as_index = not at_offset and draw.pick("WindowIndex", (False, True))
    if draw.maybe(0.4):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", (batch if draw.maybe(0.7) else 1, tokens), dtype)
    if draw.maybe(0.25):
        tensors["sinks"] = draw.values("sinks", (heads,), dtype)
    adds = "key_padding_mask" in tensors and tensors["key_padding_mask"].dtype != torch.bool
    return attention_case(
        tensors, windows, causal, chosen, dilations, scale=scale, softcap=0.0 if adds else draw.softcap(),
        documents=documents, offset=offset, as_index=as_index, skew=skew, grads=draw.grads(), words=draw.words,
    )  # fmt: skip


def attention_case(
    tensors: Tensors, windows: Sequence[int], causal: bool = False, global_tokens: Sequence[int] = (),
    dilations: Sequence[int] = (1,), *, scale: float | None = None, softcap: float = 0.0,
    documents: Documents | None = None, offset: int | None = None, as_index: bool = False, skew: float = 1.0,
    block: int | None = None, **of_case: Any,
) -> Case:  # fmt: skip
    """window_attention of operands by name, with a "key_padding_mask" and "sinks"; block: of the index."""
    (_, heads, queries, depth), tokens = tensors["query"].shape, tensors["key"].shape[2]
    factor = depth**-0.5 if scale is None else scale

    def plain(numbers: Sequence[int]) -> Any:
        return numbers[0] if len(numbers) == 1 else list(numbers)

    def call(given: Tensors) -> Tensors:
        operands = [given[name] for name in ("query", "key", "value")]
        options = {name: given.get(name) for name in ("key_padding_mask", "sinks")}
        options |= {"scale": factor * skew if skew != 1 else scale, "softcap": softcap}
        device = operands[0].device
        numbers = {"causal": causal, "global_tokens": list(global_tokens) or None, "dilation": plain(dilations)}
        if documents is not None:
            numbers["cu_seqlens"] = documents.cu_seqlens.to(device)
        if as_index:
            of_index = {} if block is None else {"block": block}
            index = WindowIndex.build(tokens, plain(windows), **numbers, **of_index, device=device)
            return {"output": window_attention(*operands, index, **options)}
        numbers |= {} if offset is None else {"query_offset": offset}
        return {"output": window_attention(*operands, plain(windows), **numbers, **options)}

    first = offset or 0
    seen = seen_in_windows(tokens, list(windows), list(dilations), list(global_tokens), causal)
    seen = seen if documents is None else seen & documents.of_row(torch.ones(tokens, tokens).bool(), False)
    # Heads with tokens in an order of their own share no key.
    shares = heads > tensors["key"].shape[1] and max(len(windows), len(dilations)) > 1
    biases = {"key_padding_mask": over_keys} if "key_padding_mask" in tensors else {}
    sinks = tensors.get("sinks")
    meaning = Attention(
        ("query", "key", "value"), seen[:, first : first + queries], factor, biases, shares=shares,
        sinks=sinks is not None, bias_dtype=torch.float64 if sinks is None else sinks.dtype, softcap=softcap,
    )  # fmt: skip
    wanted = tuple(name for name in tensors if name != "key_padding_mask")
    return Case("window_attention", tensors["query"].dtype, tensors, wanted, call, meaning, **of_case)


OPERATIONS = {
    "window_matmul": partial(product, name="window_matmul"),
    "unwindow_matmul": partial(product, name="unwindow_matmul"),
    "window_softmax": softmax,
    "window_attention": attention,
}
