"""Families of models, a file each: how the attention layers of a kind of models become sparse."""

from ._registry import Family, families, register_family
from .bing_bert import BingBert
from .multihead_attention import MultiheadAttention
from .scaled_dot_product_attention import ScaledDotProductAttention

register_family(BingBert())
register_family(ScaledDotProductAttention())
register_family(MultiheadAttention())

__all__ = ["Family", "families", "register_family"]
