"""Sequence parallelism: ranks hold parts of one sequence, and exchange tokens for heads around attention (Ulysses)."""

from .attention import SequenceParallelAttention
from .batches import sequence_batches

__all__ = ["SequenceParallelAttention", "sequence_batches"]
