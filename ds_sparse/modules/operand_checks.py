"""What modules of attention ask of their operands."""

from __future__ import annotations

from torch import Tensor

from ..ops import check_inputs
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed


def check_sizes(num_heads: int, num_key_heads: int, block: int, k: int, first: int, local: int) -> None:
    """Raises ValueError for heads that cannot share keys, and for blocks that cannot be chosen."""
    if num_key_heads < 1 or num_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"num_heads is {num_heads} and num_key_heads {num_key_heads}; the first has to be a multiple of the second."
        )
    if block not in CHOSEN_BLOCK_SIZES:
        raise ValueError(f"block is {block!r}; it has to be one of {listed(CHOSEN_BLOCK_SIZES, 'and')}.")
    for name, number, least in (("k", k, 1), ("first", first, 0), ("local", local, 0)):
        if not isinstance(number, int) or number < least:
            raise ValueError(f"{name} is {number!r}; it has to be an integer of {least} or more.")
    if first + local > k:
        raise ValueError(
            f"k is {k}, and first={first} and local={local} choose {first + local} blocks; give k={first + local} or "
            "more."
        )


def check_operands(query: Tensor, key: Tensor, value: Tensor, heads: int, key_heads: int, head_dim: int) -> None:
    """Raises TypeError for what is no tensor, ValueError for shapes that do not fit the module."""
    check_inputs(query=query, key=key, value=value)
    fit = query.dim() == key.dim() == 4 and key.shape == value.shape and query.shape[0] == key.shape[0]
    if not (fit and query.shape[1::2] == (heads, head_dim) and key.shape[1::2] == (key_heads, head_dim)):
        raise ValueError(
            f"Shapes are query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; the module "
            f"was built for query (batch, {heads}, tokens, {head_dim}), key and value (batch, {key_heads}, tokens, "
            f"{head_dim})."
        )
