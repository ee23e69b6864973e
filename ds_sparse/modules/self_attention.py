"""SparseSelfAttention: DeepSpeed's module, around `StructuredAttention`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..ops import MatMul, Softmax, check_inputs
from ..ops.operands import check_dropout, of_flash
from ..ops.softmax import MASK_MODES, as_additive, of_first_head
from ..sparsity import FixedSparsityConfig, SparsityConfig, adds_parameters
from ..tools.block_sizes import not_whole_blocks
from .chosen_attention import LEARNED, learned_attention, refuse_options
from .structured_attention import StructuredAttention


class _OpsOfModule:
    """`SparseSelfAttention.ops`: the operations that a module has made, by length, as `get_ops` returns them."""

    def __get__(self, module: SparseSelfAttention | None, owner: type) -> dict[int, tuple[MatMul, MatMul, Softmax]]:
        if module is None:
            raise AttributeError(
                f"{owner.__name__}.ops is kept by each module: modules of different layouts would share it. Ask "
                "module.ops, or module.get_ops(H, L)."
            )
        return {length: (ops.scores, ops.output, ops.softmax) for length, ops in module.attention.ops_made().items()}


class SparseSelfAttention(nn.Module):
    """softmax(query @ key^T / sqrt(D)) @ value on the live blocks of a layout. Source: DeepSpeed's module of this name.

    The layout is built for `max_seq_length`; shorter sequences use its top-left part, longer ones a layout built for
    their length. Copies of a module (copy.deepcopy) share the layout and its operations until one of them loads
    another.

    It is a persistent buffer, `master_layout`, int64 (H, R, C), where DeepSpeed has it. A checkpoint with it decides
    the layout, one without it loads too. It is on the CPU, also where the module is built on the meta device or moved
    to another. Modules that contain this one do not list it among their `buffers()`, which DistributedDataParallel and
    FSDP broadcast and move; their state dicts have it. Where queries choose their blocks, no state dict has it, and
    that of another structure is not taken.

    Random blocks drawn without a seed differ between ranks: when torch.distributed runs, all take rank 0's, once, at
    construction or at the first forward.

    Args:
        sparsity_config: the structure; `FixedSparsityConfig(num_heads=4)` by default. Any object with `block`,
            `num_heads` and `make_layout(seq_len)` will do.
        key_padding_mask_mode, attn_mask_mode: 'add' (added to the scores; bool and integers as the numbers they are, as
            DeepSpeed did) or 'mul' (keeps where not zero).
        max_seq_length: tokens, a multiple of the block.
        mpu: accepted for callers of DeeperSpeed, and not used: random layouts are those of global rank 0, as there.
        attention_dropout: probability with which attention probabilities are dropped in training.
        implementation: 'fused' (`block_sparse_attention`, memory linear in tokens) or 'separate' (MatMul, Softmax and
            MatMul, which store scores and probabilities: the way to check the other; also for fp64 on CUDA, and for
            gradients of masks).
        head_dim, num_key_heads: the size of heads, and how many key and value have, for a structure that adds
            parameters (modes "nsa" and "indexer"): the module `sparse_attention` has them. `num_key_heads` is that of
            query if it is not given.
        learned_like: a module whose device, dtype and mode these parameters take.

    Raises:
        TypeError: sparsity_config is no such object.
        ValueError: an unknown mask mode or implementation, `max_seq_length` that is not a multiple of the block,
            `attention_dropout` outside of 0 to below 1, or above 0 where queries choose blocks and it is not computed,
            what the structure refuses.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> structure = ds_sparse.BigBirdSparsityConfig(num_heads=4, block=16, seed=0)
        >>> attention = ds_sparse.SparseSelfAttention(structure, max_seq_length=128)
        >>> attention
        SparseSelfAttention(BigBirdSparsityConfig, num_heads=4, block=16, max_seq_length=128)
        >>> query, key, value = (torch.randn(2, 4, 64, 8) for _ in range(3))
        >>> padding = torch.zeros(2, 64)
        >>> padding[:, 60:] = float("-inf")
        >>> attention(query, key, value, key_padding_mask=padding).shape
        torch.Size([2, 4, 64, 8])
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
        mpu: Any = None,
        *,
        attention_dropout: float = 0.0,
        implementation: str = "fused",
        head_dim: int | None = None,
        num_key_heads: int | None = None,
        learned_like: nn.Module | None = None,
    ):
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MASK_MODES:
                raise ValueError(f"{name} is {mode!r}; it has to be 'add' or 'mul'.")
        check_dropout("attention_dropout", attention_dropout)
        refuse_options(sparsity_config, dropout_p=attention_dropout)
        self.sparsity_config = FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.attention_dropout = attention_dropout
        self._attention = StructuredAttention(
            self.sparsity_config, max_seq_length, implementation, gives_learned=head_dim is not None
        )
        # A buffer without a tensor is what loaders find by its name, and what nothing moves, broadcasts or casts.
        self._buffers["master_layout"] = None
        if head_dim is not None:
            self.add_learned(num_key_heads or self.sparsity_config.num_heads, head_dim, learned_like)

    def add_learned(self, num_key_heads: int, head_dim: int, like: nn.Module | None = None) -> None:
        """Makes the parameters of a structure that adds some, anew.

        Args:
            num_key_heads, head_dim: of key and value.
            like: a module whose device, dtype and mode they take.

        Raises:
            ValueError: numbers that do not fit; a structure for causal models that is not causal.
        """
        if adds_parameters(self.sparsity_config):
            self.add_module(LEARNED, learned_attention(self.sparsity_config, num_key_heads, head_dim, like=like))

    @property
    def attention(self) -> StructuredAttention:
        """The attention that computes, with the layout."""
        # Accelerate writes here and not to the attribute; a tensor without memory says nothing.
        given = self._buffers.get("master_layout")
        # torch.export puts a tensor without values there while it traces.
        if given is not None and not torch.compiler.is_exporting():
            self._buffers["master_layout"] = None
            if not given.is_meta and not self._attention.chooses:
                self._attention.layout = given
        return self._attention

    @property
    def master_layout(self) -> torch.Tensor:
        """The layout for `max_seq_length` tokens, int64 (H, R, C) on the CPU, for reading; assign another to replace
        it."""
        return self.attention.layout_buffer()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "master_layout":
            self.attention.layout = value
        else:
            super().__setattr__(name, value)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """`master_layout`, unless queries choose their blocks: DeepSpeed asks each module for what to save. See the
        class about modules that contain it."""
        attention = self.attention  # takes what a loader has put among the buffers
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if attention.chooses:
            return
        layout = attention.layout_buffer()
        yield f"{prefix}.master_layout" if prefix else "master_layout", layout

    @property
    def max_seq_length(self) -> int:
        """Tokens that `master_layout` covers."""
        return self.attention.max_seq_length

    ops = _OpsOfModule()

    @property
    def _need_layout_synchronization(self) -> bool:
        """True while this module has still to take the random blocks of rank 0."""
        return self.attention._awaits_other_ranks

    @_need_layout_synchronization.setter
    def _need_layout_synchronization(self, needed: bool) -> None:
        self.attention._awaits_other_ranks = needed

    def get_layout(self, L: int) -> torch.Tensor:
        """The layout for a length.

        Args:
            L: tokens, a multiple of the block.

        Returns:
            int64 (H, R, C) on the CPU.

        Raises:
            ValueError: as in `forward`.
        """
        self._check_length(L)
        self.attention.synchronize_layout()
        return self.attention.layout_for(L).to(torch.int64).expand(self.sparsity_config.num_heads, -1, -1)

    def get_ops(self, H: int, L: int) -> tuple[MatMul, MatMul, Softmax]:
        """The separate operations for a length, which take operands on any device and share one index for each.

        Args:
            H: heads. Not used: the layout has them, and the operations check them.
            L: tokens, a multiple of the block.

        Returns:
            Scores (sdd, B transposed), output (dsd) and softmax.

        Raises:
            TypeError: arguments that are no numbers.
            ValueError: as in `forward`.
        """
        if not isinstance(H, int) or not isinstance(L, int):
            raise TypeError(f"get_ops takes heads and tokens, two numbers, got {H!r} and {L!r}.")
        self._check_length(L)
        self.attention.synchronize_layout()
        ops = self.attention.ops(L, torch.device("cpu"))
        return ops.scores, ops.output, ops.softmax

    def transpose_key_for_scores(self, x: torch.Tensor, L: int) -> torch.Tensor:
        """(B, H, L, D) from that, or from (B, H, D, L); a view."""
        return x if x.shape[2] == L else x.transpose(2, 3)

    def transpose_mask_for_sparse(
        self, qtype: torch.dtype, x: torch.Tensor, is_key_padding_mask: bool = False
    ) -> torch.Tensor:
        """A mask in the dtype `qtype` without its dimensions of 1, but for a key padding mask's first. `forward` needs
        none of this."""
        x = x.to(qtype)
        return x.squeeze(tuple(range(1, x.dim()))) if is_key_padding_mask else x.squeeze()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        *,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of each token to the live blocks of its row.

        Args:
            query, value: (B, H, T, D), T a multiple of the block.
            key: (B, H, T, D), or (B, H, D, T) where D differs from T. It may have fewer heads, with value, as in the
                call of `StructuredAttention`.
            rpe: relative position bias (B or 1, H or 1, T, T), added after scaling.
            key_padding_mask: (B, T), or with dimensions of 1 between, such as (B, 1, 1, T). Of one (B, H, T) the first
                head's counts for all, as in DeepSpeed, with a warning.
            attn_mask: (T, T), also with dimensions of 1 anywhere, or (B or 1, H or 1, T, T).
            distance_bias: relative position bias by distance, (H or 1, 2M - 1), as `block_sparse_attention` takes it,
                in memory linear in tokens; for `implementation="fused"`.

        Returns:
            (B, H, T, D); rows with nothing left are zeros.

        Raises:
            TypeError: operands that are no tensors.
            NotImplementedError: shapes of query, key and value differ in more than the number of heads; DeepSpeed's
                class raises this one.
            ValueError: another number of heads than the structure's; T not a multiple of the block, or 0; a mask of
                another shape; several ranks that would draw different layouts for a T above `max_seq_length`.
        """
        check_inputs(query=query, key=key, value=value)
        check_inputs(rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if query.dim() != 4:
            raise ValueError(f"query has shape {tuple(query.shape)}; it has to be (batch, heads, tokens, head_dim).")
        seq_len, head_dim = query.shape[-2:]
        if key.shape[-2:] == (head_dim, seq_len):
            key = self.transpose_key_for_scores(key, seq_len)
        key_padding_mask = as_key_padding_mask(key_padding_mask)
        if key_padding_mask is not None:
            key_padding_mask = of_first_head(key_padding_mask, query.shape[1])
            key_padding_mask = _in_mode("key_padding_mask", key_padding_mask, self.key_padding_mask_mode, query.dtype)
        if attn_mask is not None:
            if attn_mask.numel() == seq_len**2 and attn_mask.squeeze().shape == (seq_len, seq_len):
                attn_mask = attn_mask.squeeze()
            attn_mask = _in_mode("attn_mask", attn_mask, self.attn_mask_mode, query.dtype)
        is_flash = query.shape[1] != self.sparsity_config.num_heads == seq_len
        self._check_length(seq_len, of_flash(query, is_flash))
        return self.attend(
            query, key, value, rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask,
            distance_bias=distance_bias,
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """`forward` for any T, and with masks that say by their dtype what they mean.

        Args:
            query: (B, H, T, D), T above 0.
            key, value: (B, H, T, D), or with fewer heads, which divide H.
            rpe: (T, T), or (B or 1, H or 1, T or 1, T), added after scaling.
            key_padding_mask: (B or 1, T); bool keeps where True, float is added.
            attn_mask: (T, T), or (B or 1, H or 1, T or 1, T); likewise.
            distance_bias: as in `forward`.
            softcap: as of `block_sparse_attention`.

        Returns:
            (B, H, T, D); rows with nothing left are zeros.

        Raises:
            NotImplementedError: as in `forward`.
            ValueError: as in `forward`; a mask that is neither bool nor floating point.
        """
        return self.attention(
            query, key, value, dropout_p=self.attention_dropout if self.training else 0.0, rpe=rpe,
            key_padding_mask=key_padding_mask, attn_mask=attn_mask, distance_bias=distance_bias, softcap=softcap,
            learned=self._modules.get(LEARNED),
        )  # fmt: skip

    def _check_length(self, seq_len: int, hint: str = "") -> None:
        block = self.sparsity_config.block
        if seq_len % block or seq_len == 0:
            raise ValueError(
                f"{not_whole_blocks(seq_len, block)} SparseAttentionUtils.pad_to_block_size pads a batch; "
                "block_sparse_attention takes any length." + hint
            )

    def extra_repr(self) -> str:
        config = self.sparsity_config
        return (
            f"{type(config).__name__}, num_heads={config.num_heads}, block={config.block}, "
            f"max_seq_length={self.max_seq_length}"
        )

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.attention.chooses:  # another structure would take its layout for one to compute on
            return
        # Memory of its own: formats for checkpoints refuse tensors that share it, or would leave one out.
        destination[prefix + "master_layout"] = self.master_layout.clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        """Takes a layout of any length from a checkpoint, unless queries choose their blocks, and does not miss one
        that is not there."""
        layout = state_dict.pop(prefix + "master_layout", None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if layout is not None and not self.attention.chooses:
            try:
                self.master_layout = layout  # type: ignore[misc]  # __setattr__ takes it
            except (TypeError, ValueError) as error:
                errors.append(
                    f"{prefix}master_layout: {error} Build the model with the sparsity config that the checkpoint was "
                    "trained with."
                )


def as_key_padding_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """(B, T) from (B, 1, ..., 1, T); any other mask as it is."""
    if mask is not None and mask.dim() > 2 and all(size == 1 for size in mask.shape[1:-1]):
        return mask.reshape(mask.shape[0], mask.shape[-1])
    return mask


def _in_mode(name: str, mask: torch.Tensor, mode: str, dtype: torch.dtype) -> torch.Tensor:
    """A mask in mode 'add' or 'mul' as one that is added where floating, and keeps where True where bool."""
    if mode == "mul":
        return mask if mask.dtype == torch.bool else mask != 0
    return mask if mask.is_floating_point() else as_additive(name, mask, dtype)
