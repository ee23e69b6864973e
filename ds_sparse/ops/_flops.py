"""Formulas of `torch.utils.flop_counter.FlopCounterMode` for operators: products, two operations a multiplication.

Attention counts whole blocks, as kernels walk them, whatever masks, causality and short last blocks leave of a block:
4 D operations a live score forward, 10 D backward, D the head size rounded up to a multiple of 8. The gradient of `rpe`
or `distance_bias` is computed apart, of scores and probabilities that are computed again: 4 D more. Lists of tokens
count their pairs, bands what belongs to a token that there is. Softmax counts nothing, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..index import BlockIndex
from ..index.lookup import index_of_window
from ..index.master_layout import MasterLayout
from ..index.packing import MAX_LINES, owner_bit
from ..index.window_sizes import WindowNumbers
from ..layout import unpack_bits

FORWARD, BACKWARD, BIAS_BACKWARD = 4, 10, 4
"""Operations of attention for each live score and number of a head."""


def attention_flops(query: Tensor, live_blocks: int, layout_heads: int, block: int, each: int) -> int:
    """Operations of attention of query (B, H, T, D), which are `each` for a live score and number of a head.

    Args:
        live_blocks: those of all the layout heads together, as `BlockIndex.live_blocks` has them.
    """
    batch, heads, _, head_dim = query.shape
    return each * head_dim * batch * heads * live_blocks * block**2 // layout_heads


def choice(x: SimpleNamespace) -> int:
    """Products of all queries with all keys, or with the means of their blocks, to choose blocks by."""
    keys, queries = x.key.shape[2], x.query.numel()
    return 2 * queries * keys if x.score == "max" else 2 * queries // x.query_block * -(-keys // x.block)


def live_blocks(entries: Tensor, units: Tensor) -> int:
    """The live blocks of tiles, one for each owner bit of their units' entries; waits for the device.

    Raises:
        RuntimeError: the entries have no values.
    """
    _refuse_without_values(
        entries,
        "the layout's index has no values here; build it outside of FakeTensorMode, and give meta tensors an index on "
        "the CPU.",
    )
    entries = entries[: int(units[:, 2].sum())]
    return sum(int(owner_bit(entries, line).sum()) for line in range(MAX_LINES))


def _refuse_without_values(x: Tensor, what: str) -> None:
    if isinstance(x, FakeTensor) or x.is_meta:
        raise RuntimeError(f"FlopCounterMode has to know the live blocks of attention, and {what}")


def attention(each: int) -> Callable[[SimpleNamespace], int]:
    """Attention on tiles, `each` operations for a live score and number of a head."""

    def formula(x: SimpleNamespace) -> int:
        # Arguments at their defaults may be missing.
        of_sequences = x.query.shape[0] if getattr(x, "by_sequence", False) else 1
        live = live_blocks(x.row_entries, x.row_units)
        return attention_flops(x.query, live, of_sequences * x.layout_heads, x.block, each)

    return formula


def attention_on_layout(each: int) -> Callable[[SimpleNamespace], int]:
    """The same of the operators that compiled and exported graphs hold, which find their index when they run."""

    def formula(x: SimpleNamespace) -> int:
        layout = MasterLayout.read(x.layout)
        return _on(layout.index(x.query.shape[2], layout.device, x.causal), x.query, each)

    return formula


def attention_in_window(x: SimpleNamespace, numbers: WindowNumbers, each: int) -> int:
    return _on(index_of_window(x.query.shape[2], numbers, x.query.device).blocks, x.query, each)


def _on(index: BlockIndex, query: Tensor, each: int) -> int:
    return attention_flops(query, index.live_blocks, index.layout_heads, index.block, each)


def at_positions(x: SimpleNamespace) -> int:
    """Few queries at positions; waits for the device."""
    (batch, heads, tokens, depth), keys = x.query.shape, x.key.shape[2]
    if x.bits is None:
        return FORWARD * x.query.numel() * keys
    columns = -(-keys // x.block)
    offsets = [x.offset] * batch if x.offsets is None else x.offsets.expand(batch).tolist()
    rows = (torch.tensor(offsets)[:, None] + torch.arange(tokens)).flatten() // x.block
    rows = rows[(rows >= 0) & (rows < x.bits.shape[1])]  # a query at no row of the layout sees nothing
    seen = unpack_bits(x.bits, 8 * x.bits.shape[2])[:, rows.to(x.bits.device), :columns]
    if x.causal:
        seen = seen & (torch.arange(columns) <= rows[:, None]).to(seen.device)
    return FORWARD * depth * heads * int(seen.sum()) * x.block // len(x.bits)


def selected(each: int) -> Callable[[SimpleNamespace], int]:
    """Attention on blocks that tokens have chosen, `each` operations for a score and number of a head; waits for the
    device."""

    def formula(x: SimpleNamespace) -> int:
        batch, heads, tokens, together, depth = x.query.shape
        _refuse_without_values(
            x.bits, "block_indices has no values here; make it outside of FakeTensorMode, and on the CPU."
        )
        columns = -(-x.key.shape[2] // x.block)
        chosen = unpack_bits(x.bits, 8 * x.bits.shape[2])[..., :columns].unflatten(0, (-1, x.bits_heads))
        if x.causal:
            offset = x.offset if x.offsets is None else x.offsets.view(-1, 1, 1)
            last = (offset + torch.arange(tokens, device=chosen.device)[:, None]) // x.block
            chosen = chosen & (torch.arange(columns, device=chosen.device) <= last).unflatten(-2, (1, tokens))
        of_each = batch // len(chosen) * (heads * together // x.bits_heads)
        return each * depth * int(chosen.sum()) * x.block * of_each

    return formula


def distances(x: SimpleNamespace) -> int:
    return attention_flops(x.query, x.row_columns.shape[0], x.layout_heads, x.block, BIAS_BACKWARD)


def pairs(in_scores: int, in_values: int) -> Callable[[SimpleNamespace], int]:
    """Attention over lists of pairs, of products with the head size of scores, and that of values."""

    def formula(x: SimpleNamespace) -> int:
        depths = in_scores * x.query.shape[3] + (in_values * x.value.shape[3] if in_values else 0)
        return 2 * (x.columns.shape[0] * x.query.shape[0] * x.query.shape[1] // (x.list_batch * x.list_heads)) * depths

    return formula


def listed(in_scores: int, in_values: int) -> Callable[[SimpleNamespace], int]:
    """Attention on tokens' lists of keys, all of whose places count, with products as of `pairs`."""

    def formula(x: SimpleNamespace) -> int:
        keys = x.topk_idxs.shape[-1] * x.granularity
        depths = in_scores * x.query.shape[3] + in_values * x.value.shape[3]
        return 2 * x.query.shape[:3].numel() * keys * depths

    return formula


def pairs_in_tiles(each: int) -> Callable[[SimpleNamespace], int]:
    def formula(x: SimpleNamespace) -> int:
        query, bits = x.query, x.row_pairs
        count = sum(int((bits >> bit & 1).sum()) for bit in range(32))
        return each * query.shape[3] * count * query.shape[0] * query.shape[1] // (x.layout_heads * bits.shape[0])

    return formula


def sdd(x: SimpleNamespace) -> int:
    return 2 * x.a.shape[0] * num_values(x) * x.block**2 * x.a.shape[3]


def num_values(x: SimpleNamespace) -> int:
    """The live blocks of all heads of a product."""
    return x.columns.shape[0] * x.a.shape[1] // x.layout_heads


def band(tokens: Tensor, window: int) -> int:
    batch, heads, number, width = tokens.shape
    window = min(window, max(0, number - 1))
    return 2 * batch * heads * width * (number * (2 * window + 1) - window * (window + 1))
