"""The use that a training run makes of its chips: FLOPs of a step over its time and over the chip's peak rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.machine import in_three_digits
from ..tools.hardware import PEAKS_OF_16_BITS
from .layers import in_whole_blocks, kinds_of, live_scores, spread
from .model import Model
from .settings import Settings
from .step import flops_of

TOKENS, TFLOPS, MFU = "tokens_per_second", "model_tflops", "mfu"


@dataclass(frozen=True)
class StepWork:
    """Tokens and FLOPs of a step of a training run.

    Attributes:
        tokens: in a step, of all ranks.
        flops: of a step on one rank: linear layers, and attention of live blocks alone, whose backward pass computes
            scores again. What `--checkpoint-activations` repeats does not count.
        peak: FLOPs a second of the chip by its data sheet; None where they are not known for these numbers.
    """

    tokens: int
    flops: float
    peak: float | None

    @classmethod
    def of(
        cls, block: Mapping[str, Any] | None, source: str, model: Model, settings: Settings, seq_len: int, chip: str
    ) -> StepWork:
        """Counts a step.

        Args:
            block: the `sparse_attention` block; None trains dense.

        Raises:
            ValueError: a block that is wrong, a length that it has no layout for.
        """
        kinds = kinds_of(block, model, source)
        padded = in_whole_blocks(kinds, seq_len)
        live = spread(kinds, [live_scores(kind, model, padded) for kind in kinds])
        peak = PEAKS_OF_16_BITS.get(chip) if settings.dtype != "fp32" else None
        return cls(settings.sequences * seq_len, sum(flops_of(model, settings, padded, live)), peak)

    def figures(self, seconds: float) -> dict[str, float]:
        """Figures of a step that took so long: tokens a second of all ranks; model TFLOP a second of a rank, which has
        a chip of its own; and, where the chip's peak rate is known, the part of it that these are (MFU)."""
        found = {TOKENS: self.tokens / seconds, TFLOPS: self.flops / seconds / 1e12}
        return found if self.peak is None else found | {MFU: self.flops / seconds / self.peak}


def in_words(figures: Mapping[str, float]) -> str:
    """The figures of `StepWork.figures` in a line."""
    words = f"{figures[TOKENS]:,.0f} tokens/s  {in_three_digits(figures[TFLOPS])} TFLOP/s a rank"
    return f"{words} ({figures[MFU]:.1%} MFU)" if MFU in figures else words
