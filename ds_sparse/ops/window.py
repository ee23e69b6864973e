"""Products and softmax of windows: what a token has with those around it, as a band of 2 * window_size + 1 numbers."""

from __future__ import annotations

import torch

from .._ops import ops
from ..dispatch import Call, choose, dtypes_on
from ..index.kernels import require_kernel
from ..index.window_sizes import Numbers, of_heads
from ..tools.memory import refuse_too_large
from ._autograd import Function, differentiable_once, product_function
from ._library import check_alike, check_dtype, check_inputs, check_scale, shapes_of, under_autocast
from .operands import check_bias, key_bias_of, wide_dtype

MAX_WINDOW = 1 << 30
"""A band has fewer than 2**31 numbers a token."""


def window_matmul(a: torch.Tensor, b: torch.Tensor, window_size: int) -> torch.Tensor:
    """a @ b near the diagonal: result[..., i, j] = a[..., i, :] @ b[..., :, i + j - window_size].

    Where there is no such column the result is 0: a softmax over it has to leave these out, as `window_softmax` does.
    Differentiable in a and b; nothing outside the windows is computed or stored. Under autocast a and b are cast.

    Source: `window_matmul` of pytorch-window-matmul (F. Schlatt, 2023); the idea: Beltagy et al., "Longformer", 2020.

    Args:
        a: (..., T, D), fp16, bf16 or fp32, on the CPU also fp64. Any strides.
        b: (..., D, T), such as keys transposed. Leading dimensions broadcast, as in torch.matmul.
        window_size: how many tokens each sees on both sides, 0 or more; T or more is everything. One number for all
            heads, as the result has one width: for narrower heads take the widest, and `window_softmax` with theirs.

    Returns:
        (..., T, 2 * window_size + 1) in a's dtype.

    Raises:
        TypeError: operands that are no tensors; a window_size that is no integer.
        ValueError: a window_size below 0 or from `2**30` on; shapes, dtypes or devices that do not fit.
        MemoryError: the band is larger than the device's memory.
        RuntimeError: a device without the kernel.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> query = key = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ds_sparse.window_matmul(query, key.mT, 1)
        tensor([[0., 1., 2.],
                [2., 4., 6.],
                [6., 9., 0.]])
    """
    check_inputs(a=a, b=b)
    a, b = under_autocast(a, b)
    window = _one_window(window_size)
    if a.dim() < 2 or b.dim() < 2 or a.shape[-2:] != b.shape[:-3:-1]:
        raise ValueError(
            f"Shapes are {shapes_of(a=a, b=b)}; they have to be (..., T, D) and (..., D, T), with the same T and D."
        )
    leading = _leading(a=a, b=b)
    if not torch.compiler.is_compiling():
        _refuse_wide(a, leading, window)
    require_kernel("window_matmul", a.device)
    band = _WindowMatmul.apply(_with_heads(a, leading), _with_heads(b.transpose(-1, -2), leading), (window,))
    return band.reshape(*leading, *band.shape[2:])


