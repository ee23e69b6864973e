"""Every kernel variant on the same input again and again while memory is busy: results have to be the same bits.

A race that shows once in a thousand calls passes tests, memcheck and racecheck; it shows here. On a GPU another stream
copies all the while; on the CPU other threads make the same call. What is compared: results and every gradient, but for
sums that an implementation adds up in any order, which `torch.use_deterministic_algorithms(True)` puts in a fixed one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

import ds_sparse
from ds_sparse import BlockIndex, MatMul, Softmax, TokenIndex, WindowIndex, force_implementation
from ds_sparse.block_sizes import BLOCK_SIZES
from ds_sparse.dispatch import IMPLEMENTATIONS, Call
from ds_sparse.dispatch.implementations import ALL_DTYPES, LIMITS, ON_CUDA

from .modes import cpu_threads, poisoned_memory

HEAD_DIMS = (8, 16, 40, 64, 72, 96, 128, 192, 256)
THREADS = 3
"""That make the same call, on the CPU."""

Run = Callable[[], list[Tensor]]


class Variant(NamedTuple):
    """A kernel, as a call reaches it. deterministic: sums in a fixed order are asked for."""

    operation: str
    implementation: str
    block: int
    head_dim: int
    dtype: torch.dtype
    deterministic: bool

    def __str__(self) -> str:
        order = "sums in a fixed order" if self.deterministic else "sums as they come"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.operation}, {self.implementation}, block {self.block}, head size {self.head_dim}, {dtype}, {order}"
        )


def variants(device: str) -> list[Variant]:
    """All that run on a device: what `IMPLEMENTATIONS` names, and the operations of one implementation."""
    found = []
    for operation, names in CHOSEN_BY.items():
        for implementation in IMPLEMENTATIONS[names]:
            if not LIMITS[0].holds(implementation, Call(torch.device(device), torch.float16, 1)):
                continue
            least, most = implementation.head_dims
            dims = [n for n in HEAD_DIMS if least <= n <= (most or n) and n % implementation.multiple == 0]
            blocks = implementation.tiles or (BLOCK_SIZES if operation in ("sdd", "dsd") else (64,))
            orders = (True, False) if implementation.in_any_order else (True,)
            found += [
                Variant(operation, implementation.name, block, dim, dtype, deterministic)
                for block in blocks
                for dim in dims
                for dtype in implementation.dtypes
                for deterministic in orders
            ]
    only = "portable" if device == "cuda" else "cpu"
    for operation, blocks in {"Softmax": BLOCK_SIZES, "window_softmax": (64,), "unwindow_matmul": (64,)}.items():
        dtypes = ALL_DTYPES if device == "cpu" or operation == "Softmax" else ON_CUDA
        dims = HEAD_DIMS if operation == "unwindow_matmul" else (64,)
        found += [Variant(operation, only, b, dim, dtype, True) for b in blocks for dim in dims for dtype in dtypes]
    return found


CHOSEN_BY = {
    "block_sparse_attention": "block_sparse_attention",
    "window_attention": "block_sparse_attention",
    "sparse_attn": "sparse_attn",
    "sdd": "sdd",
    "dsd": "dsd",
    "window_matmul": "window_matmul",
}
"""Operations, and the entry of `IMPLEMENTATIONS` that says by what they run."""


class Sizes(NamedTuple):
    """Of a call: enough to fill a GPU, or as little as has parts for several threads."""

    batch: int
    heads: int
    tokens: int


def sizes_of(variant: Variant, device: str) -> Sizes:
    if device == "cuda":
        return Sizes(2, 8, 1024 if variant.operation == "sparse_attn" else 2048)
    return Sizes(2, 2, max(3 * variant.block, 96))


def call_of(variant: Variant, device: str, seed: int) -> Run:
    """Forward and backward of a variant on one input, which each call of it takes anew."""
    rng = torch.Generator().manual_seed(seed)
    sizes = sizes_of(variant, device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(device, variant.dtype)

    blocks = -(-sizes.tokens // variant.block)
    live = torch.rand(sizes.heads, blocks, blocks, generator=rng) < min(0.4, 24 / blocks)
    live[:, 0] = live[:, :, 0] = True
    # Tiles without a step wait for nothing but their own copies.
    live[-1, blocks // 2 :] = live[-1, :, blocks // 2 :] = False
    operands, function = OPERATIONS[variant.operation](variant, sizes, live.to(device), drawn)
    in_any_order = "" if variant.deterministic else "query"

    def run() -> list[Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
        results = function(*leaves.values())
        grads = torch.autograd.grad(results, list(leaves.values()), [torch.ones_like(x) for x in results])
        kept = [grad for name, grad in zip(leaves, grads) if name != in_any_order]
        return [x.detach() for x in (*results, *kept)]

    return run


Made = tuple[dict[str, Tensor], Callable[..., tuple[Tensor, ...]]]


def attention_operands(variant: Variant, sizes: Sizes, drawn: Callable[..., Tensor]) -> dict[str, Tensor]:
    shape = (sizes.batch, sizes.heads, sizes.tokens, variant.head_dim)
    return {name: drawn(*shape) for name in ("query", "key", "value")}


def block_attention(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    """Half of the variants with a bias, whose gradient has a kernel of its own."""
    index, operands = BlockIndex.build(live, variant.block), attention_operands(variant, sizes, drawn)
    if variant.head_dim % 16:
        operands["rpe"] = drawn(1, sizes.heads, sizes.tokens, sizes.tokens)

    def function(query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None) -> tuple[Tensor, ...]:
        return ds_sparse.block_sparse_attention(query, key, value, index, rpe=rpe, return_lse=True)

    return operands, function


def window_attention(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    index = WindowIndex.build(
        sizes.tokens, 2 * variant.block + 5, global_tokens=[0, 7], block=variant.block, device=live.device
    )
    operands = attention_operands(variant, sizes, drawn)
    return operands, lambda *operands: (ds_sparse.window_attention(*operands, index),)


def pair_attention(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    index = TokenIndex.from_blocks(BlockIndex.build(live, variant.block), sizes.tokens, sizes.tokens)
    operands = attention_operands(variant, sizes, drawn)
    return operands, lambda *operands: ds_sparse.sparse_attn(*operands, index, return_lse=True)


def sdd(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    tokens = live.shape[1] * variant.block
    operation = MatMul(live, variant.block, "sdd", trans_b=True)
    operands = {name: drawn(sizes.batch, sizes.heads, tokens, variant.head_dim) for name in "ab"}
    return operands, lambda a, b: (operation(a, b),)


def dsd(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    tokens = live.shape[1] * variant.block
    operation = MatMul(live, variant.block, "dsd")
    values = drawn(sizes.batch, int(live.sum()), variant.block, variant.block)
    operands = {"a": values, "b": drawn(sizes.batch, sizes.heads, tokens, variant.head_dim)}
    return operands, lambda a, b: (operation(a, b),)


def softmax(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    operation, tokens = Softmax(live, variant.block), live.shape[1] * variant.block
    operands = {"x": drawn(sizes.batch, int(live.sum()), variant.block, variant.block)}
    operands["rpe"] = drawn(1, 1, tokens, tokens)
    return operands, lambda x, rpe: (operation(x, rpe=rpe),)


WINDOW = 64


def window_matmul(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    operands = {name: drawn(sizes.batch, sizes.heads, sizes.tokens, variant.head_dim) for name in "ab"}
    return operands, lambda a, b: (ds_sparse.window_matmul(a, b.mT, WINDOW),)


def unwindow_matmul(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    operands = {"p": drawn(sizes.batch, sizes.heads, sizes.tokens, 2 * WINDOW + 1)}
    operands["v"] = drawn(sizes.batch, sizes.heads, sizes.tokens, variant.head_dim)
    return operands, lambda p, v: (ds_sparse.unwindow_matmul(p, v, WINDOW),)


def window_softmax(variant: Variant, sizes: Sizes, live: Tensor, drawn: Callable[..., Tensor]) -> Made:
    operands = {"scores": drawn(sizes.batch, sizes.heads, sizes.tokens, 2 * WINDOW + 1)}
    return operands, lambda scores: (ds_sparse.window_softmax(scores, WINDOW),)


OPERATIONS = {
    "block_sparse_attention": block_attention,
    "window_attention": window_attention,
    "sparse_attn": pair_attention,
    "sdd": sdd,
    "dsd": dsd,
    "Softmax": softmax,
    "window_matmul": window_matmul,
    "unwindow_matmul": unwindow_matmul,
    "window_softmax": window_softmax,
}


@contextmanager
def busy_memory(device: str) -> Iterator[Callable[[], None]]:
    """Yields what keeps a GPU's memory busy for the next call; on the CPU threads that call do."""
    if device == "cpu":
        yield lambda: None
        return
    stream, source = torch.cuda.Stream(), torch.ones(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    torch.cuda.synchronize()

    def copy() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                target.copy_(source, non_blocking=True)

    yield copy
    torch.cuda.synchronize()


def differing(run: Run, device: str, repeats: int, busy: Callable[[], None]) -> str:
    """Says which repeat differs from the first call, and where; "" if none does."""
    first = run()
    for number, results in enumerate(repeated(run, device, repeats, busy)):
        for place, (one, other) in enumerate(zip(first, results, strict=True)):
            if not torch.equal(one, other):
                count = int((one != other).sum())
                return f"repeat {number + 1} differs in {count} of {one.numel()} numbers of result {place}"
    return ""


def repeated(run: Run, device: str, repeats: int, busy: Callable[[], None]) -> Iterator[list[Tensor]]:
    if device == "cpu":
        with cpu_threads(2), ThreadPoolExecutor(THREADS) as threads:
            yield from [task.result() for task in [threads.submit(run) for _ in range(repeats)]]
        return
    for _ in range(repeats):
        busy()
        yield run()


def check(variant: Variant, device: str, seed: int, repeats: int, busy: Callable[[], None]) -> str:
    """What is wrong with a variant, in words that repeat it; "" if nothing is."""
    try:
        # Around all threads, as both count for the whole process.
        with (
            poisoned_memory() if variant.deterministic else nullcontext(),
            force_implementation(variant.implementation),
        ):
            wrong = differing(call_of(variant, device, seed), device, repeats, busy)
    except Exception as error:  # noqa: BLE001
        wrong = f"{type(error).__name__}: {error}"
    return f"FAILED {variant}, seed {seed}: {wrong}" if wrong else ""


def main(device: str, seconds: float, cases: float, seed: int, repeats: int = 20) -> int:
    """All variants, round after round with other numbers, until the seconds are over or so many have run."""
    start, counts, failures, number = time.monotonic(), Counter[str](), 0, 0
    everything = variants(device)
    said = start
    with busy_memory(device) as busy:
        while number < cases and time.monotonic() - start < seconds and failures < 20:
            variant = everything[number % len(everything)]
            wrong = check(variant, device, seed + number // len(everything), repeats, busy)
            number, failures = number + 1, failures + bool(wrong)
            counts[f"{variant.operation}, {variant.implementation}"] += 1
            if wrong:
                print(wrong, flush=True)
            if time.monotonic() - said >= 30:
                said = time.monotonic()
                print(f"{number} variants after {said - start:.0f} s, {failures} failed", flush=True)
    print("\n".join(f"{name:40} {count:6} variants" for name, count in sorted(counts.items())))
    rounds = math.floor(number / len(everything))
    print(f"{number} of {len(everything)} variants ({rounds} whole rounds), {repeats} repeats each, {failures} failed")
    return 1 if failures else 0
