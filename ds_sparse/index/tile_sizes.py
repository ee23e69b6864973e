"""Heights of tiles, and who walks which."""

from __future__ import annotations

import torch

TILE = 64
"""Tokens of a tile's height, unless another is asked for."""

HOPPER_TILE = 128
"""Tokens of the tiles of the kernels for Hopper GPUs."""

PRODUCT_BLOCKS = (16, 32, 64, 128)
"""Blocks that MatMul walks in tiles, on a Hopper GPU: dsd and dds in those of `HOPPER_TILE`, sdd as `sdd_tile` has
it."""


def sdd_tile(block: int) -> int:
    """Tokens of the tiles that sdd walks: half of what others take where blocks are small, which was faster."""
    return TILE if block < TILE else HOPPER_TILE


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU that Hopper's own kernels run on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
