"""Training steps of sparse attention of all kinds with lengths and layouts that change: memory has to stay flat.

What grows here is a cache that forgets to forget, a graph that is kept, or a leak of a native library.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_sparse
from ds_sparse.tools.torch_settings import cpu_threads

HEADS, HEAD_DIM, BLOCK = 2, 16, 16
LENGTHS = (32, 64, 96, 128, 160)
MIB = 2**20
ALLOWED_A_STEP = 400.0
"""Bytes by which memory may grow a step after the warm-up: a tenth of the smallest tensor of a step."""
ALLOWED = {"resident": 12 * MIB, "allocated": 2 * MIB, "reserved": 24 * MIB}
"""What allocators may take on top, whatever the number of steps; PyTorch's reserves up to 20 MiB at once."""


class Model(nn.Module):
    """Token vectors through SparseSelfAttention, windows, and token pairs."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        structure = ds_sparse.FixedSparsityConfig(num_heads=HEADS, block=BLOCK)
        self.attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=max(LENGTHS))

    def forward(self, x: Tensor, layout: Tensor, window: int, pairs: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.project(x).view(batch, tokens, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = self.attention(query, key, value)
        mixed = mixed + ds_sparse.block_sparse_attention(query, key, value, layout, block=BLOCK, causal=True)
        mixed = mixed + ds_sparse.window_attention(query, key, value, window, global_tokens=[0])
        index = ds_sparse.TokenIndex.from_pairs(pairs, tokens, tokens)
        mixed = mixed + ds_sparse.sparse_attn(query, key, value, index)
        scores = ds_sparse.MatMul(layout, BLOCK, "sdd", trans_b=True)(query, key)
        probs = ds_sparse.Softmax(layout, BLOCK)(scores, HEAD_DIM**-0.5)
        mixed = mixed + ds_sparse.MatMul(layout, BLOCK, "dsd")(probs, value)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


class Inputs:
    """Of steps: other numbers, lengths, layouts, windows and pairs each time."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.random = device, random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)

    def __call__(self) -> tuple[Tensor, Tensor, int, Tensor]:
        tokens = self.random.choice(LENGTHS)
        blocks = tokens // BLOCK
        layout = torch.rand(HEADS, blocks, blocks, generator=self.numbers) < 0.5
        layout |= torch.eye(blocks, dtype=torch.bool)
        x = torch.randn(self.random.randint(1, 3), tokens, HEADS * HEAD_DIM, generator=self.numbers)
        pairs = torch.randint(tokens, (self.random.randint(tokens, 4 * tokens), 2), generator=self.numbers)
        window = self.random.choice((1, 5, 16, 40))
        return x.to(self.device), layout.to(self.device), window, pairs.to(self.device)


def memory(device: str) -> dict[str, int]:
    """Bytes that are taken, by what counts them."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"resident": pages * os.sysconf("SC_PAGE_SIZE")}


class Soak:
    """Steps of training, one after another; `kept` is what a test adds to see that growth is found."""

    def __init__(self, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.inputs, self.device = Model().to(device), Inputs(device, seed), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        x, *rest = self.inputs()
        loss = (self.model(x, *rest) - x.roll(1, 1)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def run(device: str, steps: int, seed: int, soak: Soak | None = None, say=lambda line: None) -> str:
    """A sentence if memory grows after the first fifth of the steps, else ""; what is measured is said now and then."""
    warnings.filterwarnings("ignore", category=ds_sparse.SparsityWarning)
    soak, warm, start = soak or Soak(device, seed), max(steps // 5, 1), time.monotonic()
    before: dict[str, int] = {}
    for number in range(1, steps + 1):
        loss = soak.step()
        if number == warm:
            before = memory(device)
        if number % max(steps // 10, 1) == 0:
            taken = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in memory(device).items())
            say(f"step {number} after {time.monotonic() - start:.0f} s: loss {loss.item():.4f}, {taken}")
    for name, size in memory(device).items():
        allowed = ALLOWED[name] + ALLOWED_A_STEP * (steps - warm)
        if size - before[name] > allowed:
            return (
                f"Memory grew: {name} was {before[name] / MIB:.1f} MiB after {warm} steps and is {size / MIB:.1f} MiB "
                f"after {steps}, more than the {allowed / MIB:.1f} MiB that allocators may take."
            )
    return ""


def main(device: str, steps: int, seed: int) -> int:
    with cpu_threads(1):
        wrong = run(device, steps, seed, say=lambda line: print(line, flush=True))
    print(wrong or f"Memory stayed flat over {steps} steps on {device}, seed {seed}.")
    return 1 if wrong else 0
