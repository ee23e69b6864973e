"""Row softmax over the live blocks of a layout."""

from __future__ import annotations

import warnings

import torch

from .._ops import ops
from ..index import BlockIndex, as_index
from ..index.kernels import require_kernel
from ..index.transforms import while_traced
from ._autograd import Function, differentiable_once
from ._library import check_device, check_dtype, check_inputs, check_scale
from ._on_layout import OnLayout
from .operands import broadcasts
from .remembered import Remembered, Walk, signature

MASK_MODES = ("add", "mul")

_known = Remembered()


class Softmax(OnLayout):
    """probs = softmax(scale * x + rpe + key_padding_mask + attn_mask) by token rows, over live blocks.

    Differentiable in x, and in rpe and the masks where they are added. Out of place. Statistics in fp32 or wider. A row
    with nothing left (no live block, or -inf throughout) gives zeros and zero gradient; finite large negatives such as
    -10000 or finfo.min are ordinary arithmetic (biases below -1e30, and sums of them, count as -1e30). Source:
    DeepSpeed's `Softmax`.

    Args:
        layout: tensor of bool, or of 0 and 1 in any type, (R, C) or (H or 1, R, C), one head shared by any number of
            heads; or a `BlockIndex`. It is read here, once, as `MatMul` reads it.
        block: tokens on a block's side, a power of two, 8 or more.
        bench: accepted for old callers; times are in `ds_sparse bench matmul`.

    Raises:
        TypeError: a layout that is no dense tensor, or of another dtype.
        ValueError: a layout or block that cannot be; an index that was built for another block.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> softmax = ds_sparse.Softmax(torch.eye(2, dtype=torch.bool), 16)
        >>> probs = softmax(torch.zeros(1, 2, 16, 16), causal=True)
        >>> probs.shape, probs[0, 1, 3, :5].tolist()
        (torch.Size([1, 2, 16, 16]), [0.25, 0.25, 0.25, 0.25, 0.0])
    """

    def __init__(self, layout: torch.Tensor | BlockIndex, block: int, bench: bool = False):
        super().__init__(layout, as_index(layout, block).with_strips())

    def __repr__(self) -> str:
        return f"Softmax({self._index})"

    @property
    def num_blocks(self) -> int:
        """V, the live blocks of all heads of the layout."""
        return self._index.num_values(self._index.num_heads)

    def __call__(
        self,
        x: torch.Tensor,
        scale: float = 1.0,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """The probabilities of scores.

        Args:
            x: sparse values (B, V, b, b), or (V, b, b); fp16, bf16, fp32 or fp64.
            scale: factor of x alone.
            rpe: relative position bias (B or 1, H or 1, T, S), x's dtype, added unscaled; leading dimensions may be
                missing.
            key_padding_mask: (B or 1, S), or with dimensions of 1 between. Of one (B, H, S) the first head's counts for
                all, as in DeepSpeed, with a warning.
            attn_mask: (T, S), or (B or 1, H or 1, T or 1, S).
            key_padding_mask_mode, attn_mask_mode: 'add' adds a mask of x's dtype (a bool one as 0 and 1, as DeepSpeed
                did, with a warning); 'mul' keeps where the mask is not zero.
            causal: a token sees no later token, inside blocks too (JSON: "causal").

        Returns:
            Sparse values, of x's shape and dtype.

        Raises:
            TypeError: operands that are no tensors; a scale that is no number.
            ValueError: another mask mode, shape, dtype or device; nested and sparse tensors; a scale that is not
                finite, or requires a gradient.
            RuntimeError: a device without the kernel.
        """
        like = None
        if rpe is key_padding_mask is attn_mask is None:
            modes = key_padding_mask_mode, attn_mask_mode
            like = signature(type(self), (), (x,), (scale, *modes, causal))
            known = None if like is None else _known.get(like)
            if known is not None:
                index = self._index_on(x.device)
                walk = known.walks.get(index)
                if walk is not None:
                    return walk.apply(x, None, None, None, index, None, known.scale, causal, walk)
        check_inputs(x=x, rpe=rpe, key_padding_mask=key_padding_mask, attn_mask=attn_mask)
        if x.dim() == 3:
            x, squeeze = x[None], True
        else:
            squeeze = False
        check_dtype(x)
        scale = check_scale(scale)
        for name, mode in (("Key padding mask", key_padding_mask_mode), ("Attention mask", attn_mask_mode)):
            if mode not in MASK_MODES:
                raise ValueError(
                    f"{name} mode is {mode!r}; it has to be 'add' (added to the scores) or 'mul' (0 drops, else keeps)."
                )
        index = self._index_on(x.device)
        heads = index.heads_of(x.shape[1]) if x.dim() == 4 and x.shape[2:] == (self.block, self.block) else None
        if heads is None:
            expected = (index.num_values(index.num_heads), self.block, self.block)
            raise ValueError(
                f"x has shape {tuple(x.shape)}; the layout's sparse values are (batch, {', '.join(map(str, expected))})"
                + (" times any number of heads." if index.num_heads == 1 else ".")
            )
        batch, tokens, keys = x.shape[0], index.rows * self.block, index.columns * self.block
        if rpe is not None:
            if rpe.dtype != x.dtype:
                raise ValueError(f"relative position embedding must be {x.dtype}")
            rpe = _broadcastable("rpe", rpe, x.device, (batch, heads, tokens, keys))
        if attn_mask is not None:
            attn_mask = _mask("Attention mask", attn_mask, attn_mask_mode, x)
            if attn_mask.dim() == 3:
                raise ValueError(
                    f"attn_mask has shape {tuple(attn_mask.shape)}; it has to be ({tokens}, {keys}) or (batch or 1, "
                    f"heads or 1, {tokens} or 1, {keys}): with 3 dimensions, batch and heads cannot be told apart."
                )
            attn_mask = _broadcastable("attn_mask", attn_mask, x.device, (batch, heads, tokens, keys))
        if key_padding_mask is not None:
            key_padding_mask = of_first_head(key_padding_mask, heads)
            key_padding_mask = _mask("Key padding mask", key_padding_mask, key_padding_mask_mode, x)
            if key_padding_mask.dim() != 2:
                raise ValueError(
                    f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it has to be (batch or 1, {keys})."
                )
            key_padding_mask = _broadcastable("key_padding_mask", key_padding_mask, x.device, (batch, keys))
        require_kernel("softmax_forward", x.device)
        probs = _Softmax.apply(x, rpe, key_padding_mask, attn_mask, index, heads, scale, causal, None)
        if like is not None and not squeeze:
            _known.keep(like, scale, None, index, lambda: _walk_of(index).of_calls_like(_Softmax, (x,)))
        return probs[0] if squeeze else probs


def of_first_head(mask: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S) from a key padding mask (B, H or 1, S) or (B, H or 1, 1, S), with a warning for H; any other as it is."""
    if mask.dim() not in (3, 4) or (mask.dim() == 4 and mask.shape[2] != 1):
        return mask
    if mask.shape[1] != 1 and mask.shape[1] != heads:
        return mask
    if mask.shape[1] > 1 and torch.compiler.is_compiling():
        _warn_in_a_trace()
    elif mask.shape[1] > 1:
        warnings.warn(f"key_padding_mask has shape {tuple(mask.shape)}, {_A_MASK_A_HEAD}", stacklevel=3)
    return mask[:, 0].reshape(len(mask), mask.shape[-1])


_A_MASK_A_HEAD = (
    "a mask a head: the first head's counts for all, as in DeepSpeed. Give (batch, keys); masks that differ by head "
    "are an attn_mask (batch, heads, 1, keys)."
)


@while_traced
def _warn_in_a_trace() -> None:
    """Runs once, while torch.compile traces: a warning in the graph would end it. Without the shape, as sizes may be
    symbols there."""
    warnings.warn(f"key_padding_mask is {_A_MASK_A_HEAD}", stacklevel=2)


def as_additive(name: str, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask that is added to scores, in their dtype.

    Bool and integers are added as the numbers they are, as DeepSpeed did, with a warning. A finite value beyond the
    dtype becomes its largest one: infinite, it would mask.
    """
    if not mask.is_floating_point():
        warnings.warn(
            f"{name} is {mask.dtype} in mode 'add': its values are added to the scores as numbers (True as 1), as "
            "DeepSpeed did; nothing is masked by 0 and 1. To keep where not zero, use mode 'mul'.",
            stacklevel=4,
        )
    if mask.dtype == dtype:
        return mask
    limits = torch.finfo(dtype)
    return mask.to(dtype).clamp(limits.min, limits.max).masked_fill(mask == float("-inf"), float("-inf"))


def _mask(name: str, mask: torch.Tensor, mode: str, x: torch.Tensor) -> torch.Tensor:
    """The mask as the operator wants it: bool to keep where true, or x's dtype to add."""
    if mode == "mul":
        return mask if mask.dtype == torch.bool else mask != 0
    if mask.dtype not in (torch.bool, x.dtype):
        raise ValueError(f"{name} must be {x.dtype}, or bool; got {mask.dtype}")
    return as_additive(name, mask, x.dtype)


def _broadcastable(name: str, x: torch.Tensor, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    """x with leading dimensions of 1 added, its last dimension spelled out."""
    check_device(name, x, device, "x")
    if not broadcasts(x.shape, shape):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it has to be {shape}, where any dimension may be 1.")
    x = x if x.dim() == len(shape) else x.reshape((1,) * (len(shape) - x.dim()) + x.shape)
    return x.expand(*x.shape[:-1], shape[-1])


class _Softmax(Function):
    @staticmethod
    def forward(scores, rpe, key_padding_mask, attn_mask, index: BlockIndex, heads: int | None, scale, causal, walk):
        index.ready()
        walk = _walk_of(index) if walk is None else walk
        return ops.softmax_forward.default(
            scores.contiguous(), rpe, key_padding_mask, attn_mask, *walk.rows, scale, causal
        )

    @staticmethod
    def setup_context(ctx, inputs, probs):
        _, *biases, ctx.index, ctx.heads, ctx.scale, _, ctx.walk = inputs
        ctx.bias_shapes = [None if bias is None else tuple(bias.shape) for bias in biases]
        ctx.save_for_backward(probs)

    @staticmethod
    @differentiable_once("Softmax")
    def backward(ctx, grad: torch.Tensor):
        (probs,) = ctx.saved_tensors
        index, scale = ctx.index, ctx.scale
        index.ready()
        walk = _walk_of(index) if ctx.walk is None else ctx.walk
        wants_bias = any(ctx.needs_input_grad[1:4])
        grad_sum = ops.softmax_backward.default(grad.contiguous(), probs, *walk.rows, 1.0 if wants_bias else scale)
        grads = [grad_sum * scale if wants_bias else grad_sum]
        for wanted, shape in zip(ctx.needs_input_grad[1:4], ctx.bias_shapes):
            grads.append(_bias_gradient(grad_sum, index, ctx.heads, shape) if wanted else None)
        return *grads, None, None, None, None, None


def _walk_of(index: BlockIndex) -> Walk:
    """The live blocks by rows and in strips, with the most elements that one has."""
    lists, strips = index.lists, index.strips
    rows = lists.row_offsets, lists.row_columns, strips.units, strips.most, index.layout_heads, index.block
    return Walk(rows)


def _bias_gradient(grad_sum: torch.Tensor, index: BlockIndex, heads: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient of what was added to the scores, in its own shape (B or 1, S) or (B or 1, H or 1, T or 1, S)."""
    full = shape if len(shape) == 4 else (shape[0], 1, 1, shape[1])
    bias = ops.softmax_bias_backward(
        grad_sum, index.row_offsets, index.row_columns, index.layout_heads, heads, index.block, full
    )
    return bias.to(grad_sum.dtype).reshape(shape)
