"""Sequence parallelism: ranks hold parts of one sequence, and exchange heads around attention (Ulysses), or keys."""

from .attention import SequenceParallelAttention
from .batches import sequence_batches

__all__ = ["SequenceParallelAttention", "sequence_batches"]
