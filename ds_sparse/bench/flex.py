"""FlexAttention, compiled, with a block mask made from a layout, or from a function of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TILE = 128
"""Tokens on a side of FlexAttention's tiles."""

MOST_COMPILATIONS = 64
"""Compilations of FlexAttention in a process that share a function, far more than all cases need."""

ON_CPU = "on a CPU it is forward only"

Live = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""From (row, head, query, key) to whether the query sees the key."""


def compiled(mask: Any, mode: str | None = None) -> Callable[..., Tensor]:
    """FlexAttention with a `BlockMask`, compiled in a mode at the first call of each shape."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    # Timing the backward alone needs the graph twice.
    config.donated_buffer = False
    side = mask.BLOCK_SIZE[0]
    # Forward tiles of 32 are not among those that autotuning tries.
    options: Any = {"fwd_BLOCK_M": side, "fwd_BLOCK_N": side} if side < 64 else None
    # Cases that differ in nothing but numbers share what is compiled. Past the limit, a full graph is an error.
    torch._dynamo.config.recompile_limit = MOST_COMPILATIONS
    call = torch.compile(flex_attention, dynamic=False, fullgraph=True, mode=mode)
    return lambda query, key, value: call(query, key, value, block_mask=mask, kernel_options=options)


def forget() -> None:
    """Drops what was compiled, which may be for other layouts: past a limit it would be no longer compiled."""
    torch._dynamo.reset()


def of_layout(layout: Tensor, block: int, side: int) -> Any:
    """FlexAttention's `BlockMask` of a layout, its tiles `side` tokens: where a tile is partly live, a mask function
    looks the layout up score by score. layout: bool (H or 1, R, C)."""
    from torch.nn.attention.flex_attention import BlockMask

    inside = layout.unflatten(2, (-1, side // block)).unflatten(1, (-1, side // block)).transpose(2, 3)
    full, some = inside.all(-1).all(-1), inside.any(-1).any(-1)
    heads = layout.shape[0]

    def live(b: Any, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return layout[h if heads > 1 else 0, q // block, k // block]

    partly, fully = lists((some & ~full)[None], full.shape[-1]), lists(full[None], full.shape[-1])
    return BlockMask.from_kv_blocks(*partly, *fully, BLOCK_SIZE=side, mask_mod=live)


def creating(live: Callable[[], Live], heads: int, tokens: int, side: int, device: torch.device) -> Callable[[], Any]:
    """Makes the `BlockMask` of a sequence by compiled code, from the function that `live` gives at each call.

    Persistent kernels are left out: a sort of up to 512 numbers, of which a mask takes four, is one of them, and Triton
    compiles it for minutes. PyTorch 2.13 leaves these sorts out itself, 2.11 does not.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    forget()
    options: Any = {"triton.persistent_reductions": False}
    create = torch.compile(create_block_mask, dynamic=False, fullgraph=True, options=options)
    return lambda: create(live(), None, heads, tokens, tokens, device, side)


def of_scores(live: Live, rows: int, tokens: int, device: torch.device) -> Any:
    """FlexAttention's `BlockMask` of rows of so many tokens, the same for all heads."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(live, rows, None, tokens, tokens, device=device, BLOCK_SIZE=TILE)


def lists(layout: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Counts of live blocks of a row, int32 (..., R), and their columns, ascending, int32 (..., R, width); the width is
    that of the longest row if it is not given, and what is beyond a row's end has no meaning."""
    counts = layout.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if width is None else width
    columns = torch.argsort((~layout).to(torch.uint8), dim=-1, stable=True)[..., :width]
    return counts, columns.to(torch.int32).contiguous()
