"""MatMul."""

from ds_sparse import MatMul
from ds_sparse.integrations.deepspeed_ops.gone import Gone

__all__ = ["MatMul"]

_sparse_matmul = Gone(f"{__name__}._sparse_matmul", "MatMul(layout, block, mode)(a, b), which is differentiable")
