"""Operations on block-sparse matrices: public classes, their checks, fake kernels and gradients."""

from ._library import missing_kernels
from .attention import block_sparse_attention
from .matmul import MatMul
from .softmax import Softmax

__all__ = ["MatMul", "Softmax", "block_sparse_attention", "missing_kernels"]
