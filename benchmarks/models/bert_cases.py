"""Steps of BERT as JSON of a benchmark holds them: what was measured, and how fast it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_sparse.bench.runs import rows_by_case

TOKENS = {"cpu": 2048, "cuda": 32768}
"""In a step; one sequence where that is longer."""

BASE = "base"

MODEL: dict[str, dict[str, int]] = {
    "cpu": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 1000,
    },
    "cuda": {},
}
"""What differs from BERT-base, the default of `BertConfig`: on a CPU a small model."""

LABELLED = 0.15
"""Part of the tokens that have a label."""


@dataclass(frozen=True)
class Case:
    """One line of the grid: sequences of `seq_len` tokens, `dropout` in attention and elsewhere.

    Attributes:
        predicts_all: logits of all tokens, as Transformers' model computes them; else of those with a label alone, as
            bing_bert does.
        model: of `MODELS`.
        whole_step: with AdamW, and with the batch copied from the CPU; else forward and backward alone.
        checkpointed: of activations the inputs of layers are kept, and the rest is computed again in backward.
        is_try: one sequence, to see whether it fits.
    """

    seq_len: int
    dropout: float
    dtype: str
    device: str
    predicts_all: bool = True
    model: str = BASE
    whole_step: bool = False
    checkpointed: bool = False
    is_try: bool = False

    @property
    def batch(self) -> int:
        return 1 if self.is_try else max(1, TOKENS[self.device] // self.seq_len)


@dataclass(frozen=True)
class Row:
    """One attention in one case; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        milliseconds: of a step; of a try that of its only one.
        peak_gib: memory on the GPU at its highest during the step, with model, gradients and optimizer; None on a CPU.
    """

    attention: str
    milliseconds: float | None = None
    peak_gib: float | None = None
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def restore(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    return rows_by_case(Case, Row, rows)
