"""What is known of a run without times: its memory, and FLOPs of layers that choose their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sequence.deal import check_ranks
from ..sparsity import ChosenSparsityConfig
from ..tools.arguments import UsageError
from ..tools.wording import listed
from .layers import Kind, in_whole_blocks, kinds_of, largest_block, layers_in_words, live_scores, spread
from .memory import Memory, fits, longest, memory_of
from .model import Model
from .settings import Settings
from .step import flops_of


@dataclass(frozen=True)
class Known:
    """Attributes:
    padded: tokens of a sequence, in whole blocks.
    document_tokens: mean tokens of a sequence that are text; None: all.
    memory_gib: of the GPU; None: it is not known.
    longest: tokens of the longest sequence that fits; None: the memory is not known.
    """

    file: str
    model: Model
    settings: Settings
    seq_len: int
    padded: int
    document_tokens: int | None
    memory: Memory
    memory_gib: float | None
    longest: int | None

    @property
    def fits(self) -> bool | None:
        """True where a step fits the GPU; None: its memory is not known."""
        return None if self.memory_gib is None else fits(self.model, self.settings, self.padded, self.memory_gib)


@dataclass(frozen=True)
class Untimed(Known):
    """The plan of a run whose layers choose their blocks.

    Attributes:
        why: the sentence about times, without its end.
        shares: of the scores that are computed, of each kind of layers that choose.
        flops, dense_flops: of a GPU in a step, and where all is dense.
    """

    why: str
    shares: list[float]
    flops: float
    dense_flops: float


def known_of(
    kinds: Sequence[Kind],
    source: str,
    model: Model,
    settings: Settings,
    seq_len: int,
    document_tokens: int | None,
    memory_gib: float | None,
) -> Known:
    """What all plans know.

    Raises:
        UsageError: documents longer than sequences.
    """
    if document_tokens is not None and document_tokens > seq_len:
        raise UsageError(f"--document-tokens {document_tokens} is more than --seq {seq_len}; give their mean length.")
    padded = in_whole_blocks(kinds, seq_len)
    return Known(
        file=source,
        model=model,
        settings=settings,
        seq_len=seq_len,
        padded=padded,
        document_tokens=document_tokens,
        memory=memory_of(model, settings, padded),
        memory_gib=memory_gib,
        longest=None if memory_gib is None else longest(model, settings, largest_block(kinds), memory_gib),
    )


def why_untimed(kinds: Sequence[Kind]) -> str | None:
    """Why layers of these kinds have no times; None where they have."""
    if not (chosen := _chosen(kinds)):
        return None
    who = listed([f"{layers_in_words(kind.layers)} ({kind.in_words()})" for kind in chosen], "and")
    do = f"layer {who} chooses" if sum(len(kind.layers) for kind in chosen) == 1 else f"layers {who} choose"
    return (
        f"{do} blocks in each step, and a plan knows times of layouts alone; ds_sparse bench selected measures "
        "attention on chosen blocks"
    )


def plan_untimed(
    block: Mapping[str, Any] | None,
    source: str,
    model: Model,
    settings: Settings,
    seq_len: int,
    document_tokens: int | None = None,
    memory_gib: float | None = None,
) -> Untimed | None:
    """Plans a run whose layers choose their blocks; None where none does.

    Raises:
        ValueError: a block that is wrong, documents longer than sequences, more ranks of a sequence than heads.
    """
    kinds = kinds_of(block, model, source)
    why = why_untimed(kinds)
    if why is None:
        return None
    known = known_of(kinds, source, model, settings, seq_len, document_tokens, memory_gib)
    check_ranks(model.heads, settings.ranks)
    live = spread(kinds, [live_scores(kind, model, known.padded) for kind in kinds])
    linear, attention = flops_of(model, settings, known.padded, live)
    _, dense = flops_of(model, settings, known.padded, [None] * model.layers)
    shares = [(live[kind.layers[0]] or 0) / known.padded**2 for kind in _chosen(kinds)]
    return Untimed(**vars(known), why=why, shares=shares, flops=linear + attention, dense_flops=linear + dense)


def _chosen(kinds: Sequence[Kind]) -> list[Kind]:
    return [kind for kind in kinds if isinstance(kind.structure, ChosenSparsityConfig)]
