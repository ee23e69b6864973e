"""PyTorch's own block-sparse operations: Triton kernels over block-sparse rows, in `torch.sparse._triton_ops`.

They are forward only and run with the parameters that PyTorch has for the device, or its defaults. Each gets its inputs
as it wants them: no copy is timed that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .reasons import Unsupported

NO_BACKWARD = "torch.sparse's block-sparse operations are forward only"


def bsr_operations(layout: Tensor, block: int, matrices: int, dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Calls by our operations' names, with the same operands and results.

    There is no dense @ sparse; "dds" is (sparse @ dense^T)^T. The result of "sdd" is the same memory at every call,
    that of "softmax" is (matrices, V, b, b), in an order that cannot be viewed as (B, H * V, b, b).
    layout: bool (1, R, C) on the device, of all `matrices`, heads of all sequences.

    Raises:
        Unsupported: no GPU, no Triton, or blocks below 16.
    """
    if layout.device.type != "cuda":
        raise Unsupported("on a GPU only: on a CPU PyTorch has one product, of a single fp32 matrix in blocks")
    from torch.sparse import _triton_ops

    if _triton_ops.bsr_dense_mm is None:
        raise Unsupported("needs Triton")
    if block < 16:
        raise Unsupported("blocks of 16 and more only")

    (live,) = layout
    counts = live.sum(1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).repeat(matrices, 1)
    columns = live.nonzero()[:, 1].repeat(matrices, 1)
    blocks, longest_row = columns.shape[1], int(counts.max()) * block

    def sparse(values: Tensor) -> Tensor:
        """(B, V, b, b) -> block-sparse rows (matrices, T, T) of the same memory."""
        return torch.sparse_compressed_tensor(
            offsets,
            columns,
            values.reshape(matrices, blocks, block, block),
            size=(matrices, *(side * block for side in live.shape)),
            layout=torch.sparse_bsr,
            check_invariants=False,
        )

    # Given its own input for the result, the product in blocks does not copy one to the other before it begins.
    result = sparse(torch.zeros(matrices, blocks, block, block, dtype=dtype, device=layout.device))

    def sdd(query: Tensor, key: Tensor) -> Tensor:
        left, right = query.flatten(0, 1), key.flatten(0, 1).mT
        product = _triton_ops.sampled_addmm(result, left, right, beta=0.0, out=result)
        return product.values().view(query.shape[0], -1, block, block)

    def softmax(scores: Tensor) -> Tensor:
        return _triton_ops.bsr_softmax(sparse(scores), max_row_nnz=longest_row).values()

    def dsd(probs: Tensor, value: Tensor) -> Tensor:
        return _triton_ops.bsr_dense_mm(sparse(probs), value.flatten(0, 1)).view(value.shape)

    def dds(value: Tensor, probs: Tensor) -> Tensor:
        return dsd(probs, value.mT).mT

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        return _triton_ops._scaled_dot_product_attention(q, k, v, attn_mask=result).view(query.shape)

    return {"sdd": sdd, "softmax": softmax, "dsd": dsd, "dds": dds, "attention": attention}
