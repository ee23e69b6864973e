"""Steps of BERT on several ranks as JSON of a benchmark holds them: what was measured, and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_sparse.bench.runs import rows_by_case

ALONE, DATA, SEQUENCE = "alone", "data", "sequence"
"""What ranks do: one computes a sequence, each computes one of its own, all share one."""

SEVERAL = (DATA, SEQUENCE)

KEPT, CHECKPOINTED, OFFLOADED = "kept", "checkpointed", "offloaded"
ACTIVATIONS = (KEPT, CHECKPOINTED, OFFLOADED)
"""What becomes of activations until backward: all are kept; each layer's input is, on the GPU, or on the CPU."""


EXCHANGE, REDUCTION = "all-to-all", "reduction of gradients"
"""What ranks send, as profiles of a step name it."""


@dataclass(frozen=True)
class Case:
    """A training step of BERT with sequences of `seq_len` tokens, or as many a rank.

    Attributes:
        structure: of `IN_BERT`.
        activations: of `ACTIVATIONS`.
        tiles: parts of a rank's tokens in which MLPs and the loss are computed, one after the other.
        micro_batches: forward and backward passes of a step, whose gradients are added up.
        tokens: of a pass, which has one sequence where these are fewer than a sequence's, else as many as fit.
    """

    seq_len: int
    structure: str
    dtype: str
    device: str
    zero_stage: int
    activations: str = KEPT
    tiles: int = 1
    micro_batches: int = 1
    tokens: int = 0

    @property
    def sequences(self) -> int:
        """Of a pass, on one rank or on those that share them."""
        return max(1, self.tokens // self.seq_len)


@dataclass(frozen=True)
class Row:
    """One case on some ranks; numbers are None where it was not measured, and `reason` says why.

    Attributes:
        parallel: ALONE, DATA or SEQUENCE.
        efficiency: tokens a second over those of as many ranks as fast as the one alone.
        peak_gib: memory on a rank's GPU at its highest, of the rank that has most; None on a CPU.
        loss, gradient_norm: of the first step; a rank's own sequence has the loss of rank 0.
        loss_alone, gradient_norm_alone: the same of the one rank.
        profile: milliseconds of a step by where they go.
        memory: GiB by what it is for.
        is_try: it was looked for the longest sequence that fits.
    """

    ranks: int
    parallel: str
    milliseconds: float | None = None
    tokens_per_second: float | None = None
    efficiency: float | None = None
    peak_gib: float | None = None
    loss: float | None = None
    gradient_norm: float | None = None
    loss_alone: float | None = None
    gradient_norm_alone: float | None = None
    profile: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    is_try: bool = False
    rounds: int = 0
    reason: str = ""


Result = tuple[Case, list[Row]]
"""A case, measured."""


def ranks_of(case: Case, row: Row) -> str:
    return f"{row.ranks} {'rank' if row.ranks == 1 else 'ranks'}{sequences_of(case, row)}"


def sequences_of(case: Case, row: Row) -> str:
    """What ranks have, behind their number."""
    if case.sequences == 1:
        return {ALONE: "", DATA: ", a sequence each", SEQUENCE: ", one sequence"}[row.parallel]
    has = {ALONE: "", DATA: " each", SEQUENCE: " that they share"}[row.parallel]
    return f", {case.sequences} sequences{has}"


def restore(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """The results whose `record` these are, one after the other.

    Raises:
        ValueError: a row lacks a field, or has one of another type.
    """
    return rows_by_case(Case, Row, rows)
