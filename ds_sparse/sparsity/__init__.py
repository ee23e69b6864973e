"""Sparsity structures: each is a class that lays out which blocks of the attention matrix exist."""

from ._base import SparsityConfig
from ._registry import register_sparsity, sparsity_class, sparsity_modes
from .bigbird import BigBirdSparsityConfig
from .bslongformer import BSLongformerSparsityConfig
from .chosen import ChosenSparsityConfig, adds_parameters
from .declarations import SparsityWarning, declared
from .dense import DenseSparsityConfig
from .fixed import FixedSparsityConfig
from .indexer import IndexerSparsityConfig
from .local_sliding_window import LocalSlidingWindowSparsityConfig
from .moba import MobaSparsityConfig
from .nsa import NativeSparsityConfig
from .transformers_bigbird import TransformersBigBirdSparsityConfig
from .variable import VariableSparsityConfig

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "ChosenSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "IndexerSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "MobaSparsityConfig",
    "NativeSparsityConfig",
    "SparsityConfig",
    "SparsityWarning",
    "TransformersBigBirdSparsityConfig",
    "VariableSparsityConfig",
    "adds_parameters",
    "declared",
    "register_sparsity",
    "sparsity_class",
    "sparsity_modes",
]
