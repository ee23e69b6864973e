"""The meaning of every operation, in plain PyTorch.

Slow on purpose: what a reader can check by eye, tests hold the kernels to. Everything here is differentiable by
autograd; call it in float64 to judge an implementation.
"""

from __future__ import annotations

import torch

from .layout import as_bool_layout, to_token_mask


def to_dense(values: torch.Tensor, layout: torch.Tensor, block: int, heads: int) -> torch.Tensor:
    """Sparse values (B, V, b, b) -> (B, H, R*b, C*b), zero outside the live blocks."""
    layout = as_bool_layout(layout).expand(heads, -1, -1)
    _, rows, columns = layout.shape
    head, row, column = layout.nonzero(as_tuple=True)
    blocks = values.new_zeros(values.shape[0], heads, rows, columns, block, block)
    blocks = blocks.index_put((torch.arange(len(values))[:, None], head, row, column), values)
    return blocks.transpose(3, 4).reshape(values.shape[0], heads, rows * block, columns * block)


def to_sparse(dense: torch.Tensor, layout: torch.Tensor, block: int) -> torch.Tensor:
    """(B, H, R*b, C*b) -> the live blocks (B, V, b, b) in (head, row, column) order."""
    batch, heads, rows, columns = dense.shape
    layout = as_bool_layout(layout).expand(heads, -1, -1)
    blocks = dense.reshape(batch, heads, rows // block, block, columns // block, block).transpose(3, 4)
    head, row, column = layout.nonzero(as_tuple=True)
    return blocks[:, head, row, column]


def matmul(
    a: torch.Tensor, b: torch.Tensor, layout: torch.Tensor, block: int, mode: str, trans_a: bool, trans_b: bool
) -> torch.Tensor:
    """op(a) @ op(b) with one of a, b (mode 'dsd', 'dds') or the result ('sdd') block-sparse; 4-D operands.

    The dense operand sets the number of heads. Source: DeepSpeed's `MatMul`.
    """
    if mode == "dsd":
        a = to_dense(a, layout, block, b.shape[1])
    if mode == "dds":
        b = to_dense(b, layout, block, a.shape[1])
    product = (a.transpose(-1, -2) if trans_a else a) @ (b.transpose(-1, -2) if trans_b else b)
    return to_sparse(product, layout, block) if mode == "sdd" else product


def softmax(
    scores: torch.Tensor,
    layout: torch.Tensor,
    block: int,
    heads: int,
    scale: float = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Row softmax of scale * scores + rpe + key_padding_mask + attn_mask over the live blocks of each head.

    Args:
        scores: (B, V, b, b).
        rpe, attn_mask: (B or 1, H or 1, T or 1, S); a bool attn_mask keeps where True, a float one is added.
        key_padding_mask: (B or 1, S); bool keeps where True, float is added.
        causal: a token sees no later token.

    Returns:
        (B, V, b, b); a row with nothing left is zeros.
    """
    dense = to_dense(scores, layout, block, heads) * scale
    tokens, keys = dense.shape[-2:]
    live = to_token_mask(as_bool_layout(layout), block).expand(heads, -1, -1) & (dense != float("-inf"))
    if causal:
        live = live & torch.ones(tokens, keys, dtype=torch.bool, device=dense.device).tril()
    masks = [rpe, attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]]
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            live = live & mask
        else:
            live = live & (mask != float("-inf"))
            dense = dense + mask.masked_fill(mask == float("-inf"), 0)
    dense = dense.masked_fill(~live, float("-inf"))
    alive = live.any(-1, keepdim=True)
    probs = torch.softmax(dense.masked_fill(~alive, 0), dim=-1) * alive
    return to_sparse(probs, layout, block)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: torch.Tensor, block: int, **softmax_arguments
) -> torch.Tensor:
    """softmax(query @ key^T) @ value on the live blocks; (B, H, T, D) each; arguments of `softmax` by name."""
    heads = query.shape[1]
    scores = matmul(query, key, layout, block, "sdd", False, True)
    probs = softmax(scores, layout, block, heads, **softmax_arguments)
    return matmul(probs, value, layout, block, "dsd", False, False)
