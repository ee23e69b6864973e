"""BertSparseSelfAttention."""

from ds_sparse import BertSparseSelfAttention, FixedSparsityConfig, SparseSelfAttention

__all__ = ["BertSparseSelfAttention", "FixedSparsityConfig", "SparseSelfAttention"]
