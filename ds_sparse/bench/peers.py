"""Whoever computes a case of `ds_sparse bench attention`: ours and PyTorch's; `benchmarks` of a clone
adds packages that skip blocks.

A builder takes a `Problem` and returns a `Peer`, or raises `Unsupported` with the reason in a few words. What is built
once a layout (indices, masks) is built there and costs nothing later, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..index import BlockIndex
from ..layout import to_token_mask
from ..ops.attention import block_sparse_attention
from .cases import Case
from .matmul import our_operations
from .reasons import Unsupported


@dataclass(frozen=True)
class Problem:
    """A case on a device. layout: bool (H or 1, R, C) there."""

    case: Case
    layout: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Peer:
    """`call(query, key, value)`, (B, H, T, D) each, and what to know of it.

    Attributes:
        dense: it computes all scores, whatever the layout says.
        no_backward: why it cannot be differentiated; empty where it can.
        tokens_first: its tensors are (B, T, H, D) in memory.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    dense: bool = False
    no_backward: str = ""
    tokens_first: bool = False


def fused(problem: Problem) -> Peer:
    index = BlockIndex.build(problem.layout, problem.case.block)
    attention: Callable[..., Any] = block_sparse_attention
    return Peer(lambda query, key, value: attention(query, key, value, index))


def composition(problem: Problem) -> Peer:
    return Peer(our_operations(problem.layout, problem.case.block, problem.case.head_dim)["attention"])


def sdpa(problem: Problem) -> Peer:
    return Peer(scaled_dot_product_attention, dense=True)


def sdpa_mask(problem: Problem) -> Peer:
    mask = to_token_mask(problem.layout, problem.case.block)[None]
    return Peer(lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask))


def sdpa_by(backend: SDPBackend) -> Callable[[Problem], Peer]:
    """PyTorch's dense attention by one backend, which PyTorch alone would not always choose."""

    def build(problem: Problem) -> Peer:
        def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value)

        return Peer(call, dense=True)

    return build


def flex(tile: int | None, mode: str | None) -> Callable[[Problem], Peer]:
    """FlexAttention, compiled in a mode; its block mask has tiles of so many tokens, or of the layout's block. On a CPU
    it has no backward, and refuses tensors that require gradients."""

    def build(problem: Problem) -> Peer:
        from torch._functorch import config

        block, layout = problem.case.block, problem.layout
        if tile is None and block >= 128:
            raise Unsupported("the same as flex-max for blocks of 128")
        if tile is None and block < 32:
            raise Unsupported("its backward has no tiles below 32")
        # Timing the backward alone needs the graph twice.
        config.donated_buffer = False
        call = compiled_flex(layout, block, tile or block, mode)
        if layout.device.type == "cpu":
            return Peer(lambda *qkv: call(*(x.detach() for x in qkv)), no_backward=FLEX_ON_CPU)
        return Peer(call)

    return build


FLEX_TILE, FLEX_ON_CPU = 128, "on a CPU it is forward only"


def compiled_flex(layout: Tensor, block: int, side: int, mode: str | None = None) -> Callable[..., Tensor]:
    """FlexAttention on a layout, by tiles of `side` tokens, compiled in a mode at the first call of each shape."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = block_mask(layout, block, side)
    # Forward tiles of 32 are not among those that autotuning tries.
    options: Any = {"fwd_BLOCK_M": side, "fwd_BLOCK_N": side} if side < 64 else None
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    return lambda query, key, value: compiled(query, key, value, block_mask=mask, kernel_options=options)


def block_mask(layout: Tensor, block: int, side: int) -> Any:
    """FlexAttention's `BlockMask` of a layout, its tiles `side` tokens: where a tile is partly live, a mask function
    looks the layout up score by score."""
    from torch.nn.attention.flex_attention import BlockMask

    inside = layout.unflatten(2, (-1, side // block)).unflatten(1, (-1, side // block)).transpose(2, 3)
    full, some = inside.all(-1).all(-1), inside.any(-1).any(-1)
    heads = layout.shape[0]

    def live(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return layout[h if heads > 1 else 0, q // block, k // block]

    some_counts, some_columns = lists(some & ~full, full.shape[2])
    full_counts, full_columns = lists(full, full.shape[2])
    return BlockMask.from_kv_blocks(
        some_counts[None], some_columns[None], full_counts[None], full_columns[None], BLOCK_SIZE=side, mask_mod=live
    )


def lists(layout: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """How many live blocks a row has, int32 (H, R), and their columns, ascending, int32 (H, R, width); the width is
    that of the longest row if it is not given, and what is beyond a row's end has no meaning."""
    counts = layout.sum(2, dtype=torch.int32)
    width = max(1, int(counts.max())) if width is None else width
    columns = torch.argsort((~layout).to(torch.uint8), dim=2, stable=True)[:, :, :width]
    return counts, columns.to(torch.int32).contiguous()


OURS = "ds_sparse"

PEERS: dict[str, Callable[[Problem], Peer]] = {
    OURS: fused,
    "composition": composition,
    "sdpa": sdpa,
    "sdpa-mask": sdpa_mask,
    "cudnn": sdpa_by(SDPBackend.CUDNN_ATTENTION),
    "flash": sdpa_by(SDPBackend.FLASH_ATTENTION),
    "flex": flex(FLEX_TILE, None),
    "flex-max": flex(FLEX_TILE, "max-autotune-no-cudagraphs"),
    "flex-blocks": flex(None, "max-autotune-no-cudagraphs"),
}
"""Name to builder. MatMul, Softmax and MatMul are the composition; sdpa is dense, by the backend of PyTorch's choice;
flex-max and flex-blocks are autotuned, which takes long, and flex-blocks has the layout's own blocks for tiles."""

ON_CPU = [OURS, "composition", "sdpa", "sdpa-mask", "flex"]
ON_CUDA = [OURS, "composition", "cudnn", "flash", "flex"]

QUICK = {"cpu": [OURS, "composition", "sdpa", "sdpa-mask"], "cuda": [OURS, "composition", "cudnn", "flash"]}
"""None of these has to be compiled."""

DENSE = {"cpu": "sdpa", "cuda": "cudnn"}
"""What dense attention costs on a device."""

PACKAGES = ["triton"]
"""Whose versions a run tells."""
