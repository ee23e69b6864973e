"""LearnedChoice: what modules whose parameters choose blocks of keys have in common, their sizes and operands."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from ..index.transforms import refuse_samples
from ..ops import check_inputs
from ..ops.block_selection import check_counts, checked_number
from ..tools.block_sizes import CHOSEN_BLOCK_SIZES
from ..tools.wording import listed


class LearnedChoice(nn.Module):
    """The base of `NativeSparseAttention` and `IndexerAttention`; its repr has what the constructor was given.

    Raises:
        ValueError: heads that cannot share keys, and blocks that cannot be chosen.
    """

    def __init__(
        self, num_heads: int, num_key_heads: int, head_dim: int, block: int, k: int, first: int, local: int
    ) -> None:
        super().__init__()
        for name, number in (("num_heads", num_heads), ("num_key_heads", num_key_heads), ("head_dim", head_dim)):
            checked_number(name, number, 1)
        if num_heads % num_key_heads:
            raise ValueError(
                f"num_heads is {num_heads} and num_key_heads {num_key_heads}; the first has to be a multiple of the "
                "second."
            )
        if checked_number("block", block, 1) not in CHOSEN_BLOCK_SIZES:
            raise ValueError(f"block is {block!r}; it has to be one of {listed(CHOSEN_BLOCK_SIZES, 'and')}.")
        check_counts(k, first, local, causal=True)  # where a call is not, it counts those behind the token too
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, head_dim
        self.block, self.k, self.first, self.local = block, k, first, local

    def check_operands(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises TypeError for what is no tensor, ValueError for shapes that do not fit the module, and torch.vmap."""
        check_inputs(query=query, key=key, value=value)
        refuse_samples(type(self).__name__, query, key, value)
        heads, key_heads, head_dim = self.num_heads, self.num_key_heads, self.head_dim
        fit = query.dim() == key.dim() == 4 and key.shape == value.shape and query.shape[0] == key.shape[0]
        fit = fit and query.shape[2] > 0 and key.shape[2] > 0
        if not (fit and query.shape[1::2] == (heads, head_dim) and key.shape[1::2] == (key_heads, head_dim)):
            raise ValueError(
                f"Shapes are query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}; the "
                f"module was built for query (batch, {heads}, tokens, {head_dim}), key and value (batch, {key_heads}, "
                f"tokens, {head_dim}), of one token or more."
            )

    def extra_repr(self) -> str:
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
