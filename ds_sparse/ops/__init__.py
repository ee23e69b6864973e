"""Operations on block-sparse matrices and on lists of tokens: public classes, their checks, fake kernels, gradients."""

from ._library import missing_kernels
from .attention import block_sparse_attention
from .matmul import MatMul
from .softmax import Softmax
from .token import sparse_attn, sparse_matmul, sparse_matmul_vo
from .token_steps import gather_attention, jagged_attention, masked_attention, torch_sparse_attention

__all__ = [
    "MatMul",
    "Softmax",
    "block_sparse_attention",
    "gather_attention",
    "jagged_attention",
    "masked_attention",
    "missing_kernels",
    "sparse_attn",
    "sparse_matmul",
    "sparse_matmul_vo",
    "torch_sparse_attention",
]
