"""`deepspeed.ops.sparse_attention` as it was in DeepSpeed 0.3 to 0.19.6, on ds_sparse."""

from ds_sparse import (  # noqa: F401
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

from . import (  # noqa: F401
    bert_sparse_self_attention,
    matmul,
    softmax,
    sparse_attention_utils,
    sparse_attn_op,
    sparse_self_attention,
    sparsity_config,
    trsrc,
)

__all__ = [name for name in vars() if not name.startswith("_")]
