"""Operations on block-sparse matrices and on windows: public classes, their checks, fake kernels and gradients."""

from ._library import BLOCK_OPERATORS, missing_kernels
from .attention import block_sparse_attention
from .matmul import MatMul
from .softmax import Softmax
from .window import unwindow_matmul, window_matmul, window_softmax
from .window_attention import window_attention

__all__ = [
    "BLOCK_OPERATORS",
    "MatMul",
    "Softmax",
    "block_sparse_attention",
    "missing_kernels",
    "unwindow_matmul",
    "window_attention",
    "window_matmul",
    "window_softmax",
]