def unwindow_matmul(p: torch.Tensor, v: torch.Tensor, window_size: int) -> torch.Tensor:
    """The product of a band and v: result[..., i, :] = sum over j of p[..., i, j] * v[..., i + j - window_size, :].

    Numbers of p for tokens that there are not are left out, whatever they are, and have zero gradient. Differentiable
    in p and v. Under autocast p and v are cast.

    Source: as of `window_matmul`.

    Args:
        p: (..., T, 2 * window_size + 1), such as what `window_softmax` gives; fp16, bf16 or fp32, on the CPU also fp64.
            Any strides.
        v: (..., T, D). Leading dimensions broadcast, as in torch.matmul.
        window_size: 0 or more, the same for all heads.

    Returns:
        (..., T, D) in p's dtype.

    Raises:
        TypeError: operands that are no tensors; a window_size that is no integer.
        ValueError: a window_size below 0 or from `2**30` on; shapes, dtypes or devices that do not fit.
        RuntimeError: a device without the kernel.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> value = torch.tensor([[1.0], [2.0], [3.0]])
        >>> ds_sparse.unwindow_matmul(torch.ones(3, 3), value, 1)
        tensor([[3.],
                [6.],
                [5.]])
    """
    check_inputs(p=p, v=v)
    p, v = under_autocast(p, v)
    window = _one_window(window_size)
    if p.dim() < 2 or v.dim() < 2 or p.shape[-2] != v.shape[-2] or p.shape[-1] != 2 * window + 1:
        raise ValueError(
            f"Shapes are {shapes_of(p=p, v=v)}; with window_size {window} they have to be "
            f"(..., T, {2 * window + 1}) and (..., T, D), with the same T."
        )
    leading = _leading(p=p, v=v)
    require_kernel("unwindow_matmul", p.device)
    output = _UnwindowMatmul.apply(_with_heads(p, leading), _with_heads(v, leading), ())
    return output.reshape(*leading, *output.shape[2:])


