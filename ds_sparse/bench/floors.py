"""Floors of a job's time: its bytes and FLOPs over rates that no kernel of this machine passes.

The rates of a copy, of a matrix product and of reads from L2 are measured; those of dense attention are the best known.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..layout import density
from .machine import BACKWARD, DTYPES, FORWARD, TRAIN, timed

FLASH_ATTENTION_4 = {64: {FORWARD: 546e9, BACKWARD: 536e9}, 128: {FORWARD: 684e9, BACKWARD: 624e9}}
"""FLOPs per millisecond of FlashAttention-4's dense attention in bf16 on an H200, by head size: 4 D a score forward,
10 D backward."""

MATRIX_PRODUCT_OF_AN_H200 = 790e9
"""FLOPs per millisecond beside those, bf16, on random numbers."""

SCORES, SOFTMAX, VALUES = "dense q @ k^T", "dense softmax", "dense p @ v"
TRANSPOSED, ATTENTION = "dense v^T @ p^T", "SDPA dense"
"""Jobs of products, softmax and attention, by those who do them densely."""

LARGEST_TILE = 128
"""Neighbouring rows that can share what one of them loads from L2, in tokens."""


@dataclass(frozen=True)
class Work:
    """Work that a kernel cannot do without: bytes from and to memory, FLOPs, and bytes from L2 to the SMs."""

    nbytes: float
    flops: float
    l2_bytes: float = 0


@dataclass(frozen=True)
class Ceilings:
    """Rates that a kernel cannot pass.

    Attributes:
        bytes_per_ms: of a large copy, read and written.
        flops_per_ms: of a large matrix product.
        l2_bytes_per_ms: from L2 to all SMs (see `l2`); None where Triton is missing, which measures it.
        hopper: whether this is an H100 or H200, for which the rates of dense attention are known.
    """

    bytes_per_ms: float
    flops_per_ms: float
    l2_bytes_per_ms: float | None = None
    hopper: bool = False

    @classmethod
    @functools.cache  # once a process: the cases of a grid are held to the same rates
    def measure(cls, device: torch.device, dtype: torch.dtype) -> Ceilings:
        copied = torch.empty(2**31, dtype=torch.uint8, device=device)
        target = torch.empty_like(copied)
        copy_ms = statistics.median(timed(lambda: target.copy_(copied), device) for _ in range(5))
        side = 8192
        a = torch.randn(side, side, device=device, dtype=dtype)
        product_ms = statistics.median(timed(lambda: a @ a, device) for _ in range(5))
        name = torch.cuda.get_device_name(device)
        return cls(
            bytes_per_ms=2 * copied.numel() / copy_ms,
            flops_per_ms=2 * side**3 / product_ms,
            l2_bytes_per_ms=l2_read_rate(device),
            hopper="H100" in name or "H200" in name,
        )

    def in_words(self) -> str:
        l2 = self.l2_bytes_per_ms
        from_l2 = f"{l2 / 1e9:.2f} TB/s" if l2 else "not measured, which takes Triton"
        copy, product = self.bytes_per_ms / 1e9, self.flops_per_ms / 1e9
        return f"copy {copy:.2f} TB/s, matrix product {product:.0f} TFLOP/s, L2 to SMs {from_l2}"

    def floor(self, work: Work) -> tuple[float, str]:
        """Milliseconds that one kernel needs at least, and what it is that takes them: "copy", "FLOPs" or "L2"."""
        floors = {"copy": work.nbytes / self.bytes_per_ms, "FLOPs": work.flops / self.flops_per_ms}
        if self.l2_bytes_per_ms is not None:
            floors["L2"] = work.l2_bytes / self.l2_bytes_per_ms
        bound = max(floors, key=floors.__getitem__)
        return floors[bound], bound

    def attention_floor(self, work: Work, head_dim: int, direction: str) -> float:
        """Milliseconds that attention on live blocks needs, which is no faster a FLOP than the best dense attention.

        On other GPUs than the H100 and H200 that takes the share of a matrix product's rate that it takes there.
        """
        rate = FLASH_ATTENTION_4[128 if head_dim > 64 else 64][direction]
        if not self.hopper:
            rate *= self.flops_per_ms / MATRIX_PRODUCT_OF_AN_H200
        return max(work.nbytes / self.bytes_per_ms, work.flops / rate)


@functools.cache
def l2_read_rate(device: torch.device) -> float | None:
    """Bytes per millisecond from L2; None without Triton."""
    try:
        from .l2 import read_rate
    except ImportError:
        return None
    return read_rate(device)


@dataclass(frozen=True)
class Size:
    """Attention over the `density` part of T x T scores, of H heads with D numbers each, in B sequences.

    Attributes:
        row_loads: tokens whose keys a head's tiles of query rows bring from L2 (see `tokens_loaded`), mean over heads;
            0 where that is not counted.
        column_loads: tokens whose queries its tiles of keys bring.
    """

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    density: float
    itemsize: int
    row_loads: float = 0
    column_loads: float = 0

    @classmethod
    def of(cls, case: Any, layout: Tensor | None = None) -> Size:
        """The size of a case that has these fields; its `density`, or bool (H or 1, R, R) with its `block`."""
        loads: list[float] = []
        if layout is not None:
            loads = [tokens_loaded(x, case.block) for x in (layout, layout.transpose(1, 2))]
        live = case.density if layout is None else density(layout)
        itemsize = DTYPES[case.dtype].itemsize
        return cls(case.batch, case.heads, case.seq_len, case.head_dim, live, itemsize, *loads)

    @property
    def scores(self) -> float:
        return self.batch * self.heads * self.seq_len**2 * self.density

    @property
    def operand_bytes(self) -> int:
        """Bytes of query, key, value or output."""
        return self.token_bytes * self.seq_len

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of them, in all heads and sequences."""
        return self.batch * self.heads * self.head_dim * self.itemsize

    def attention(self, direction: str) -> Work:
        """Work of one kernel each way: query, key, value and output; those, their gradients, and five products for two.

        Forward a tile of query rows loads key and value rows; backward one of keys and values those of queries and
        output gradients.
        """
        if direction == FORWARD:
            return Work(4 * self.operand_bytes, 4 * self.head_dim * self.scores, 2 * self.row_loads * self.token_bytes)
        return Work(8 * self.operand_bytes, 10 * self.head_dim * self.scores, 2 * self.column_loads * self.token_bytes)


