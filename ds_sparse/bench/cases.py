"""The grid of `ds_sparse bench attention`, as data: shapes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..sparsity import BigBirdSparsityConfig, BSLongformerSparsityConfig, FixedSparsityConfig, SparsityConfig

STRUCTURES = {"fixed": FixedSparsityConfig, "longformer": BSLongformerSparsityConfig, "bigbird": BigBirdSparsityConfig}


@dataclass(frozen=True)
class Case:
    """One line of the grid.

    Attributes:
        structure: of `STRUCTURES`, all heads alike; or "random", where each head has a layout of its own.
        options: of the structure's configuration; for "random" the density.
        dtype: a name, in cases that are measured.
    """

    name: str
    structure: str
    block: int
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""

    def config(self, num_heads: int) -> SparsityConfig:
        """The configuration of one of `STRUCTURES`."""
        return STRUCTURES[self.structure](num_heads=num_heads, block=self.block, **self.options)

    def layout(self) -> Tensor:
        """bool (H or 1, R, C) on the CPU, the same at every call."""
        if self.structure == "random":
            blocks = self.seq_len // self.block
            draws = torch.rand(self.heads, blocks, blocks, generator=torch.Generator().manual_seed(0))
            return draws < self.options["density"]
        return self.config(self.heads).make_bool_layout(self.seq_len)

    def small(self, heads: int = 4, seq_len: int = 2048) -> Case:
        """The case cut to one sequence, so many heads and tokens: for a CPU. Its name says the tokens where they
        are fewer."""
        name = self.name
        if seq_len < self.seq_len:
            name = f"{name.removesuffix(in_k(self.seq_len))}{in_k(seq_len)}"
        return replace(self, name=name, batch=1, heads=min(self.heads, heads), seq_len=min(self.seq_len, seq_len))


def in_k(seq_len: int) -> str:
    """The end of a name that says a length."""
    return f"-{seq_len // 1024}k"


FIXED = {"num_local_blocks": 4, "num_global_blocks": 1}
WINDOW = {"num_sliding_window_blocks": 9, "global_block_indices": [0]}
BIGBIRD = {"num_sliding_window_blocks": 3, "num_random_blocks": 3, "num_global_blocks": 2, "seed": 0}
SMALL_BIGBIRD = {"num_sliding_window_blocks": 3, "num_random_blocks": 1, "num_global_blocks": 1, "seed": 0}
QUARTER = {"density": 0.25}
TENTH = {"density": 0.1}

# fmt: off
TABLE = [
    #    name                   structure    block B  H   T      D    options
    Case("fixed-16",            "fixed",      16, 8, 16,  4096,  64, FIXED),
    Case("fixed-16-16k",        "fixed",      16, 2, 16, 16384,  64, FIXED),
    Case("fixed-16-d128",       "fixed",      16, 8, 16,  4096, 128, FIXED),
    Case("fixed-32",            "fixed",      32, 8, 16,  4096,  64, FIXED),
    Case("fixed-32-d128",       "fixed",      32, 8, 16,  4096, 128, FIXED),
    Case("longformer-16",       "longformer", 16, 8, 16,  4096,  64, WINDOW),
    Case("longformer-32",       "longformer", 32, 8, 16,  4096,  64, WINDOW),
    Case("bigbird-16",          "bigbird",    16, 8, 16,  4096,  64, SMALL_BIGBIRD),
    Case("bigbird-16-d128",     "bigbird",    16, 8, 16,  4096, 128, SMALL_BIGBIRD),
    Case("bigbird-32",          "bigbird",    32, 8, 16,  4096,  64, SMALL_BIGBIRD),
    Case("bigbird-64",          "bigbird",    64, 8, 16,  4096,  64, BIGBIRD),
    Case("bigbird-64-16k",      "bigbird",    64, 2, 16, 16384,  64, BIGBIRD),
    Case("bigbird-64-d128",     "bigbird",    64, 2, 16, 16384, 128, BIGBIRD),
    Case("longformer-64",       "longformer", 64, 4, 16,  8192,  64, WINDOW),
    Case("longformer-64-d128",  "longformer", 64, 4, 16,  8192, 128, WINDOW),
    Case("longformer-128",      "longformer", 128, 2, 16, 16384,  64, WINDOW),
    Case("longformer-128-d128", "longformer", 128, 2, 16, 16384, 128, WINDOW),
    Case("random-64",           "random",     64, 4, 16,  8192,  64, QUARTER),
    Case("random-64-d128",      "random",     64, 2, 16, 16384, 128, TENTH),
    Case("random-128-d128",     "random",     128, 4, 16, 8192, 128, QUARTER),
]
"""Cases that are measured by default: the structures that people configure, and random blocks."""
# fmt: on

BREAK_EVEN = [
    Case(f"random-{block}-{tenths * 10}%", "random", block, 4, 16, 4096, 64, {"density": tenths / 10})
    for block in (16, 32, 64, 128)
    for tenths in range(1, 10)
]
"""Cases that tell from which density on dense attention is faster, at each block size."""

GROWTH = [
    *(Case(f"{2**k // 1024}k", "longformer", 64, 4, 16, 2**k, 64, WINDOW) for k in range(13, 18)),
    Case("1M, one head", "longformer", 64, 1, 1, 2**20, 64, WINDOW),
]
"""Cases that tell how time grows with tokens where a window and one global block are all that a token sees."""

IN_BERT: dict[str, Callable[[int], SparsityConfig]] = {
    name: next(case.config for case in TABLE if case.name == name)
    for name in ("longformer-64", "bigbird-64", "bigbird-16")
}
"""Structures of the table that a step of BERT is measured with, each made for a number of heads."""