def window_softmax(
    scores: torch.Tensor,
    window_size: Numbers,
    *,
    scale: float = 1.0,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row softmax of scale * scores over each token's window, without what is beyond the ends of the sequence.

    `window_matmul` has zeros there, which would take part in a plain softmax over the band. Differentiable in scores.
    A row with nothing left is zeros, with zero gradient.

    Args:
        scores: (..., T, 2 * window_size + 1) as of `window_matmul`; (B, H, T, 2 * window_size + 1) where a mask or a
            window a head is given. fp16, bf16 or fp32, on the CPU also fp64.
        window_size: 0 or more; or one a head, H integers, and then the scores are those of the widest.
        scale: factor of the scores.
        causal: tokens see none after them.
        key_padding_mask: (B or 1, T); bool keeps where True, float is added.

    Returns:
        of the shape and dtype of scores; 0 outside the windows.

    Raises:
        TypeError: operands that are no tensors; a window_size that holds other than integers; a scale that is no
            number.
        ValueError: shapes, dtypes, devices or a scale that do not fit; a mask or a scale that requires a gradient.
        RuntimeError: a device without the kernel.

    Examples:
        >>> import torch
        >>> import ds_sparse
        >>> ds_sparse.window_softmax(torch.zeros(4, 3), 1, causal=True)
        tensor([[0.0000, 1.0000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.5000, 0.5000, 0.0000],
                [0.5000, 0.5000, 0.0000]])
    """
    check_inputs(scores=scores, key_padding_mask=key_padding_mask)
    check_dtype(scores)
    _refuse_float64_on_cuda(scores)
    scale, windows = check_scale(scale), of_heads("window_size", window_size, 0)
    if scores.dim() < 2 or scores.shape[-1] != 2 * max(windows) + 1:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; with window_size {max(windows)} it has to be "
            f"(..., T, {2 * max(windows) + 1})."
        )
    if scores.dim() != 4 and (key_padding_mask is not None or len(windows) > 1):
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; with a key_padding_mask, or a window_size a head, it has to be "
            "(B, H, T, 2 * window_size + 1)."
        )
    band = _with_heads(scores, scores.shape[:-2])
    batch, heads, tokens, _ = band.shape
    windows = of_heads("window_size", windows, 0, heads)
    check_bias("key_padding_mask", key_padding_mask, band, (batch, tokens), (2,), "scores")
    require_kernel("window_softmax_forward", scores.device)
    key_bias = None
    if key_padding_mask is not None:
        key_bias = key_bias_of(key_padding_mask, wide_dtype(scores.dtype), tokens, False)
    return _WindowSoftmax.apply(band, key_bias, windows, scale, causal).reshape(scores.shape)


def _one_window(window_size: int) -> int:
    windows = of_heads("window_size", window_size, 0)
    if len(windows) > 1:
        raise ValueError(
            f"window_size has {len(windows)} numbers, and the band has one width; give the widest, and window_softmax "
            "that of each head."
        )
    if windows[0] >= MAX_WINDOW:
        raise ValueError(f"window_size is {window_size!r}; of a band it has to be below 2**30.")
    return windows[0]


def _refuse_wide(a: torch.Tensor, leading: torch.Size, window: int) -> None:
    """Raises MemoryError where the band of a and another operand can never fit."""
    tokens, width = a.shape[-2], 2 * window + 1
    size = max(1, leading.numel() * tokens) * width * a.element_size()
    refuse_too_large(
        lambda: f"With window_size {window} a band of {width} numbers for each of {tokens} tokens",
        size,
        a.device,
        f"{tokens} is a window over all of them, and the rest of the band is 0",
    )


def _leading(**operands: torch.Tensor) -> torch.Size:
    """The leading dimensions of a product, after a check of what the operands have to have in common."""
    check_alike(**operands)
    _refuse_float64_on_cuda(next(iter(operands.values())))
    try:
        return torch.broadcast_shapes(*(x.shape[:-2] for x in operands.values()))
    except RuntimeError:
        shapes = shapes_of(**operands)
        raise ValueError(f"Shapes are {shapes}; all but the last two dimensions have to broadcast.") from None


def _refuse_float64_on_cuda(x: torch.Tensor) -> None:
    if x.dtype not in dtypes_on("window_matmul", x.device):
        raise ValueError(
            "Tensors are float64 on CUDA, where operations of windows take float16, bfloat16 and float32; use one of "
            "these, or the CPU."
        )


def _with_heads(x: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    """x with the leading dimensions, as (B, H, ...)."""
    x = x.expand(*leading, -1, -1)
    if len(leading) > 2:
        return x.flatten(0, -4)
    return x[(None,) * (2 - len(leading))]


def _band(a: torch.Tensor, b: torch.Tensor, window: int, forced: str | None = None) -> torch.Tensor:
    """The band of a and b, both (B, H, T, D). forced: as of `dispatch.choose`."""
    return ops.window_matmul(a, b, window, band_implementation(a, b, window, forced))


def band_implementation(a: torch.Tensor, b: torch.Tensor, window: int, forced: str | None = None) -> str:
    """The name of what makes the band of a and b, both (B, H, T, D)."""
    call = Call(a.device, a.dtype, a.shape[-1], operands=(a, b), window=window)
    return choose("window_matmul", call, forced).name


_WindowMatmul = product_function(
    "_WindowMatmul",
    "window_matmul",
    _band,
    lambda grad, a, b, window, forced: ops.unwindow_matmul(grad, b, False),
    lambda grad, a, b, window, forced: ops.unwindow_matmul(grad, a, True),
)
"""The band of a and b, both (B, H, T, D)."""

_UnwindowMatmul = product_function(
    "_UnwindowMatmul",
    "unwindow_matmul",
    lambda band, dense: ops.unwindow_matmul(band, dense, False),
    lambda grad, band, dense, forced: _band(grad, dense, band.shape[-1] // 2, forced),
    lambda grad, band, dense, forced: ops.unwindow_matmul(band, grad, True),
)
"""The product of a band (B, H, T, 2 * window + 1) and dense (B, H, T, D)."""


class _WindowSoftmax(Function):
    @staticmethod
    def forward(scores, key_bias, windows: tuple[int, ...], scale: float, causal: bool) -> torch.Tensor:
        return ops.window_softmax_forward(scores.contiguous(), key_bias, windows, scale, causal)

    @staticmethod
    def setup_context(ctx, inputs, probs):
        *_, ctx.scale, _ = inputs
        ctx.save_for_backward(probs)

    @staticmethod
    @differentiable_once("window_softmax")
    def backward(ctx, grad: torch.Tensor):
        (probs,) = ctx.saved_tensors
        grad = ops.window_softmax_backward(grad.contiguous(), probs, ctx.scale)
        return grad, None, None, None, None