def kernels(size: Size, job: str, direction: str) -> list[Work]:
    """Kernels of a job; each reads and writes every tensor once.

    A product loads from L2 the dense rows that its tiles ask for, and its sparse operand; one with a sparse result may
    keep tiles of either operand at rest.
    """
    sparse = size.scores * size.itemsize
    by_rows, by_columns = size.row_loads * size.token_bytes, size.column_loads * size.token_bytes

    def product(l2_bytes: float) -> Work:
        return Work(2 * size.operand_bytes + sparse, 2 * size.head_dim * size.scores, l2_bytes)

    into_blocks = product(size.operand_bytes + min(by_rows, by_columns))
    blocks_times, transposed_blocks_times = product(sparse + by_rows), product(sparse + by_columns)
    if job == SOFTMAX:
        forward, backward = [Work(2 * sparse, 0)], [Work(3 * sparse, 0)]
    elif job == ATTENTION:
        forward, backward = [size.attention(FORWARD)], [size.attention(BACKWARD)]
    elif job == SCORES:
        forward, backward = [into_blocks], [blocks_times, transposed_blocks_times]
    else:
        forward, backward = [blocks_times], [into_blocks, transposed_blocks_times]
    return {FORWARD: forward, BACKWARD: backward, TRAIN: forward + backward}[direction]


def operation_floor(ceilings: Ceilings, size: Size, job: str, direction: str) -> tuple[float, str]:
    """Milliseconds of a job's kernels, one after the other, and what the longest of them is bound by."""
    floors = [ceilings.floor(work) for work in kernels(size, job, direction)]
    return sum(milliseconds for milliseconds, _ in floors), max(floors)[1]


def tokens_loaded(layout: Tensor, block: int) -> float:
    """Tokens of the columns that a head's tiles of `LARGEST_TILE` neighbouring rows load, mean over heads.

    A tile loads every block that one of its rows wants, once: r of its rows that want a token of D numbers get 2 D r
    FLOPs of each product with it. layout: bool (H, R, C).
    """
    heads, rows, columns = layout.shape
    in_tile = max(1, LARGEST_TILE // block)
    tiles = pad(layout, (0, 0, 0, -rows % in_tile)).view(heads, -1, in_tile, columns).any(2)
    return tiles.sum().item() * block * max(1, block // LARGEST_TILE) / heads
