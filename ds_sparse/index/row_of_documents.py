"""The layout of a whole row that holds several documents, of which none sees another."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .block import BlockIndex
from .documents import Documents, index_of_square
from .transforms import outside_transforms
from .window import WindowIndex


@outside_transforms
def index_of_row(
    layout: torch.Tensor | BlockIndex,
    cu_seqlens: torch.Tensor,
    block: int | None,
    tokens: int,
    causal: bool,
    device: torch.device,
) -> WindowIndex:
    """The blocks of a row's layout in which a document sees itself, and for each token the range of its document.

    Args:
        layout: bool, or 0 and 1 as numbers, (R, R) or (H or 1, R, R), R = ceil(tokens / block) or more, of which the
            top-left part counts; or a `BlockIndex` of such a layout.
        cu_seqlens: int32 or int64 (documents + 1), ascending from 0 to `tokens`.
        block: tokens on a block's side; that of the `BlockIndex` if one is given.
        tokens: of the row.
        causal: whether tokens see none after them.
        device: where the index is to be.

    Raises:
        TypeError, ValueError: arguments of other types or values; a layout that is not square, or too small; an index
            for another block.
    """
    documents = Documents.read(cu_seqlens).check_fills(tokens)
    of_row = index_of_square(layout, block, tokens, "a row")
    block = of_row.block
    wanted = -(-tokens // block)
    limits = documents.of_tokens(device)
    first, end = pad(limits.T, (0, -tokens % block), mode="replicate").unflatten(1, (wanted, block))
    first, end = first.amin(1), end.amax(1)
    share = (first[:, None] < end) & (first < end[:, None])
    live = of_row.layout()[:, :wanted, :wanted].to(device) & share
    blocks = BlockIndex.build(live, block).for_heads(of_row.num_heads)
    return WindowIndex(
        tokens=tokens,
        causal=causal,
        num_heads=of_row.num_heads,
        num_global=0,
        blocks=blocks.causal() if causal else blocks,
        limits=limits.int().unsqueeze(0),
        order=None,
        inverse=None,
        places=None,
    )
