"""NativeSparseAttention: gated attention on compressed keys, on the blocks that these choose, and on a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import check_inputs, select_blocks_by_compression, selected_attention, window_attention
from ..ops._library import under_autocast
from ..ops.block_selection import checked_number
from ..ops.operands import broadcasts, check_bias, kept
from ..ops.packed_operands import refuse_by_place
from ..ops.query_offset import check_window_offset
from .choices import note
from .compressed_attention import Compression, StridesOfDocuments, compressed_attention, windows_of
from .learned_choice import LearnedChoice


class NativeSparseAttention(LearnedChoice):
    """Causal attention in three branches, which gates of each token and head add up.

    One attends to compressed keys, each made of `length` keys by an MLP; one to the `k` blocks of keys to which a group
    of heads gives most in the first; and one to a window. Operands are those of attention layers, after rotary
    embedding, and so the gates are a function of each head's query, where the source has that of the hidden state; who
    wants that gives `gates`. Memory is linear in tokens: no matrix of tokens by compressed keys is made. Where a cache
    holds keys and values, those that are compressed are made of it anew in each call, and none are kept.

    Source: Yuan et al., "Native sparse attention: Hardware-aligned and natively trainable sparse attention", 2025.

    Args:
        num_heads: H.
        num_key_heads: Hkv, a divisor of it.
        head_dim: D.
        block: keys in a block that is chosen: 16, 32, 64, 128, 256, 512 or 1024.
        k: how many blocks a token sees, with those of `first` and `local`.
        length, stride: a compressed key is made of `length` keys, and begins `stride` behind the one before it. Both
            `length` and `block` are multiples of `stride`.
        window: tokens that the window has, the token's own and those before it.
        first, local: so many blocks from the start, and so many up to the token's own, are seen whatever they score.

    Attributes:
        compress_key, compress_value: modules (B, Hkv, T, D) -> (B, Hkv, C, D), which heads share: the embedding of a
            key's place among `length`, and an MLP with GELU.
        gate_weight, gate_bias: (H, D, 3) and (H, 1, 3); gates are sigmoid(query @ weight + bias), a half at first.

    Raises:
        ValueError: numbers that do not fit.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> attention = ds_sparse.NativeSparseAttention(8, 2, 32, block=16, k=4, length=8, stride=4, window=32)
        >>> query = torch.randn(1, 8, 100, 32)
        >>> key, value = torch.randn(1, 2, 100, 32), torch.randn(1, 2, 100, 32)
        >>> attention(query, key, value).shape
        torch.Size([1, 8, 100, 32])
    """

    def __init__(
        self,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        *,
        block: int = 64,
        k: int = 16,
        length: int = 32,
        stride: int = 16,
        window: int = 512,
        first: int = 1,
        local: int = 2,
    ) -> None:
        super().__init__(num_heads, num_key_heads, head_dim, block, k, first, local)
        for name, number in (("length", length), ("stride", stride), ("window", window)):
            checked_number(name, number, 1)
        if length % stride or block % stride:
            raise ValueError(
                f"stride is {stride}, length {length} and block {block}; both have to be multiples of the stride."
            )
        self.length, self.stride, self.window = length, stride, window
        self.compress_key = Compression(head_dim, length, stride)
        self.compress_value = Compression(head_dim, length, stride)
        self.gate_weight = nn.Parameter(torch.zeros(num_heads, head_dim, 3))
        self.gate_bias = nn.Parameter(torch.zeros(num_heads, 1, 3))

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as the constructor does."""
        self.compress_key.reset_parameters()
        self.compress_value.reset_parameters()
        nn.init.zeros_(self.gate_weight)
        nn.init.zeros_(self.gate_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window_key: Tensor | None = None,
        window_value: Tensor | None = None,
        gates: Tensor | None = None,
        causal: bool = True,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        query_offset: int | Tensor = 0,
    ) -> Tensor:
        """Attention of each token to those before it.

        Args:
            query: (B, H, T, D), fp16, bf16 or fp32, on the CPU also fp64.
            key, value: (B, Hkv, S, D), of the blocks, and to be compressed; S is T where none are cached.
            window_key, window_value: (B, Hkv, S, D), of the window; key and value if they are not given.
            gates: (B or 1, H or 1, T or 1, 3), factors of what compressed keys, blocks and the window give; the
                module's if they are not given.
            causal: True.
            scale: factor of the scores; 1 / sqrt(D) if it is not given.
            key_padding_mask: (B or 1, S). Keys where it is False, or -inf, are not seen, nor compressed keys that are
                made of one; other floats are added to scores of blocks and of the window.
            cu_seqlens: int32 or int64 (documents + 1), as in `selected_attention`: the sequence, B is 1, is a row of
                packed documents, of which none sees another. The stride is a power of two then, 8 or more.
            query_offset: the position of the first query among the keys, an integer, S - T while decoding: keys before
                it are cached. All keys are compressed in each call, in time linear in S.

        Returns:
            (B, H, T, D).

        Raises:
            TypeError: operands that are no tensors; a query_offset that is no integer.
            ValueError: shapes that do not fit; queries whose own keys are not there; what is not computed.
        """
        self.check_operands(query, key, value)
        self._check_call(query, key, causal, cu_seqlens, key_padding_mask, gates)
        at = check_window_offset(query_offset, query.shape[2], key.shape[2])
        offset = None if query.shape[2] == key.shape[2] else at  # None: windows of whole sequences, which cost less
        # Once, where each branch would cast its own.
        query, key, value = under_autocast(query, key, value)
        window_key, window_value = (y if x is None else x for x, y in ((window_key, key), (window_value, value)))
        to_compress, whole = (key, value), None
        if key_padding_mask is not None:
            keep = kept(key_padding_mask).expand(-1, key.shape[2])
            whole = windows_of(keep, 1, self.length, self.stride).all(-1)
            # What padding holds would reach the gradients of an MLP.
            to_compress = key.masked_fill(hidden := ~keep[:, None, :, None], 0), value.masked_fill(hidden, 0)
        documents = None
        if cu_seqlens is not None:
            documents = StridesOfDocuments.of(cu_seqlens, query, self.stride)
            to_compress = documents.aligned(key), documents.aligned(value)
        compressed_key, compressed_value = self.compress_key(to_compress[0]), self.compress_value(to_compress[1])
        numbers = select_blocks_by_compression(
            query, compressed_key, self.block, self.k, length=self.length, stride=self.stride, scale=scale, causal=True,
            first=self.first, local=self.local, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens,
            compressed_cu_seqlens=None if documents is None else documents.begins, query_offset=at, keys=key.shape[2],
        )  # fmt: skip
        note(
            numbers, self.block, query, key, causal=True, scale=scale, first=self.first, local=self.local,
            key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, query_offset=at,
        )  # fmt: skip
        compressed = compressed_attention(
            query, compressed_key, compressed_value, self.length, self.stride, scale=scale, key_padding_mask=whole,
            documents=documents, query_offset=offset,
        )  # fmt: skip
        chosen = selected_attention(
            query, key, value, numbers, self.block, causal=True, scale=scale, key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens, query_offset=at,
        )  # fmt: skip
        near = window_attention(
            query, window_key, window_value, self.window - 1, True, key_padding_mask, scale=scale,
            cu_seqlens=cu_seqlens, query_offset=offset,
        )  # fmt: skip
        if gates is None:
            gates = self._gates(query)
        of_compressed, of_chosen, of_near = gates.to(near.dtype).split(1, -1)
        return of_compressed * compressed + of_chosen * chosen + of_near * near

    def _gates(self, query: Tensor) -> Tensor:
        """(B, H, T, 3). The product writes three rows of tokens: rows of three numbers are no whole 16 bytes, which
        matrix products are fast with. Queries whose heads lie inside tokens are not copied for it."""
        weight = self.gate_weight.mT.contiguous()
        return torch.sigmoid(torch.einsum("hgd,bhtd->bhgt", weight, query) + self.gate_bias.mT).mT

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        causal: bool,
        cu_seqlens: Tensor | None,
        key_padding_mask: Tensor | None,
        gates: Tensor | None,
    ) -> None:
        """Raises TypeError or ValueError for masks and gates that do not fit, and for what is not computed."""
        if not causal:
            raise ValueError(
                "causal is False, and NativeSparseAttention is for causal models: tokens see compressed keys that are "
                "behind them. Give causal=True, or take IndexerAttention."
            )
        check_inputs(gates=gates, key_padding_mask=key_padding_mask)
        if gates is not None and not (
            gates.dim() == 4 and gates.shape[3] == 3 and broadcasts(gates.shape[:3], query.shape[:3])
        ):
            raise ValueError(
                f"gates have shape {tuple(gates.shape)}; they have to be {(*query.shape[:3], 3)}, of which the first "
                "three may be 1."
            )
        if key_padding_mask is not None:
            check_bias("key_padding_mask", key_padding_mask, query, (query.shape[0], key.shape[2]), (2,))
        if cu_seqlens is None:
            return
        refuse_by_place(key_padding_mask=key_padding_mask is not None, query_offset=query.shape[2] != key.shape[2])
        if query.shape[0] != 1:
            raise ValueError(f"query has {query.shape[0]} sequences; packed documents are one row, of batch size 1.")
        if self.stride < 8 or self.stride & (self.stride - 1):
            raise ValueError(f"stride is {self.stride}; of packed documents it has to be a power of two, 8 or more.")
