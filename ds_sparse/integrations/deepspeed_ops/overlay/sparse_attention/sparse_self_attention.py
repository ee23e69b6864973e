"""SparseSelfAttention."""

from ds_sparse import SparseSelfAttention, SparsityConfig

__all__ = ["SparseSelfAttention", "SparsityConfig"]
