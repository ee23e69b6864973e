"""Softmax."""

from ds_sparse import Softmax
from ds_sparse.integrations.deepspeed_ops.gone import Gone

__all__ = ["Softmax"]

_sparse_softmax = Gone(f"{__name__}._sparse_softmax", "Softmax(layout, block)(x), which is differentiable")
