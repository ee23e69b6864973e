"""SparseAttentionUtils."""

from ds_sparse import BertSparseSelfAttention, SparseAttentionUtils, SparsityConfig

__all__ = ["BertSparseSelfAttention", "SparseAttentionUtils", "SparsityConfig"]
