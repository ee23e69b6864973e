"""`deepspeed.ops.sparse_attention` as it was in DeepSpeed 0.3 to 0.19.6, on ds_sparse."""

from ds_sparse import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    MatMul,
    Softmax,
    SparseAttentionUtils,
    SparseSelfAttention,
    SparsityConfig,
    VariableSparsityConfig,
)

from . import (
    bert_sparse_self_attention,
    matmul,
    softmax,
    sparse_attention_utils,
    sparse_attn_op,
    sparse_self_attention,
    sparsity_config,
    trsrc,
)

__all__ = [
    "BSLongformerSparsityConfig",
    "BertSparseSelfAttention",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MatMul",
    "Softmax",
    "SparseAttentionUtils",
    "SparseSelfAttention",
    "SparsityConfig",
    "VariableSparsityConfig",
    "bert_sparse_self_attention",
    "matmul",
    "softmax",
    "sparse_attention_utils",
    "sparse_attn_op",
    "sparse_self_attention",
    "sparsity_config",
    "trsrc",
]
