"""The rate at which the SMs of a GPU read its L2 cache, by a Triton kernel. Importing this needs Triton."""

from __future__ import annotations

import statistics

import torch
import triton
import triton.language as tl

from .machine import timed

WORKING_SET = 24 * 2**20
"""Bytes that are read again and again: less than half of the L2 of an H100, whose halves keep copies of one another's
lines."""

BLOCK = 4096
PROGRAMS_PER_SM = 8


@triton.jit
def sweep(source, sums, blocks, BLOCK: tl.constexpr):
    """Each program adds up all blocks of the source, from a place of its own on. `.cg` keeps the reads out of L1."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(blocks):
        place = (program * 37 + step) % blocks
        total += tl.load(source + place * BLOCK + lanes, cache_modifier=".cg")
    tl.store(sums + program * BLOCK + lanes, total)


def read_rate(device: torch.device) -> float:
    """Bytes per millisecond from L2 into registers, all SMs together, by 16-byte loads past L1."""
    properties = torch.cuda.get_device_properties(device)
    blocks = min(WORKING_SET, properties.L2_cache_size // 2) // (4 * BLOCK)
    programs = PROGRAMS_PER_SM * properties.multi_processor_count
    source = torch.randn(blocks * BLOCK, device=device)
    sums = torch.empty(programs * BLOCK, device=device)

    def read() -> None:
        sweep[(programs,)](source, sums, blocks, BLOCK=BLOCK, num_warps=8)

    milliseconds = statistics.median(timed(read, device) for _ in range(5))
    return programs * source.nbytes / milliseconds
