"""What all jobs of a run have in common, and what each has of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

TINY, SMALL, BASE = "tiny", "small", "base"

MODELS: dict[str, dict[str, int]] = {
    TINY: {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    SMALL: {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    BASE: {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""Sizes, by the names of `BertConfig`."""

LEARNING_RATES = {TINY: 2e-3, SMALL: 4e-4, BASE: 2e-4}
"""Of AdamW at its highest, about 0.2 over the hidden size: a step of Adam changes each weight by as much as the rate,
and a sum over the hidden size so many times. What is too high makes the vectors of all tokens one before a model has
learned more than the frequencies of tokens."""

DOCUMENT_TOKENS = {"quality": 4096, "dna": 65536, "documents": 8192}
"""Experiments, with what `Settings.document_tokens` is by itself. They are modules of this package that have an
`EXPERIMENT`, and are imported when they are asked for."""


@dataclass(frozen=True)
class Settings:
    """What all jobs of a folder share.

    Attributes:
        model: of `MODELS`.
        dtype: what products are computed in; weights are fp32.
        quick: less data, and shorter documents.
        tokens_per_step: of all sequences of a step together.
        document_tokens: tokens of the pieces of documents that are trained on; the longest sequence.
        genomes: the folder that those of `dna` are in; "" for installed ones.
    """

    experiment: str
    model: str
    dtype: str
    device: str
    quick: bool
    tokens_per_step: int
    learning_rate: float
    document_tokens: int
    genomes: str = ""


@dataclass(frozen=True)
class Budget:
    """How much an arm trains: minutes of steps, or tokens; the other is 0."""

    minutes: float = 0.0
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" if self.tokens else f"{self.minutes:g} minute{'s' * (self.minutes != 1)}"


@dataclass(frozen=True)
class Job:
    """What is trained, saved and reported by itself."""

    arm: str
    seed: int
    budget: Budget

    @property
    def name(self) -> str:
        """That of its files."""
        budget = f"{self.budget.tokens}-tokens" if self.budget.tokens else f"{self.budget.minutes:g}-minutes"
        return f"{self.arm}-seed{self.seed}-{budget}"

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}, {self.budget}"


def jobs_of(arms: Sequence[str], seeds: Iterable[int], budgets: Sequence[Budget]) -> Iterator[Job]:
    """All arms with the first seed come first: what is cut off then has something to compare."""
    return (Job(arm, seed, budget) for seed, budget, arm in product(seeds, budgets, arms))
