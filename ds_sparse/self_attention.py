"""SparseSelfAttention: attention on the live blocks of a structure, out of MatMul and Softmax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from .index import BlockIndex
from .layout import as_bool_layout, crop, share_equal_heads
from .ops import MatMul, Softmax
from .ops.softmax import MASK_MODES
from .sparsity import FixedSparsityConfig, SparsityConfig


class SparseOps(NamedTuple):
    """The three operations of one layout."""

    scores: MatMul
    softmax: Softmax
    output: MatMul


class SparseSelfAttention(nn.Module):
    """softmax(query @ key^T / sqrt(D)) @ value on the live blocks of a layout. Source: DeepSpeed's module of this name.

    The layout is built for `max_seq_length` and kept in the buffer `master_layout`, int64 (H, R, C), which is in the state
    dict; shorter sequences use its top-left part, longer ones a layout built for their length. A checkpoint without the
    buffer loads, one with it decides the layout. When torch.distributed is running, all ranks take rank 0's random blocks.

    Args:
        sparsity_config: the structure; `FixedSparsityConfig(num_heads=4)` by default. Any object with `block`,
            `num_heads` and `make_layout(seq_len)` will do.
        key_padding_mask_mode, attn_mask_mode: 'add' (added to the scores; bool as 0 and 1, as DeepSpeed did) or 'mul'
            (keeps where not zero).
        max_seq_length: tokens, a multiple of the block.
        attention_dropout: probability with which attention probabilities are dropped in training.

    Raises:
        ValueError: an unknown mask mode, `max_seq_length` that is not a multiple of the block, what the structure refuses.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        *,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MASK_MODES:
                raise ValueError(f"{name} is {mode!r}; it has to be 'add' or 'mul'.")
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.attention_dropout = attention_dropout
        self.register_buffer("master_layout", self._build_layout(max_seq_length))
        self._need_layout_synchronization = True
        self._longer_layouts: dict[int, torch.Tensor] = {}
        self._ops: dict[tuple[int, torch.device], SparseOps] = {}

    def _build_layout(self, seq_len: int) -> torch.Tensor:
        config = self.sparsity_config
        if seq_len % config.block:
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by Block size {config.block}!")
        make = getattr(config, "make_bool_layout", config.make_layout)
        return _compact(make(seq_len), config.num_heads)

    @property
    def max_seq_length(self) -> int:
        """Tokens that `master_layout` covers."""
        return self.master_layout.shape[-1] * self.sparsity_config.block

    def get_layout(self, seq_len: int) -> torch.Tensor:
        """The layout for `seq_len` tokens, int64 (H, R, C) on the CPU.

        Raises:
            ValueError: `seq_len` is not a multiple of the block.
        """
        block = self.sparsity_config.block
        if seq_len % block:
            raise ValueError(
                f"Sequence Length, {seq_len}, needs to be dividable by Block size {block}! "
                "SparseAttentionUtils.pad_to_block_size pads a batch."
            )
        if seq_len > self.max_seq_length:
            if seq_len not in self._longer_layouts:
                self._longer_layouts[seq_len] = self._of_rank_0(self._build_layout(seq_len))
            return self._longer_layouts[seq_len]
        if self._need_layout_synchronization:
            self.master_layout = self._of_rank_0(self.master_layout)
            self._need_layout_synchronization = False
        return crop(self.master_layout, seq_len // block, seq_len // block).cpu()

    def get_ops(self, seq_len: int, device: torch.device) -> SparseOps:
        """The operations for `seq_len` tokens on `device`; built once, they share one index."""
        key = (seq_len, device)
        if key not in self._ops:
            block = self.sparsity_config.block
            index = BlockIndex.build(self.get_layout(seq_len), block).to(device)
            self._ops[key] = SparseOps(
                scores=MatMul(index, block, "sdd", trans_b=True),
                softmax=Softmax(index, block),
                output=MatMul(index, block, "dsd"),
            )
        return self._ops[key]

    def _of_rank_0(self, layout: torch.Tensor) -> torch.Tensor:
        """Rank 0's layout on every rank: random blocks drawn without a seed differ until then (DeepSpeed PR 534)."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return layout
        shared = layout.to(self.master_layout.device).contiguous()
        torch.distributed.broadcast(shared, src=0)
        return _compact(shared, self.sparsity_config.num_heads)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of each token to the live blocks of its row.

        Args:
            query, value: (B, H, T, D), T a multiple of the block.
            key: (B, H, T, D), or (B, H, D, T) where D differs from T.
            rpe: relative position bias (B or 1, H or 1, T, T), added after scaling.
            key_padding_mask: (B, T), or with dimensions of 1 between, such as (B, 1, 1, T).
            attn_mask: (T, T), or (B or 1, H or 1, T, T).

        Returns:
            (B, H, T, D); rows with nothing left are zeros.

        Raises:
            NotImplementedError: shapes of query, key and value differ.
            ValueError: another number of heads than the structure's; T not a multiple of the block; a mask of another shape.
        """
        seq_len, head_dim = query.shape[-2:]
        if key.dim() == 4 and key.shape[2] != seq_len:
            key = key.transpose(-1, -2)
        if query.dim() != 4 or query.shape != key.shape or key.shape != value.shape:
            raise NotImplementedError(
                f"only self-attention is supported for now: query, key and value have to be (B, H, T, D) alike, got "
                f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if query.shape[1] != self.sparsity_config.num_heads:
            raise ValueError(
                f"query has {query.shape[1]} heads and the sparsity config num_heads={self.sparsity_config.num_heads}; "
                "build the sparsity config with the number of heads that reach this module."
            )
        ops = self.get_ops(seq_len, query.device)
        scores = ops.scores(query, key)
        probs = ops.softmax(
            scores,
            scale=head_dim**-0.5,
            rpe=None if rpe is None else rpe.to(scores.dtype),
            key_padding_mask=_as_key_padding_mask(key_padding_mask, scores.dtype),
            attn_mask=_as_attn_mask(attn_mask, scores.dtype),
            key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode,
            causal=getattr(self.sparsity_config, "causal", False),
        )
        probs = nn.functional.dropout(probs, self.attention_dropout, self.training)
        return ops.output(probs, value)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        """Takes a layout of any size from a checkpoint, and does not miss one that is not there."""
        layout = state_dict.pop(prefix + "master_layout", None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if prefix + "master_layout" in missing:
            missing.remove(prefix + "master_layout")
        if layout is None:
            return
        heads = self.sparsity_config.num_heads
        if layout.dim() != 3 or layout.shape[0] != heads or layout.shape[1] != layout.shape[2]:
            errors.append(
                f"{prefix}master_layout has shape {tuple(layout.shape)} in the checkpoint; this model has {heads} heads "
                f"and needs ({heads}, R, R). Build it with the sparsity config that the checkpoint was trained with."
            )
            return
        self.master_layout = _compact(layout.to(self.master_layout.device), heads)
        self._longer_layouts.clear()
        self._ops.clear()


def _compact(layout: torch.Tensor, num_heads: int) -> torch.Tensor:
    """int64 (H, R, C) that stores one head where all are equal: at 65,536 tokens and block 16, 128 MiB and not 128 MiB a head.

    Raises:
        ValueError: the layout has neither one head nor `num_heads`.
    """
    layout = share_equal_heads(as_bool_layout(layout))
    if layout.shape[0] not in (1, num_heads):
        raise ValueError(
            f"make_layout returned {layout.shape[0]} heads for a sparsity config with num_heads={num_heads}; return as many, or one."
        )
    return layout.to(torch.int64).expand(num_heads, -1, -1)


def _as_key_padding_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dim() > 2 and all(size == 1 for size in mask.shape[1:-1]):
        mask = mask.reshape(mask.shape[0], mask.shape[-1])
    if mask.dim() != 2:
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}; it has to be (batch, tokens), or (batch, 1, 1, tokens)."
        )
    return _in_dtype(mask, dtype)


def _as_attn_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}; it has to be (tokens, tokens), or (batch or 1, heads or 1, tokens, tokens)."
        )
    return _in_dtype(mask, dtype)


def _in_dtype(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask in the scores' dtype; bool stays. A finite value beyond the dtype becomes its largest, not infinite, which would mask."""
    if mask.dtype in (torch.bool, dtype):
        return mask
    limits = torch.finfo(dtype)
    return mask.to(dtype).clamp(limits.min, limits.max).masked_fill(mask == float("-inf"), float("-inf"))
