"""Operations on blocks, windows and lists of token pairs: public functions, their checks, fake kernels, gradients."""

from ..index.kernels import BLOCK_OPERATORS, missing_kernels
from . import operators as operators  # registers them
from ._library import check_inputs
from .attention import block_sparse_attention
from .block_selection import select_blocks, select_blocks_by_compression
from .explanation import Explanation, explain
from .matmul import MatMul
from .selected import selected_attention
from .softmax import Softmax
from .token import sparse_attn, sparse_matmul, sparse_matmul_vo
from .token_steps import gather_attention, jagged_attention, masked_attention, torch_sparse_attention
from .topk import topk_attention
from .window import unwindow_matmul, window_matmul, window_softmax
from .window_attention import window_attention

__all__ = [
    "BLOCK_OPERATORS",
    "Explanation",
    "MatMul",
    "Softmax",
    "block_sparse_attention",
    "check_inputs",
    "explain",
    "gather_attention",
    "jagged_attention",
    "masked_attention",
    "missing_kernels",
    "select_blocks",
    "select_blocks_by_compression",
    "selected_attention",
    "sparse_attn",
    "sparse_matmul",
    "sparse_matmul_vo",
    "topk_attention",
    "torch_sparse_attention",
    "unwindow_matmul",
    "window_attention",
    "window_matmul",
    "window_softmax",
]
