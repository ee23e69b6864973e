"""Every kernel variant of a device: implementations of operations, by block, head size, dtype and order of sums."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..dispatch import IMPLEMENTATIONS, Call, Implementation, dtypes_on
from ..dispatch.implementations import ALL_DTYPES, LIMITS
from ..tools.block_sizes import BLOCK_SIZES

HEAD_DIMS = (8, 16, 40, 64, 72, 96, 128, 192, 256)
ONE_BLOCK, ONE_HEAD_DIM = (64,), (64,)
"""Sizes for operations that no block, or no head size, makes another kernel of."""

CHOSEN_BY = {
    "block_sparse_attention": "block_sparse_attention",
    "packed attention": "block_sparse_attention",
    "window_attention": "block_sparse_attention",
    "selected_attention": "selected_attention",
    "sparse_attn": "sparse_attn",
    "sdd": "sdd",
    "dsd": "dsd",
    "window_matmul": "window_matmul",
}
"""Operations of which one of several implementations runs, and the entry of `IMPLEMENTATIONS` that says which."""

ALONE = ("Softmax", "unwindow_matmul", "window_softmax", "sparse_matmul")
"""Operations that have one implementation for each device."""


class Variant(NamedTuple):
    """A kernel, as a call reaches it. deterministic: sums in a fixed order are asked for."""

    operation: str
    implementation: str
    block: int
    head_dim: int
    dtype: torch.dtype
    deterministic: bool

    @property
    def family(self) -> str:
        return f"{self.operation}, {self.implementation}"

    def __str__(self) -> str:
        order = "sums in a fixed order" if self.deterministic else "sums as they come"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family}, block {self.block}, head size {self.head_dim}, {dtype}, {order}"


def variants(device: torch.device) -> list[Variant]:
    """All that run on a device: what `IMPLEMENTATIONS` names, and the operations of one implementation."""
    found = []
    for operation, names in CHOSEN_BY.items():
        for implementation in IMPLEMENTATIONS[names]:
            if LIMITS[0].holds(implementation, Call(device, torch.float16, 1)):
                found += _of_implementation(operation, implementation)
    only = "portable" if device.type == "cuda" else "cpu"
    for operation in ALONE:
        blocks = BLOCK_SIZES if operation == "Softmax" else ONE_BLOCK
        dims = HEAD_DIMS if operation in ("unwindow_matmul", "sparse_matmul") else ONE_HEAD_DIM
        dtypes = dtypes_on("window_matmul", device) if "window" in operation else ALL_DTYPES
        found += [Variant(operation, only, b, dim, dtype, True) for b in blocks for dim in dims for dtype in dtypes]
    return found


def _of_implementation(operation: str, implementation: Implementation) -> list[Variant]:
    least, most = implementation.head_dims
    dims = [n for n in HEAD_DIMS if least <= n <= (most or n) and n % implementation.multiple == 0]
    blocks = implementation.tiles or (BLOCK_SIZES if operation in ("sdd", "dsd") else ONE_BLOCK)
    orders = (True, False) if implementation.in_any_order else (True,)
    return [
        Variant(operation, implementation.name, block, dim, dtype, deterministic)
        for block in blocks
        for dim in dims
        for dtype in implementation.dtypes
        for deterministic in orders
    ]
