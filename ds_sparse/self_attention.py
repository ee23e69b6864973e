"""SparseSelfAttention: attention on the live blocks of a structure, in one operation or out of MatMul and Softmax."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import dropout, pad

from .index import BlockIndex, lasting, plain
from .layout import as_bool_layout, crop, on_cpu, share_equal_heads
from .layout_buffer import LayoutBuffer
from .master_layout import MasterLayout, kept
from .ops import MatMul, Softmax, block_sparse_attention, check_inputs
from .ops.softmax import MASK_MODES, as_additive
from .ranks import from_rank_0, world_size
from .sparsity import FixedSparsityConfig, SparsityConfig
from .sparsity.draws import without_seed

IMPLEMENTATIONS = ("fused", "separate")


class SparseOps(NamedTuple):
    """The three operations of one layout, which store scores and probabilities."""

    scores: MatMul
    softmax: Softmax
    output: MatMul


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

    It is a persistent buffer, `master_layout`, int64 (H, R, C), where DeepSpeed has it. A checkpoint with it decides the
    layout, one without it loads too. It is on the CPU, also where the module is built on the meta device or moved to
    another. Modules that contain this one do not list it among their `buffers()`, which DistributedDataParallel and
    FSDP broadcast and move; their state dicts have it.

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

    Raises:
        ValueError: an unknown mask mode or implementation, `max_seq_length` that is not a multiple of the block, what the
            structure refuses.
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
    ):
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in MASK_MODES:
                raise ValueError(f"{name} is {mode!r}; it has to be 'add' or 'mul'.")
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.attention_dropout = attention_dropout
        self._attention = StructuredAttention(self.sparsity_config, max_seq_length, implementation)
        # A buffer without a tensor is what loaders find by its name, and what nothing moves, broadcasts or casts.
        self._buffers["master_layout"] = None

    @property
    def attention(self) -> StructuredAttention:
        """What computes, with the layout."""
        # Accelerate writes here and not to the attribute; a tensor without memory says nothing.
        given = self._buffers.get("master_layout")
        # torch.export puts a tensor without values there while it traces.
        if given is not None and not torch.compiler.is_exporting():
            self._buffers["master_layout"] = None
            if not given.is_meta:
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
        """`master_layout`: DeepSpeed asks each module for what to save. See the class about modules that contain it."""
        layout = self.master_layout  # takes what a loader has put among the buffers
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        yield f"{prefix}.master_layout" if prefix else "master_layout", layout

    @property
    def max_seq_length(self) -> int:
        """Tokens that `master_layout` covers."""
        return self.attention.max_seq_length

    ops = _OpsOfModule()

    @property
    def _need_layout_synchronization(self) -> bool:
        """Whether this module has still to take the random blocks of rank 0."""
        return self.attention._awaits_other_ranks

    @_need_layout_synchronization.setter
    def _need_layout_synchronization(self, needed: bool) -> None:
        self.attention._awaits_other_ranks = needed

    def get_layout(self, L: int) -> torch.Tensor:
        """The layout for `L` tokens, int64 (H, R, C) on the CPU.

        Raises:
            ValueError: as in `forward`.
        """
        self._check_length(L)
        self.attention._synchronize_layout()
        return self.attention.layout_for(L).to(torch.int64).expand(self.sparsity_config.num_heads, -1, -1)

    def get_ops(self, H: int, L: int) -> tuple[MatMul, MatMul, Softmax]:
        """The separate operations for `L` tokens: scores (sdd, B transposed), output (dsd) and softmax. They take
        operands on any device and share one index for each.

        Args:
            H: heads. Not used: the layout has them, and the operations check them.

        Raises:
            TypeError: arguments that are no numbers.
            ValueError: as in `forward`.
        """
        if not isinstance(H, int) or not isinstance(L, int):
            raise TypeError(f"get_ops takes heads and tokens, two numbers, got {H!r} and {L!r}.")
        self._check_length(L)
        self.attention._synchronize_layout()
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
    ) -> torch.Tensor:
        """Attention of each token to the live blocks of its row.

        Args:
            query, value: (B, H, T, D), T a multiple of the block.
            key: (B, H, T, D), or (B, H, D, T) where D differs from T. It may have fewer heads, with value, as in the
                call of `StructuredAttention`.
            rpe: relative position bias (B or 1, H or 1, T, T), added after scaling.
            key_padding_mask: (B, T), or with dimensions of 1 between, such as (B, 1, 1, T).
            attn_mask: (T, T), also with dimensions of 1 anywhere, or (B or 1, H or 1, T, T).

        Returns:
            (B, H, T, D); rows with nothing left are zeros.

        Raises:
            NotImplementedError: shapes of query, key and value differ in more than the number of heads.
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
        if key_padding_mask is not None:
            key_padding_mask = as_key_padding_mask(key_padding_mask)
            key_padding_mask = _in_mode("key_padding_mask", key_padding_mask, self.key_padding_mask_mode, query.dtype)
        if attn_mask is not None:
            if attn_mask.numel() == seq_len**2 and attn_mask.squeeze().shape == (seq_len, seq_len):
                attn_mask = attn_mask.squeeze()
            attn_mask = _in_mode("attn_mask", attn_mask, self.attn_mask_mode, query.dtype)
        self._check_length(seq_len)
        return self.attend(query, key, value, rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` for any T, and with masks that say by their dtype what they mean: see `StructuredAttention`."""
        return self.attention(
            query,
            key,
            value,
            dropout_p=self.attention_dropout if self.training else 0.0,
            rpe=rpe,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
        )

    def _check_length(self, seq_len: int) -> None:
        block = self.sparsity_config.block
        if seq_len % block or seq_len == 0:
            raise ValueError(
                f"Sequence Length, {seq_len}, needs to be dividable by Block size {block}! "
                "SparseAttentionUtils.pad_to_block_size pads a batch; block_sparse_attention takes any length."
            )

    def extra_repr(self) -> str:
        config = self.sparsity_config
        return (
            f"{type(config).__name__}, num_heads={config.num_heads}, block={config.block}, "
            f"max_seq_length={self.max_seq_length}"
        )

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Memory of its own: formats for checkpoints refuse tensors that share it, or would leave one out.
        destination[prefix + "master_layout"] = self.master_layout.clone(memory_format=torch.contiguous_format)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        """Takes a layout of any length from a checkpoint, and does not miss one that is not there."""
        layout = state_dict.pop(prefix + "master_layout", None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if layout is not None:
            try:
                self.master_layout = layout
            except (TypeError, ValueError) as error:
                errors.append(
                    f"{prefix}master_layout: {error} Build the model with the sparsity config that the checkpoint was "
                    "trained with."
                )


class StructuredAttention:
    """Attention on the live blocks of a structure, for sequences of any length: what all attention layers are made of.

    Layers that hold the same object share its layouts and their indices.

    Args:
        sparsity_config, max_seq_length, implementation: as `SparseSelfAttention` has them, and so are the layouts for
            other lengths and what ranks do about random blocks.

    Call:
        query: (B, H, T, D), any strides, any T above 0.
        key, value: alike, or with fewer heads, which divide H: query head h reads head h // (H / their number).
        scale: factor of the scores, 1 / sqrt(D) by default.
        dropout_p: probability with which attention probabilities are dropped.
        rpe: relative position bias (B or 1, H or 1, T, T), added after scaling.
        key_padding_mask: (B or 1, T); attn_mask: (T, T), or (B or 1, H or 1, T or 1, T). Bool keeps where True, a
            float is added.
        Returns (B, H, T, D); rows with nothing left are zeros.

    Raises:
        ValueError: as `SparseSelfAttention`; in the call, a mask that is neither bool nor floating.
        NotImplementedError: in the call, shapes of query, key and value differ in more than that.
    """

    def __init__(self, sparsity_config: SparsityConfig, max_seq_length: int, implementation: str = "fused"):
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation is {implementation!r}; it has to be 'fused' or 'separate'.")
        self.sparsity_config = sparsity_config
        self.implementation = implementation
        self._master = self._build(max_seq_length)
        self._awaits_other_ranks = without_seed(sparsity_config)
        self._synchronize_layout()

    @property
    def layout(self) -> torch.Tensor:
        """The layout for `max_seq_length` tokens: bool (H, R, R), H = 1 when all heads are equal; assign to replace
        it."""
        return self._master.layout

    @layout.setter
    def layout(self, layout: torch.Tensor) -> None:
        if layout is self.layout_buffer():
            return
        self._replace(plain("master_layout", layout) if isinstance(layout, torch.Tensor) else layout)

    @lasting
    def _replace(self, layout: torch.Tensor) -> None:
        replacement = _Layout(layout, self.sparsity_config.block, self.sparsity_config.num_heads)
        if not torch.equal(replacement.layout, self._master.layout):
            self._master = replacement

    @property
    def max_seq_length(self) -> int:
        """Tokens that `layout` covers."""
        return self._master.blocks * self.sparsity_config.block

    def layout_buffer(self) -> LayoutBuffer:
        """The layout as DeepSpeed kept it."""
        return LayoutBuffer.of(self._master, self.sparsity_config.num_heads)

    def layout_for(self, seq_len: int) -> torch.Tensor:
        """The layout for `seq_len` tokens: bool (1 or H, R, R), the last block perhaps short."""
        blocks = -(-seq_len // self.sparsity_config.block)
        return crop(self._covering(seq_len).layout, blocks, blocks)

    def index(self, seq_len: int, device: torch.device) -> BlockIndex:
        """The index for `seq_len` tokens, rounded up to whole blocks."""
        return self._covering(seq_len).index(seq_len, device)

    def ops(self, seq_len: int, device: torch.device) -> SparseOps:
        """The separate operations for `seq_len` tokens, rounded up to whole blocks; they share one index."""
        return self._covering(seq_len).ops(seq_len, device)

    def ops_made(self) -> dict[int, SparseOps]:
        """What `ops` has made and still keeps, by length."""
        layouts = (self._master, *self._master.longer.values())
        return {blocks * layout.block: ops for layout in layouts for (blocks, _), ops in layout._ops.items()}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None = None,
        dropout_p: float = 0.0,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._check(query, key, value, rpe, key_padding_mask, attn_mask)
        self._synchronize_layout()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        causal = getattr(self.sparsity_config, "causal", False)
        masks = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        if self.implementation == "separate":
            return self._attend_separately(query, key, value, scale, causal, dropout_p, **masks)
        layout = self._covering(query.shape[2])
        return block_sparse_attention(
            query, key, value, layout, scale=scale, causal=causal, dropout_p=dropout_p, **masks
        )

    def _attend_separately(
        self, query, key, value, scale, causal, dropout_p, *, rpe, key_padding_mask, attn_mask
    ) -> torch.Tensor:
        heads, tokens = query.shape[1:3]
        if key.shape[1] != heads:
            key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
        missing = -tokens % self.sparsity_config.block
        if missing:
            query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
            rpe, attn_mask = _pad_pairs(rpe, missing), _pad_pairs(attn_mask, missing)
            key_padding_mask = _pad_keys(key_padding_mask, tokens, missing, query.device)
        ops = self.ops(tokens, query.device)
        scores = ops.scores(query, key)
        probs = ops.softmax(
            scores,
            scale=scale,
            rpe=None if rpe is None else rpe.to(scores.dtype),
            causal=causal,
            **_softmax_mask("key_padding_mask", key_padding_mask, scores.dtype),
            **_softmax_mask("attn_mask", attn_mask, scores.dtype),
        )
        if dropout_p:
            probs = dropout(probs, dropout_p)
        output = ops.output(probs, value)
        return output[:, :, :tokens] if missing else output

    def _check(self, query, key, value, rpe, key_padding_mask, attn_mask) -> None:
        alike = key.shape == value.shape and key.shape[:1] + key.shape[2:] == query.shape[:1] + query.shape[2:]
        if not alike or not key.shape[1] or query.shape[1] % key.shape[1]:
            raise NotImplementedError(
                f"only self-attention is supported for now: query, key and value have to be (B, H, T, D) alike, where "
                f"key and value may have fewer heads that divide H; got {tuple(query.shape)}, {tuple(key.shape)} and "
                f"{tuple(value.shape)}"
            )
        if query.shape[1] != self.sparsity_config.num_heads:
            raise ValueError(
                f"query has {query.shape[1]} heads and the sparsity config num_heads={self.sparsity_config.num_heads}; "
                "build the sparsity config with the number of heads that reach this module."
            )
        if query.shape[2] == 0:
            raise ValueError(f"query has shape {tuple(query.shape)}, without a token; give at least one.")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise ValueError(
                    f"{name} is {mask.dtype}; it has to be bool (keeps where True) or floating (added to the scores)."
                )
        batch, heads, tokens, _ = query.shape
        _check_broadcasts("rpe", rpe, (batch, heads, tokens, tokens))
        _check_broadcasts("key_padding_mask", key_padding_mask, (batch, tokens))
        _check_broadcasts("attn_mask", attn_mask, (batch, heads, tokens, tokens))

    @lasting
    @on_cpu()
    def _build(self, seq_len: int) -> _Layout:
        config = self.sparsity_config
        if seq_len % config.block:
            raise ValueError(f"Sequence Length, {seq_len}, needs to be dividable by Block size {config.block}!")
        make = getattr(config, "make_bool_layout", config.make_layout)
        return _Layout(make(seq_len), config.block, config.num_heads)

    def _covering(self, seq_len: int) -> _Layout:
        """The layout whose top-left part serves so many tokens."""
        if seq_len <= self.max_seq_length:
            return self._master
        longer, blocks = self._master.longer, -(-seq_len // self.sparsity_config.block)
        if blocks not in longer:
            seq_len = blocks * self.sparsity_config.block
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"The sequence has {seq_len} tokens, the layout was made for {self.max_seq_length}, and a longer one "
                    f"cannot be made under torch.compile; build the module with max_seq_length={seq_len}."
                )
            if world_size() > 1 and without_seed(self.sparsity_config):
                raise ValueError(
                    f"The sequence has {seq_len} tokens, the layout was made for {self.max_seq_length}, and a longer "
                    f"one would be drawn differently by each rank; build the module with max_seq_length={seq_len}, or "
                    "give the structure a seed."
                )
            longer[blocks] = self._build(seq_len)
        return longer[blocks]

    def _synchronize_layout(self) -> None:
        """Takes rank 0's layout where ranks may have drawn different ones (DeepSpeed PR 534)."""
        distributed = torch.distributed
        if self._awaits_other_ranks and distributed.is_available() and distributed.is_initialized():
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "The random blocks have still to be taken from rank 0, which torch.compile cannot trace; call the "
                    "module once before, build it after torch.distributed is initialised, or give the structure a seed."
                )
            self.layout = from_rank_0(self._master.layout)
            self._awaits_other_ranks = False


class _Layout(MasterLayout):
    """A structure's layout with its separate operations, and the layouts of longer sequences, by their blocks. Copies of
    a module share it."""

    def __init__(self, layout: torch.Tensor, block: int, num_heads: int):
        layout = as_bool_layout(layout).cpu()
        heads, rows, columns = layout.shape
        if heads not in (1, num_heads) or rows != columns:
            raise ValueError(
                f"A layout of shape {tuple(layout.shape)} is given for {num_heads} heads; it has to be ({num_heads}, "
                "R, R)."
            )
        super().__init__(share_equal_heads(layout), block, num_heads)
        self.longer: dict[int, _Layout] = {}
        self._ops: OrderedDict[tuple[int, torch.device], SparseOps] = OrderedDict()

    def ops(self, tokens: int, device: torch.device) -> SparseOps:
        def build() -> SparseOps:
            # With all heads that it stands for, as these operations say in `spdims` and `num_blocks`.
            index = self.index(tokens, device).for_heads(self.num_heads)
            return SparseOps(
                scores=MatMul(index, self.block, "sdd", trans_b=True),
                softmax=Softmax(index, self.block),
                output=MatMul(index, self.block, "dsd"),
            )

        return kept(self._ops, (-(-tokens // self.block), device), build)

    def __reduce__(self):
        return _Layout, (self.layout, self.block, self.num_heads), {"longer": self.longer}


def whole_blocks(tokens: int, block: int) -> int:
    """Tokens rounded up to a multiple of the block."""
    return -(-tokens // block) * block


def of_keys_or_pairs(mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The argument of `StructuredAttention` for a mask that models give: (B, T) is about keys, any other about pairs of
    tokens."""
    return {} if mask is None else {"key_padding_mask" if mask.dim() == 2 else "attn_mask": mask}


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


def _softmax_mask(name: str, mask: torch.Tensor | None, dtype: torch.dtype) -> dict[str, torch.Tensor | str]:
    """The arguments of Softmax for a mask that keeps where True, or is added."""
    if mask is None:
        return {}
    if mask.dtype == torch.bool:
        return {name: mask, f"{name}_mode": "mul"}
    return {name: as_additive(name, mask, dtype), f"{name}_mode": "add"}


def _check_broadcasts(name: str, given: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `given` has this shape or its last two dimensions, of which all but the last may be
    1."""
    if given is None:
        return
    sizes = tuple(given.shape)
    fits = len(sizes) in (2, len(shape)) and sizes[-1] == shape[-1]
    if not fits or any(size != 1 and size != full for size, full in zip(sizes, shape[-len(sizes) :], strict=True)):
        shorter = f", or {shape[2:]}" if len(shape) > 2 else ""
        raise ValueError(f"{name} has shape {sizes}; it has to be {shape}, where all but the last may be 1{shorter}.")


def _pad_pairs(mask: torch.Tensor | None, missing: int) -> torch.Tensor | None:
    """Pads what is added to or masks pairs of tokens, (..., T or 1, T); what it says about padding does not matter."""
    return None if mask is None else pad(mask, (0, missing, 0, missing if mask.shape[-2] > 1 else 0))


def _pad_keys(mask: torch.Tensor | None, tokens: int, missing: int, device: torch.device) -> torch.Tensor:
    """A key padding mask (B or 1, T) that also masks the keys that were added, (B or 1, T + missing)."""
    if mask is None:
        mask = torch.ones(1, tokens, dtype=torch.bool, device=device)
    return pad(mask, (0, missing), value=False if mask.dtype == torch.bool else float("-inf"))
