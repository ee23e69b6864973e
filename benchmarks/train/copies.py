"""Copies in DNA: a model names masked bases of sequences in which stretches stand twice, at all distances."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dna import HELD_OUT, TRAINING, MaskedBases, Windows, make_masked, masked, prepare, read, require, stretches
from .genomes import VOCABULARY, N
from .models import LOCAL_GLOBAL, attention_of
from .recall_texts import doublings
from .results import BY_COPY, DENSE, WITHOUT_COPY, Case
from .tasks import IGNORED, log_frequencies
from .trainer import Phase, Task

__all__ = ["default_arms", "phases", "prepare", "require"]

COPIED, QUICK_COPIED = 128, 32
"""Bases of a stretch; the least distance is that of stretches that touch."""

SPACE = 4
"""A copy is tried for as many times its bases; those that meet others are left out."""

ELSEWHERE = 0
"""In place of a distance: no copy."""


def default_arms(case: Case) -> list[str]:
    longest = case.document_tokens
    return [f"{kind}-{longest}" for kind in (DENSE, "bslongformer", "bigbird", LOCAL_GLOBAL)]


def distances_of(case: Case) -> list[int]:
    return list(doublings(QUICK_COPIED if case.quick else COPIED, case.document_tokens // 2))


def with_copies(bases: np.ndarray, case: Case, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, uint8 (N, T), in which stretches stand twice, and int64 (N, T), how far apart: for each base of both
    one of `distances_of`, up to below twice that; all are tried as often. No base belongs to two pairs."""
    length, *_ = distances = distances_of(case)
    copies, found = bases.copy(), np.full(bases.shape, ELSEWHERE)
    for row, of in zip(copies, found, strict=True):
        is_taken: np.ndarray = np.zeros(len(row), bool)
        for least in generator.choice(distances, len(row) // (SPACE * length)):
            apart = generator.integers(least, min(2 * least, len(row) - length))
            start = generator.integers(len(row) - length - apart + 1)
            parts = slice(start, start + length), slice(start + apart, start + apart + length)
            if not any(is_taken[part].any() for part in parts):
                row[parts[1]] = row[parts[0]]
                for part in parts:
                    is_taken[part], of[part] = True, least
    return copies, found


class Copies(MaskedBases):
    """Names hidden bases.

    Args:
        distances: int64 (N, T), of the held-out bases, by `with_copies`.
    """

    def __init__(self, *arguments: Any, distances: np.ndarray) -> None:
        super().__init__(*arguments)
        self.distances = distances[self.held_out[1] != IGNORED]

    def measures(self) -> dict[str, float]:
        """The part of masked bases that is named, by how far away the same stretch stands."""
        losses, right = self.predictions()
        parts = {int(one): right.numpy()[self.distances == one].mean() for one in np.unique(self.distances)}
        elsewhere = {WITHOUT_COPY: float(parts.pop(ELSEWHERE))}
        by_distance = {f"{BY_COPY}{distance}": float(part) for distance, part in parts.items()}
        return {"masked_loss": losses.mean().item()} | by_distance | elsewhere


def phases(case: Case, data: Path, device: torch.device) -> list[Phase]:
    return [partial(make_task, case, data, device)]


def make_task(case: Case, data: Path, device: torch.device, before: Any) -> Task:
    attention, length = attention_of(case.arm), case.document_tokens
    training, held_out = read(data, TRAINING), read(data, HELD_OUT)
    windows = Windows(training, length)

    def drawn(step: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng([case.seed, step])
        bases, _ = windows.drawn(case.tokens_per_step // length, generator)
        return masked(with_copies(bases, case, generator)[0], generator)

    same = np.random.default_rng(0)  # for every arm and seed
    kept = np.concatenate([stretches(held_out, length, is_annotated)[0] for is_annotated in (True, False)])
    asked, distances = with_copies(kept, case, same)
    frequencies = log_frequencies((one.bases[one.bases > N] for one in training), VOCABULARY)
    model = make_masked(attention, case, frequencies, device)
    parts = model, model.base_model, model.cls
    fixed = attention.length, drawn, masked(asked, same), frequencies, case, device
    return Copies("masked bases", *parts, *fixed, distances=distances)
