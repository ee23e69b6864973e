"""Cases of operations on windows: window_matmul, unwindow_matmul, window_softmax, window_attention."""

from __future__ import annotations

from typing import Any

import torch

import ds_sparse
from ds_sparse import WindowIndex, window_attention

from .blocks import HEAD_DIMS, over_keys
from .cases import Case, Draw
from .documents import draw_documents
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


def matmul(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.size("tokens", TOKENS)
    window, depth = window_size(draw, tokens), draw.size("head size", HEAD_DIMS)
    of_a, of_b = leading(draw)
    a, b = draw.values("a", (*of_a, tokens, depth), dtype), draw.values("b", (*of_b, depth, tokens), dtype)

    def call(given: Tensors) -> Tensors:
        return {"result": ds_sparse.window_matmul(given["a"], given["b"], window)}

    meaning = Product(("a", "b"), lambda x: band_of(x[0] @ x[1], window))
    return Case("window_matmul", dtype, {"a": a, "b": b}, ("a", "b"), call, meaning, draw.grads(), draw.words)


def unmatmul(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.size("tokens", TOKENS)
    window, depth = window_size(draw, tokens), draw.size("head size", HEAD_DIMS)
    of_p, of_v = leading(draw)
    p, v = draw.values("p", (*of_p, tokens, 2 * window + 1), dtype), draw.values("v", (*of_v, tokens, depth), dtype)

    def call(given: Tensors) -> Tensors:
        return {"result": ds_sparse.unwindow_matmul(given["p"], given["v"], window)}

    meaning = Product(("p", "v"), lambda x: dense_of_band(x[0]) @ x[1])
    return Case("unwindow_matmul", dtype, {"p": p, "v": v}, ("p", "v"), call, meaning, draw.grads(), draw.words)


def softmax(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.size("tokens", TOKENS)
    batch, heads = draw.size("batch", (1, 2, 3)), draw.size("heads", (1, 2, 3))
    windows = [window_size(draw, tokens) for _ in range(heads if heads and draw.maybe(0.4) else 1)]
    draw.words["window"] = windows
    widest = max(windows)
    tensors: Tensors = {"scores": draw.values("scores", (batch, heads, tokens, 2 * widest + 1), dtype)}
    biases = {}
    if draw.maybe(0.5):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", (batch if draw.maybe(0.7) else 1, tokens), dtype)
        biases["key_padding_mask"] = over_keys
    scale, causal = draw.scale(), draw.pick("causal", (False, True))
    factor = 1.0 if scale is None else scale
    flat = not biases and len(windows) == 1 and draw.maybe(0.2) and batch == heads == 1

    def call(given: Tensors) -> Tensors:
        scores, sizes = given["scores"], windows[0] if len(windows) == 1 else windows
        mask = given.get("key_padding_mask")
        probs = ds_sparse.window_softmax(
            scores[0, 0] if flat else scores, sizes, scale=factor * skew, causal=causal, key_padding_mask=mask
        )
        return {"probs": probs[None, None] if flat else probs}

    seen = seen_in_windows(tokens, windows, [1], [], causal)
    meaning = RowSoftmax("scores", dense_of_band, lambda x: band_of(x, widest), seen, factor, biases)
    return Case("window_softmax", dtype, tensors, ("scores",), call, meaning, draw.grads(), draw.words)


def attention(draw: Draw, skew: float) -> Case:
    dtype, tokens = draw.dtype(float64_on_cuda=False), draw.pick("tokens", TOKENS)
    group, key_heads = draw.pick("group", (1, 1, 2)), draw.size("key heads", (1, 2, 2))
    batch, depth, heads = draw.size("batch", (1, 2, 2)), draw.pick("head size", HEAD_DIMS), group * key_heads
    documents = draw_documents(draw, tokens) if draw.maybe(0.25) else None
    at_offset = documents is None and draw.maybe(0.3)
    queries = min(draw.pick("queries", (1, 3, 16, 17, 30)), tokens) if at_offset else tokens
    offset = draw.random.randint(0, tokens - queries)
    own: dict[str, Any] = {}
    if at_offset:
        own["query_offset"] = draw.words["query_offset"] = offset
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
    chosen = draw.random.sample(range(tokens), min(tokens, number))
    draw.words["global tokens"] = chosen
    causal, scale = draw.pick("causal", (False, True)), draw.scale()
    as_index = not at_offset and draw.pick("WindowIndex", (False, True))
    biases = {}
    if draw.maybe(0.4):
        tensors["key_padding_mask"] = draw.bias("key_padding_mask", (batch if draw.maybe(0.7) else 1, tokens), dtype)
        biases["key_padding_mask"] = over_keys
    factor = depth**-0.5 if scale is None else scale

    def call(given: Tensors) -> Tensors:
        def plain(numbers: list[int]) -> Any:
            return numbers[0] if len(numbers) == 1 else numbers

        operands, mask = [given[name] for name in ("query", "key", "value")], given.get("key_padding_mask")
        numbers: tuple[Any, ...] = (plain(windows), causal, chosen or None, plain(dilations))
        options = {"scale": factor * skew if skew != 1 else scale, "key_padding_mask": mask}
        device = operands[0].device
        if documents is not None:
            own["cu_seqlens"] = documents.cu_seqlens.to(device)
        if as_index:
            index = WindowIndex.build(tokens, *numbers, device=device, **own)
            return {"output": window_attention(*operands, index, **options)}
        window, is_causal, global_tokens, dilation = numbers
        return {
            "output": window_attention(
                *operands, window, is_causal, global_tokens=global_tokens, dilation=dilation, **options, **own
            )
        }

    seen = seen_in_windows(tokens, windows, dilations, chosen, causal)
    seen = seen if documents is None else seen & documents.of_row(torch.ones(tokens, tokens).bool(), False)
    seen = seen[:, offset : offset + queries]
    # Heads with tokens in an order of their own share no key.
    shares = group > 1 and max(len(windows), len(dilations)) > 1
    meaning = Attention(("query", "key", "value"), seen, factor, biases, shares=shares)
    wanted = ("query", "key", "value")
    return Case("window_attention", dtype, tensors, wanted, call, meaning, draw.grads(), draw.words)


OPERATIONS = {
    "window_matmul": matmul,
    "unwindow_matmul": unmatmul,
    "window_softmax": softmax,
    "window_attention": attention,
}
