from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ._registry import register_sparsity
from .chosen import ChosenSparsityConfig, ForcedWindow, NumChosenBlocks, NumFirstBlocks, forced_fit
from .declarations import declared


def _forced_fit(num_chosen_blocks: int, num_first_blocks: int, num_sliding_window_blocks: int) -> str | None:
    """It is causal, in any case."""
    return forced_fit(num_chosen_blocks, num_first_blocks, num_sliding_window_blocks, causal=True)


def _strides_fit(block: int, compressed_length: int, compressed_stride: int) -> str | None:
    if compressed_length % compressed_stride == 0 and block % compressed_stride == 0:
        return None
    return (
        f"compressed_stride is {compressed_stride}, compressed_length {compressed_length} and block {block}; both have "
        "to be multiples of the stride."
    )


@register_sparsity("nsa")
@declared
class NativeSparsityConfig(ChosenSparsityConfig):
    """Compressed keys, the blocks that they choose in each call, and a window, which gates add up: mode "nsa".

    Source: Yuan et al., "Native sparse attention: Hardware-aligned and natively trainable sparse attention", 2025. It
    is for causal models, or causal here. Each layer gets a `NativeSparseAttention`, whose parameters are trained.

    Raises:
        ValueError: a field of the wrong type or out of bounds; fewer chosen blocks than are taken whatever they score;
            a stride that does not divide block and length.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> structure = ds_sparse.NativeSparsityConfig(num_heads=4, block=16, window=32, causal=True)
        >>> attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=128, head_dim=8)
        >>> query, key, value = (torch.randn(2, 4, 128, 8) for _ in range(3))
        >>> attention(query, key, value).shape
        torch.Size([2, 4, 128, 8])
    """

    num_chosen_blocks: NumChosenBlocks = 16
    num_first_blocks: NumFirstBlocks = 1
    num_sliding_window_blocks: ForcedWindow = 3
    compressed_length: int = Field(default=32, ge=1, description="Keys that a compressed key is made of.")
    compressed_stride: int = Field(
        default=16,
        ge=1,
        description="Keys from the begin of one compressed key to that of the next; divides block and "
        "compressed_length. Packed documents want a power of two, 8 or more.",
    )
    window: int = Field(default=512, ge=1, description="Tokens of the window: the token's own and those before it.")

    rules = (_forced_fit, _strides_fit)

    adds_parameters: ClassVar[bool] = True

    def computed_share(self, seq_len: int, causal: bool = True) -> float:
        """The share of scores that are computed: of compressed keys, of blocks, where each query finds as many as it
        takes, and of the window.

        Args:
            seq_len: tokens, a multiple of the block.
            causal: it is, in any case.

        Returns:
            Above 0 to 1, which stands for more too.

        Raises:
            ValueError, TypeError: seq_len is no positive multiple of the block.
        """
        chosen = super().computed_share(seq_len, causal=True)
        of_compressed = 0.5 / self.compressed_stride
        return min(1.0, chosen + of_compressed + min(self.window, seq_len) / seq_len)
