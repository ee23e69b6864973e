"""The kernels of `window_attention` as operators: what they are called with, and what they return when traced.

Each takes the lists of an index. Its twin, `window_numbers_*`, takes the numbers of a window and finds the index when
it runs: this is what compiled and exported graphs hold, for any length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops import add_op_namespace_prefix, ops
from ..index import WindowIndex
from ..index.lookup import index_of_window
from ..index.window_sizes import WindowNumbers
from .attention_operators import fake_forward, implementation_for
from .operands import empty_as, lists_of_tiles

NUMBERS_OPERATORS = ("window_numbers_forward", "window_numbers_backward")


def window_attention_forward(index: WindowIndex | WindowNumbers, *call) -> tuple[Tensor, Tensor, Tensor]:
    """output, lse and the saved statistics of rows: of query, key, value, key_bias and scale."""
    if isinstance(index, WindowNumbers):
        return ops.window_numbers_forward(*call, *index)
    *tensors, scale = call
    blocks = index.blocks
    chosen = implementation_for(blocks, call[0])
    tile = chosen.tile(blocks.block)
    return ops.window_attention_forward(
        *tensors, index.limits, index.places, *lists_of_tiles(blocks.tiles("rows", tile)),
        blocks.layout_heads, blocks.block, tile, index.num_global, scale, index.causal, chosen.name,
    )  # fmt: skip


def window_attention_backward(
    index: WindowIndex | WindowNumbers, *call, forced: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. forced: as of `dispatch.choose`."""
    if isinstance(index, WindowNumbers):
        return ops.window_numbers_backward(*call, *index)
    *tensors, scale, deterministic = call
    blocks = index.blocks
    chosen = implementation_for(blocks, call[1], forced)
    tile = chosen.tile(blocks.block)
    return ops.window_attention_backward(
        *tensors, index.limits, index.places,
        *lists_of_tiles(blocks.tiles("rows", tile)), *lists_of_tiles(blocks.tiles("columns", tile)),
        blocks.layout_heads, blocks.block, tile, index.num_global, scale, index.causal, deterministic, chosen.name,
    )  # fmt: skip


def order_of(
    index: WindowIndex | WindowNumbers, tokens: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """`WindowIndex.order` and `inverse`."""
    if isinstance(index, WindowIndex):
        return index.order, index.inverse
    return (None, None) if index.in_order else ops.window_order(tokens, *index, device)


_NUMBERS = "SymInt[] windows, bool causal, int[] global_tokens, SymInt[] dilations"
_operators = torch.library.Library(ops.name, "FRAGMENT")
_operators.define(
    "window_numbers_forward(Tensor query, Tensor key, Tensor value, Tensor? key_bias, float scale, "
    f"{_NUMBERS}) -> (Tensor, Tensor, Tensor)"
)
_operators.define(
    "window_numbers_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor rows, "
    f"Tensor? key_bias, float scale, bool deterministic, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
)
_operators.define(f"window_order(SymInt tokens, {_NUMBERS}, Device device) -> (Tensor, Tensor)")


@torch.library.impl(_operators, "window_numbers_forward", "CompositeExplicitAutograd")
def _(query, *call):
    return window_attention_forward(_index(query, *call[-4:]), query, *call[:-4])


@torch.library.impl(_operators, "window_numbers_backward", "CompositeExplicitAutograd")
def _(*call):
    return window_attention_backward(_index(call[1], *call[-4:]), *call[:-4])


@torch.library.impl(_operators, "window_order", "CompositeExplicitAutograd")
def _(tokens, *call):
    *lists, device = call
    numbers = WindowNumbers.of(*lists)
    index = index_of_window(tokens, numbers, device).ready()
    as_it_is = torch.arange(tokens, device=device).expand(numbers.layout_heads, -1)
    # Copies, as a graph may write into what it is given.
    order, inverse = ((as_it_is if x is None else x).clone() for x in (index.order, index.inverse))
    return order, inverse


def _index(query: Tensor, *lists) -> WindowIndex:
    return index_of_window(query.shape[2], WindowNumbers.of(*lists), query.device).ready()


torch.library.register_fake(add_op_namespace_prefix("window_attention_forward"), fake_forward)
torch.library.register_fake(add_op_namespace_prefix("window_numbers_forward"), fake_forward)


@torch.library.register_fake(add_op_namespace_prefix("window_attention_backward"))
@torch.library.register_fake(add_op_namespace_prefix("window_numbers_backward"))
def _(grad_output, query, key, value, *_):
    return empty_as(query), empty_as(key), empty_as(value)


@torch.library.register_fake(add_op_namespace_prefix("window_order"))
def _(tokens, *call):
    *lists, device = call
    order, inverse = (
        torch.empty(WindowNumbers.of(*lists).layout_heads, tokens, dtype=torch.long, device=device) for _ in range(2)
    )
    return order, inverse
